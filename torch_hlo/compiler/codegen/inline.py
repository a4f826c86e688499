"""Scalar computations (comparators, reducers, combiners) written into the middle of a Function, one element or W lanes at a time.

    less, = apply(f, x["to_apply"], [a, b])        # a, b: register operands of the parameters' types
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_hlo.compiler.codegen import scalar
from torch_hlo.compiler.codegen.emit import Emit
from torch_hlo.compiler.codegen.function import Function
from torch_hlo.compiler.codegen.kernel import Kernel, Level
from torch_hlo.compiler.codegen.scalar import STORAGE, Value
from torch_hlo.hlo.ir import Computation


class _Names:
    """Numbers shared with the Function, so that both writers never use one name twice."""

    def __init__(self, f: Function) -> None:
        self.f = f

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.f._count += 1
        return self.f._count


def emit_into(f: Function, lanes: int = 1) -> Emit:
    """A straight-line writer that appends to `f`."""
    return Emit(lanes, f.lines, _Names(f))


def apply(f: Function, computation: Computation, values: Sequence[Value], lanes: int = 1) -> list[Value]:
    """The results of a computation on scalars, applied to `values` (register operands, `lanes` wide)."""
    kernel = Kernel(lanes, [], outputs=0)
    kernel.counter = _Names(f)
    kernel.level = Level(0, f.lines, f.block, lanes, kernel.counter)
    kernel.levels = [kernel.level]
    kernel.e = kernel.level.emit
    for p, v in zip(computation.params, values, strict=True):
        kernel.level.cache[p, ()] = v
    root = computation.root
    roots = root.operands if root.op == "tuple" else (root,)
    results = [kernel.value(r, ()) for r in roots]
    f.block = kernel.level.label
    return results


def load(f: Function, dtype: str, pointer: str, index, lanes: int = 1, mask: str | None = None) -> Value:
    """Element `index` (and the following lanes) of an array of `dtype`, as register operands."""
    storage, e = STORAGE[dtype], emit_into(f, lanes)
    if storage.parts == 2:
        if lanes != 1:
            raise NotImplementedError("complex elements are handled one at a time")
        raw = [e.typed(storage.memory).load(f.gep(storage.memory, pointer, f.add(f.mul(index, 2), i)), storage.bytes) for i in range(2)]
        return tuple(scalar.decode(e, dtype, r) for r in raw)
    return scalar.decode(e, dtype, e.typed(storage.memory).load(f.gep(storage.memory, pointer, index), storage.bytes, mask))


def store(f: Function, dtype: str, value: Value, pointer: str, index, lanes: int = 1, mask: str | None = None) -> None:
    """Write register operands to element `index` (and the following lanes)."""
    storage, e = STORAGE[dtype], emit_into(f, lanes)
    t = e.typed(storage.memory)
    if storage.parts == 2:
        for i, v in enumerate(value):
            t.store(scalar.encode(e, dtype, v), f.gep(storage.memory, pointer, f.add(f.mul(index, 2), i)), storage.bytes)
    else:
        t.store(scalar.encode(e, dtype, value), f.gep(storage.memory, pointer, index), storage.bytes, mask)


def move(f: Function, dtype: str, target: str, target_index, source: str, source_index) -> None:
    """Copy one element without decoding it."""
    kind = f"i{STORAGE[dtype].bytes * 8 * STORAGE[dtype].parts}"
    f.store(kind, f.load(kind, f.gep(kind, source, source_index), STORAGE[dtype].bytes), f.gep(kind, target, target_index), STORAGE[dtype].bytes)
