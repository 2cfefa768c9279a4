"""`python -m ringopt` is the console script `ringopt`."""

from __future__ import annotations

import sys

from ringopt.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
