"""`python -m torch_hlo.compat train.py ARGUMENTS` runs a script of PyTorch/XLA as it is."""

import os
import runpy
import sys

from . import install_as_torch_xla


def main():
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m torch_hlo.compat train.py [arguments]")
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    install_as_torch_xla()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
