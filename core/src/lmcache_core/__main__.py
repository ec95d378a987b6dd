"""`python -m lmcache_core`: the command line, where the script `lmcache-core` is not on the path."""

from __future__ import annotations

import sys

from lmcache_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
