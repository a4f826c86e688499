"""Attention written out in HLO: recognized whatever the mask, with the same values; left alone when
its weights are read by somebody else."""

from __future__ import annotations

import numpy as np
import pytest

from torch_hlo.compiler.attention.attention import attention_of, marked_weights, on_grid
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm.target import host
from torch_hlo.compiler.pipeline import compare, cpu_pipeline, optimize
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Computation, Module, outputs
from torch_hlo.hlo.ir.numeric import decode
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.lowering.core.registry import nested
from torch_hlo.lowering.nn.attention_weights import weights, weights_again

MASKS = {
    "none": ("f32[]", "%s = f32[2,3,20,33] multiply(%d, %c)"),
    "divided": ("f32[]", "%s = f32[2,3,20,33] divide(%d, %c)"),
    "added": (
        "f32[20,33]",
        (
            "%e = f32[2,3,20,33] broadcast(%m), dimensions={2,3}\n %f = f32[2,3,20,33] multiply(%d,"
            " %c)\n %s = f32[2,3,20,33] add(%e, %f)"
        ),
    ),
    "full": ("f32[2,3,20,33]", "%s = f32[2,3,20,33] add(%d, %m)"),
    "keys": (
        "pred[2,33]",
        (
            "%e = pred[2,3,20,33] broadcast(%m), dimensions={0,3}\n %s = f32[2,3,20,33] select(%e,"
            " %d, %c)"
        ),
    ),
    "capped": (
        "f32[20,33]",
        (
            "%t1 = f32[2,3,20,33] divide(%d, %c)\n %t2 = f32[2,3,20,33] tanh(%t1)\n %e ="
            " f32[2,3,20,33] broadcast(%m), dimensions={2,3}\n %f = f32[2,3,20,33] multiply(%t2,"
            " %c)\n %s = f32[2,3,20,33] add(%f, %e)"
        ),
    ),
    "capped, filled": (
        "pred[20,33]",
        (
            "%t1 = f32[2,3,20,33] multiply(%d, %c)\n %t2 = f32[2,3,20,33] tanh(%t1)\n %e ="
            " pred[2,3,20,33] broadcast(%m), dimensions={2,3}\n %f = f32[2,3,20,33] divide(%t2,"
            " %c)\n %s = f32[2,3,20,33] select(%e, %f, %c)"
        ),
    ),
    "filled": (
        "pred[20,33]",
        (
            "%e = pred[2,3,20,33] broadcast(%m), dimensions={2,3}\n %f = f32[2,3,20,33]"
            " multiply(%d, %c)\n %s = f32[2,3,20,33] select(%e, %c, %f)"
        ),
    ),
}


def text(mask: str, result: str = "%y") -> str:
    kind, scores = MASKS[mask]
    shape = "f32[2,3,20,33]" if result == "%w" else "f32[2,3,20,8]"
    return f"""HloModule m
%max (a: f32[], b: f32[]) -> f32[] {{
 %a = f32[] parameter(0)
 %b = f32[] parameter(1)
 ROOT %r = f32[] maximum(%a, %b)
}}
%sum (a: f32[], b: f32[]) -> f32[] {{
 %a = f32[] parameter(0)
 %b = f32[] parameter(1)
 ROOT %r = f32[] add(%a, %b)
}}
ENTRY %main (q: f32[2,3,20,16], k: f32[2,3,33,16], v: f32[2,3,33,8], m: {kind}, n: f32[]) -> (f32[2,3,20,8], {shape}) {{
 %q = f32[2,3,20,16] parameter(0)
 %k = f32[2,3,33,16] parameter(1)
 %v = f32[2,3,33,8] parameter(2)
 %m = {kind} parameter(3)
 %n = f32[] parameter(4)
 %d = f32[2,3,20,33] dot(%q, %k), lhs_batch_dims={{0,1}}, lhs_contracting_dims={{3}}, rhs_batch_dims={{0,1}}, rhs_contracting_dims={{3}}
 %c = f32[2,3,20,33] broadcast(%n), dimensions={{}}
 {scores}
 %low = f32[] constant(-inf)
 %t = f32[2,3,20] reduce(%s, %low), dimensions={{3}}, to_apply=%max
 %tt = f32[2,3,20,33] broadcast(%t), dimensions={{0,1,2}}
 %x = f32[2,3,20,33] subtract(%s, %tt)
 %p = f32[2,3,20,33] exponential(%x)
 %zero = f32[] constant(0)
 %u = f32[2,3,20] reduce(%p, %zero), dimensions={{3}}, to_apply=%sum
 %uu = f32[2,3,20,33] broadcast(%u), dimensions={{0,1,2}}
 %w = f32[2,3,20,33] divide(%p, %uu)
 %y = f32[2,3,20,8] dot(%w, %v), lhs_batch_dims={{0,1}}, lhs_contracting_dims={{3}}, rhs_batch_dims={{0,1}}, rhs_contracting_dims={{2}}
 ROOT %z = (f32[2,3,20,8], {shape}) tuple(%y, {result})
}}"""


def fused(m) -> list:
    return [x for x in optimize(m).entry.instructions() if x.op == "fusion" and attention_of(x)]


@pytest.mark.parametrize("number", [-1e9, -np.inf, 0.3, np.finfo(np.float32).min])
@pytest.mark.parametrize("mask", MASKS)
def test_recognized(mask, number) -> None:
    m = parse_module(text(mask))
    assert len(fused(m)) == 1
    g = np.random.default_rng(0)
    inputs = [
        (
            g.random(p.shape.dims) > 0.4
            if p.shape.dtype == "pred"
            else g.standard_normal(p.shape.dims).astype(np.float32)
        )
        for p in m.entry.params
    ]
    if mask in ("keys", "filled"):
        inputs[3][1] = mask == "filled"  # nothing is seen there
    else:
        number = 0.3
    inputs[4] = np.float32(number)
    program = loader.load(compile_module(m))
    found = [np.zeros(x.shape.nbytes, np.uint8) for x in outputs(m)]
    given = [
        np.ascontiguousarray(x).view(np.uint8) if x.ndim else np.array([x], np.float32)
        for x in inputs
    ]
    program.call([x.ctypes.data for x in given], [x.ctypes.data for x in found])
    with np.errstate(all="ignore"):
        expected = evaluate(m, inputs)[0]
    np.testing.assert_allclose(
        decode(found[0].tobytes(), "f32", expected.shape),
        expected,
        rtol=2e-5,
        atol=1e-5,
    )


def test_weights_that_are_read() -> None:
    assert not fused(parse_module(text("none", "%w")))


def test_powers_of_two_of_complex_numbers() -> None:
    m = parse_module("""HloModule m
ENTRY %main (x: c64[4]) -> c64[4] {
 %x = c64[4] parameter(0)
 %c = c64[] constant((0.693147182, 0))
 %d = c64[4] broadcast(%c), dimensions={}
 %y = c64[4] multiply(%x, %d)
 ROOT %z = c64[4] exponential(%y)
}""")
    assert not fused(m)


def marked(read: bool) -> Module:
    """Marked weights and their product with values, `read` by the program as well."""
    q, k, v = (
        b.parameter(i, Shape("f32", dims))
        for i, dims in enumerate(((2, 3, 20, 16), (2, 3, 33, 16), (2, 3, 33, 8)))
    )
    s = b.dot(q, k, (3,), (3,), (0, 1), (0, 1))
    own = s.shape, Shape("f32", (2, 3, 20)), Shape("f32", (2, 3, 20))
    w, top, total = nested(own, weights, s)
    again = nested(own[:1], weights_again, s, top, total)
    y = b.dot(w, v, (3,), (2,), (0, 1), (0, 1))
    results = (y, top, total, b.subtract(w, again)) if read else (y, top, total)
    return Module("m", Computation("main", (q, k, v), b.tuple_(*results)))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("off", [(), ("attention_match",), ("attention", "attention_match")])
def test_marked_weights(read, off) -> None:
    """They are found, or inlined; they are calls to the end without the pass."""
    m = marked(read)
    after = optimize(m, passes=[p for p in cpu_pipeline(host()).passes if p.name not in off])
    compare(m, after)
    found = after.entry.instructions()
    assert any(map(marked_weights, found)) == bool(off)
    assert len([x for x in found if attention_of(x)]) == (not read and not off)


def test_marked_weights_on_a_grid() -> None:
    assert not [x for x in on_grid.run(marked(True)).entry.instructions() if marked_weights(x)]
