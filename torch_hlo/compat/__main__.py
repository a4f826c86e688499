"""`python -m torch_hlo.compat train.py ARGUMENTS` runs a script of PyTorch/XLA as it is;
`python -m torch_hlo.compat -m package.train ARGUMENTS` a module, also one of torch_xla."""

import os
import runpy
import sys

from . import install_as_torch_xla


def main():
    module = sys.argv[1:2] == ["-m"]
    del sys.argv[: 1 + module]
    if not sys.argv:
        raise SystemExit("usage: python -m torch_hlo.compat [-m] train.py [arguments]")
    name = sys.argv[0]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(name))
    install_as_torch_xla()
    if not module:
        runpy.run_path(name, run_name="__main__")
    elif name in sys.modules:  # of torch_xla
        sys.modules[name].main()
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
