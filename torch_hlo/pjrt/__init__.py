"""A PJRT plugin: JAX compiles and runs its programs with this compiler.

In: calls of the PJRT C API, with StableHLO as bytecode or text. Out: arrays in this process's
memory. JAX finds `torch_hlo_jax` by the entry point in the group `jax_plugins`, and that
`initialize`, where `JAX_PLATFORMS=hlo` asks for it. May import everything below `tools/`.

* `objects.py`: what JAX holds pointers to. Their properties are words of memory.
* `functions.py`: the table of functions. Those that only read a property are machine code.
* `client.py`, `arrays.py`, `executables.py`: the other functions, in Python.
* `jax_side.py`: what JAX is told beside the C API.
"""

from .jax_side import initialize

__all__ = ["initialize"]
