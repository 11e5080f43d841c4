"""Where the bytes of blocks lie and how they move: host memory and disk slabs."""

if __name__ != "kvstore.tiers":
    raise ImportError("import kvstore.tiers, not tiers: this folder is installed as kvstore.tiers")
