"""Running one HLO function compiled and in the evaluator, on the same arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torch_hlo.compiler.compile import compile_module
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.dim import substitute, symbol
from torch_hlo.hlo.ir.instruction import Computation, Module, outputs
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.ir.shape import Shape

RTOL = {
    "f32": 2e-5,
    "f64": 1e-11,
    "bf16": 1e-2,
    "f16": 2e-3,
    "c64": 2e-5,
    "c128": 1e-11,
    "f8e4m3fn": 0.13,
    "f8e5m2": 0.26,
}


def aligned(nbytes: int) -> np.ndarray:
    """A byte array that starts at a multiple of 64."""
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


class Compiled:
    """A module loaded on the CPU; call it with arrays."""

    def __init__(self, module: Module, optimize: bool = False) -> None:
        self.module = module
        self.program = loader.load(compile_module(module, optimize=optimize))

    def __call__(self, *arrays) -> list[np.ndarray]:
        params = self.module.entry.params
        buffers = []
        for a, p in zip(arrays, params, strict=True):
            data = encode(np.asarray(a), p.shape.dtype)
            memory = aligned(max(len(data), 1))
            memory[: len(data)] = np.frombuffer(data, np.uint8)
            buffers.append(memory)
        values = {name: np.shape(arrays[i])[d] for name, i, d in self.module.symbols}
        shapes = [
            Shape(o.shape.dtype, tuple(substitute(d, values) for d in o.shape.dims))
            for o in outputs(self.module)
        ]
        results = [aligned(max(s.nbytes, 1)) for s in shapes]
        for r in results:
            r[:] = 0xA5
        self.run = lambda: self.program.call(
            [b.ctypes.data for b in buffers],
            [r.ctypes.data for r in results],
            list(values.values()),
        )
        self.run()
        return [
            decode(r[: s.nbytes].tobytes(), s.dtype, s.dims)
            for r, s in zip(results, shapes, strict=True)
        ]


def module_of(fn: Callable, shapes: list[Shape], symbols=()) -> Module:
    """The module of a Python function on instructions."""
    params = tuple(build.parameter(i, s) for i, s in enumerate(shapes))
    root = fn(*params)
    if isinstance(root, (list, tuple)):
        root = build.tuple_(*root)
    elif root.shape.is_tuple and root.op != "tuple":
        root = build.tuple_(
            *(build.get_tuple_element(root, i) for i in range(len(root.shape.elements)))
        )
    return Module("test", Computation("main", params, root), symbols=tuple(symbols))


def check(
    fn: Callable,
    *arrays,
    dtypes=None,
    rtol=None,
    atol=None,
    symbolic: dict[tuple[int, int], str] | None = None,
    optimize=False,
) -> Compiled:
    """Compare compiled `fn` with the evaluator. `dtypes`: HLO types of the arrays (needed for bf16,
    f8). `symbolic`: names of symbolic dimensions by (parameter, dimension)."""
    names = {"bool": "pred", "complex64": "c64", "complex128": "c128"}
    arrays = [np.asarray(a) for a in arrays]
    dtypes = dtypes or [None] * len(arrays)
    shapes, symbols, seen = [], [], set()
    for i, (a, t) in enumerate(zip(arrays, dtypes, strict=True)):
        dtype = (
            t
            or names.get(a.dtype.name)
            or a.dtype.name.replace("uint", "u").replace("int", "s").replace("float", "f")
        )
        dims = list(a.shape)
        for d in range(a.ndim):
            name = (symbolic or {}).get((i, d))
            if name:
                dims[d] = symbol(name)
                if name not in seen:
                    symbols.append((name, i, d))
                    seen.add(name)
        shapes.append(Shape(dtype, tuple(dims)))
    module = module_of(fn, shapes, symbols)
    compiled = Compiled(module, optimize)
    got, want = compiled(*arrays), evaluate(module, arrays)
    for g, w, o in zip(got, want, outputs(module), strict=True):
        if o.shape.dtype in RTOL:
            tolerance = rtol or RTOL[o.shape.dtype]
            scale = np.nanmax(np.abs(w[np.isfinite(w)]), initial=0) if w.size else 0
            np.testing.assert_allclose(
                g,
                w,
                rtol=tolerance,
                atol=atol if atol is not None else tolerance * max(scale, 1e-30),
                err_msg=str(o),
            )
        else:
            np.testing.assert_array_equal(g, w, err_msg=str(o))
    return compiled
