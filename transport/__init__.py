"""Bytes and calls between processes: the gRPC service, its client and the error table."""

if __name__ != "kvstore.transport":
    raise ImportError("import kvstore.transport, not transport: this folder is installed as kvstore.transport")
