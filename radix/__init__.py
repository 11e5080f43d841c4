"""Which blocks exist for a prefix, in which tier each lies, and who may go first."""

if __name__ != "kvstore.radix":
    raise ImportError("import kvstore.radix, not radix: this folder is installed as kvstore.radix")
