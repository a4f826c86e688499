"""The two tables that code generation is extended through, and the table of host calls.

    @emits_value("negate")                     # (kernel, x, index) -> Value
    def negate(kernel, x, index):
        return scalar.emit(kernel, x, [kernel.value(x.operands[0], index)])

    @emits_step("fft")                         # (program, x) -> None
    def fft(program, x): ...                   # defines functions, calls them from the entry; see program.py

A value emitter gives the element of `x` at `index` (one kernel.Index per dimension) inside a kernel: W lanes along the
innermost loop, or one scalar when the index does not depend on that loop. Fusion is recursion through `kernel.value`.
A step emitter runs one scheduled top-level instruction: it reads its operands' buffers and fills its own.

    @host_call("eig")                          # (outputs, inputs, **attrs) -> None; NumPy arrays over the buffers
    def eig(outputs, inputs, **attrs): ...     # for rare ops only: the interpreter lock is taken

`load_emitters` imports the modules that most programs need, and every one for a GPU; those of ON_DEMAND are imported for the opcodes they are named for
(importing them all takes 20 ms, a fifth of the first step of a small program). A new module is named in one of the two tables.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

VALUES: dict[str, Callable] = {}
STEPS: dict[str, Callable] = {}
GRID_STEPS: dict[
    str, Callable
] = {}  # the column of GPUs; an opcode without a row there uses that of STEPS
HOST_CALLS: dict[str, Callable] = {}
ALWAYS = ("collective", "control", "host", "indexing", "loop", "reduce", "sort", "views", "window")
ON_DEMAND = {
    "cholesky": "linalg", "convolution": "conv", "dot": "dot", "fft": "fft", "ragged-dot": "ragged", "select-and-scatter": "select_scatter",
    "triangular-solve": "linalg",
}  # fmt: skip
_PACKAGE = __name__.rpartition(".")[0]
_loaded: set[bool] = set()


def _registrar(
    table: dict[str, Callable], names: tuple[str, ...], what: str
) -> Callable[[Callable], Callable]:
    def register(fn: Callable) -> Callable:
        for name in names:
            if name in table:
                raise ValueError(
                    f"{name} has two {what}: {table[name].__module__} and {fn.__module__}"
                )
            table[name] = fn
        return fn

    return register


def emits_value(*opcodes: str) -> Callable[[Callable], Callable]:
    """Register `(kernel, x, index) -> Value` for these opcodes."""
    return _registrar(VALUES, opcodes, "value emitters")


def emits_step(*opcodes: str, grid: bool = False) -> Callable[[Callable], Callable]:
    """Register `(program, x) -> None` for these opcodes; `grid`: only for targets whose kernels run on a grid of threads."""
    return _registrar(GRID_STEPS if grid else STEPS, opcodes, "step emitters")


def step_emitter(opcode: str, target) -> Callable | None:
    """The emitter of an opcode for a target."""
    found = (GRID_STEPS.get(opcode) if target.grid else None) or STEPS.get(opcode)
    if found is None and opcode in ON_DEMAND:
        importlib.import_module(f"{_PACKAGE}.{ON_DEMAND[opcode]}")
        found = STEPS[opcode]
    return found


def host_call(*names: str) -> Callable[[Callable], Callable]:
    """Register `(outputs, inputs, **attrs) -> None`, called with NumPy arrays over the buffers: `outputs` are writable and
    must be filled in place; bf16 and f8 buffers appear as uint16 and uint8 (see hlo.numeric to decode them)."""
    return _registrar(HOST_CALLS, names, "host calls")


def load_emitters(grid: bool = False) -> None:
    """Fill the tables, but for what is imported on demand; for GPUs as well if `grid`."""
    if grid in _loaded:
        return
    for name in ALWAYS:
        importlib.import_module(f"{_PACKAGE}.{name}")
    if grid:
        for module in pkgutil.iter_modules(
            importlib.import_module(f"{_PACKAGE}.gpu").__path__, f"{_PACKAGE}.gpu."
        ):
            importlib.import_module(module.name)
    _loaded.add(grid)
