"""Compiling and running modules in tests, and the comparison with the evaluator."""

from __future__ import annotations

import numpy as np

from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.dim import substitute
from torch_hlo.hlo.ir.instruction import Computation, Instruction, Module, outputs
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.ir.shape import Shape, tuple_shape

GUARD = 0xAB


def parameter(number: int, dtype: str, *dims) -> Instruction:
    return instr("parameter", (), Shape(dtype, dims), index=number)


def module(params, *roots, aliases=(), symbols=()) -> Module:
    root = (
        roots[0]
        if len(roots) == 1
        else instr("tuple", roots, tuple_shape(*(r.shape for r in roots)))
    )
    return Module("test", Computation("main", tuple(params), root), aliases, symbols)


def run(m: Module, inputs, optimize: bool = False, **options) -> list[np.ndarray]:
    """Compile, pass through the stored form, load, run on copies of the inputs with guard bytes
    around every buffer."""
    executable = Executable.from_bytes(compile_module(m, optimize=optimize, **options).to_bytes())
    program = loader.load(executable)
    sizes = {name: np.asarray(inputs[p]).shape[d] for name, p, d in m.symbols}
    blocks = []

    def buffer(data: bytes) -> int:
        block = np.full(len(data) + 256, GUARD, np.uint8)
        start = 64 + -block.ctypes.data % 64
        block[start : start + len(data)] = np.frombuffer(data, np.uint8)
        blocks.append((block, start, len(data)))
        return block.ctypes.data + start

    given = [buffer(encode(v, p.shape.dtype)) for v, p in zip(inputs, m.entry.params, strict=True)]
    alias = dict(m.aliases)
    shapes = [tuple(substitute(d, sizes) for d in x.shape.dims) for x in outputs(m)]
    targets = []
    for o, (x, dims) in enumerate(zip(outputs(m), shapes, strict=True)):
        nbytes = int(np.prod(dims, dtype=np.int64)) * x.shape.itemsize
        targets.append(given[alias[o]] if o in alias else buffer(b"\x77" * nbytes))
    program.call(given, targets, list(sizes.values()))
    for block, start, n in blocks:
        assert (block[:start] == GUARD).all() and (block[start + n :] == GUARD).all(), (
            "wrote outside of a buffer"
        )
    by_address = {
        block.ctypes.data + start: block[start : start + n].tobytes() for block, start, n in blocks
    }
    return [
        decode(by_address[t], x.shape.dtype, d)
        for t, x, d in zip(targets, outputs(m), shapes, strict=True)
    ]


def check(
    m: Module, inputs, rtol: float = 1e-6, atol: float = 0.0, optimize: bool = False
) -> list[np.ndarray]:
    """Compare compiled code with the evaluator: integers exactly, floats within rtol, nan with
    nan."""
    with np.errstate(all="ignore"):
        expected = evaluate(m, inputs)
    found = run(m, inputs, optimize)
    for e, f in zip(expected, found, strict=True):
        assert e.shape == f.shape
        if f.dtype.kind in "fc":
            np.testing.assert_allclose(f, e, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(f, e)
    return found
