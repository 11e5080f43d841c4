"""`python -m kvstore.cli` is the command `kvstore`."""

from __future__ import annotations

import sys

from kvstore.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
