"""One file per engine, the only place that imports that engine."""

if __name__ != "kvstore.connectors":
    raise ImportError("import kvstore.connectors, not connectors: this folder is installed as kvstore.connectors")
