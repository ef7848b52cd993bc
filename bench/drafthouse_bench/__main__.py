"""`python -m drafthouse_bench`: the command line."""

from __future__ import annotations

import sys

from drafthouse_bench.command import main

if __name__ == "__main__":
    sys.exit(main())
