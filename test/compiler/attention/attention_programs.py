"""Programs that are one attention, forward or backward, as the lowering writes them, and inputs for
them."""

from __future__ import annotations

import numpy as np

from test.compiler.compiled import module, parameter
from torch_hlo.hlo.ir.dim import Dim, substitute
from torch_hlo.hlo.ir.instruction import Module
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype
from torch_hlo.lowering.core.elementwise import finish_all
from torch_hlo.lowering.core.registry import nested
from torch_hlo.lowering.nn.attention import attention, attention_backward


def program(
    kind: str,
    sizes,
    mask: str,
    dtype: str = "f32",
    group: int = 1,
    dropout: float = 0.0,
    bias_gradient: bool = False,
) -> Module:
    """`dropout`: its seed and offset are the last parameters."""
    batch, heads, rows, columns, size, width = sizes
    shapes = [
        (batch, heads, rows, size),
        (batch, heads // group, columns, size),
        (batch, heads // group, columns, width),
    ]
    out = (batch, heads, rows, width)
    if kind == "backward":
        shapes = [out, *shapes, out, out[:-1]]
    params = [parameter(i, dtype, *s) for i, s in enumerate(shapes)]
    dims = {
        "pred": (batch, 1, rows, columns),
        "row": (columns,),
        "column": (rows, 1),
        "f32": (1, heads, rows, columns),
    }.get(mask)
    bias = (
        None if dims is None else parameter(len(params), "f32" if mask == "f32" else "pred", *dims)
    )
    causal = mask == "causal"
    params = [*params, *([] if bias is None else [bias])]
    random = [parameter(len(params) + i, "s64") for i in range(2)] if dropout else []
    seed, offset = random or (None, None)
    more = {"is_causal": causal, "scale": 0.2, "seed": seed, "offset": offset}
    if kind == "forward":
        expected = (Shape(dtype, out), Shape("f32", out[:-1]))
        found = attention(*params[:3], bias, dropout, **more)
    else:
        expected = (
            *(Shape(dtype, s) for s in shapes[1:4]),
            *([bias.shape] if bias_gradient else []),
        )
        grad, q, k, v, *kept = params[:6]
        found = attention_backward(grad, q, k, v, bias, *kept, bias_gradient, dropout, **more)
    results = nested(expected, finish_all, *found)
    params = [*params, *random]
    places = {
        n: (p["index"], d)
        for p in reversed(params)
        for d, n in enumerate(p.shape.dims)
        if isinstance(n, Dim)
    }
    return module(params, *results, symbols=tuple((str(n), *place) for n, place in places.items()))


def inputs_of(m: Module, seed: int = 0, **sizes) -> list:
    g = np.random.default_rng(seed)
    shapes = [
        (p.shape.dtype, tuple(substitute(d, sizes) for d in p.shape.dims)) for p in m.entry.params
    ]
    make = {
        "pred": lambda dims: g.random(dims) > 0.3,
        "s64": lambda dims: g.integers(0, 1 << 40, dims),
    }
    return [
        make[t](dims) if t in make else g.standard_normal(dims).astype(numpy_dtype(t))
        for t, dims in shapes
    ]
