"""`python -m torch_hlo`: see tools/cli.py."""

import sys

from torch_hlo.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
