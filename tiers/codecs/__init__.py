"""How the bytes of a block are stored in a tier: compressed, quantised, encrypted; see tiers/codecs/README.md."""
