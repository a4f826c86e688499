"""Side-by-side measurements: `python -m benchmarks --help`."""

import compileall
from pathlib import Path


def write_bytecode() -> None:
    """What pip does when it installs a package, the peers among them. Where PYTHONDONTWRITEBYTECODE
    is set, each process would compile a checkout's sources anew when it imports them."""
    root = Path(__file__).parents[1]
    for package in ("torch_hlo", "torch_hlo_jax"):
        compileall.compile_dir(root / package, quiet=1)
