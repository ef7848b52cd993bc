"""`python -m drafthouse_server`: the command line."""

from __future__ import annotations

import sys

from drafthouse_server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
