"""Which prefixes engines hold in their own memory, learnt from the KV events that they publish."""
