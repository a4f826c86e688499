"""The verifier names the instruction and what is wrong with it."""

from __future__ import annotations

import pytest

from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.instruction import Computation, Meta, Module
from torch_hlo.hlo.ir.intern import instr, interned
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.verify import VerifyError, verify

F4 = Shape("f32", (4,))
X = h.parameter(0, F4)


def module(root, params=(X,), **extra):
    return Module("m", Computation("main", tuple(params), root), **extra)


def bad_meta():
    x = instr("add", (X, X), Shape("f32", (5,)))
    x.meta = Meta("sum")
    return x


N = symbol("s0")
XN = h.parameter(0, Shape("f32", (N, 4)))

BAD = [
    (
        module(instr("frobnicate", (X,), F4)),
        "frobnicate (#1 of computation main): unknown opcode",
    ),
    (
        module(bad_meta()),
        "add (sum of computation main): add: has shape f32[5], expected f32[4]",
    ),
    (
        module(instr("negate", (X,), F4, to="x")),
        "negate (#1 of computation main): negate: unknown attribute to",
    ),
    (
        module(instr("add", (X,), F4)),
        "add (#1 of computation main): add: takes 2 operands, got 1",
    ),
    (
        module(interned("sort", (X,), (("dimensions", (0,)), ("is_stable", False)), F4)),
        "sort (#1 of computation main): attribute is_stable is spelled out",
    ),
    (
        module(instr("custom-call", (X,), F4, custom_call_target="t", opaque={1}.__class__)),
        "custom-call (#1 of computation main): attribute opaque holds a type",
    ),
    (
        module(instr("negate", (X,), Shape("f99", (4,)))),
        "negate (#1 of computation main): unknown element type 'f99'",
    ),
    (
        module(instr("negate", (X,), Shape("f32", (-4,)))),
        "negate (#1 of computation main): bad dims in f32[-4]",
    ),
    (
        module(h.negate(X), params=()),
        "computation main: uses parameter 0 of shape f32[4], which is not in its signature",
    ),
    (
        module(X, params=(h.parameter(1, F4),)),
        "computation main: parameter 0 is parameter {'index': 1}",
    ),
    (
        module(h.negate(X), aliases=((0, 1),)),
        "alias (0, 1) is out of range: 1 outputs, 1 parameters",
    ),
    (
        module(h.concatenate([X, X], 0), aliases=((0, 0),)),
        "alias (0, 0) joins f32[8] and f32[4]",
    ),
    (
        module(h.tuple_(h.negate(X), h.abs_(X)), aliases=((0, 0), (1, 0))),
        "aliases ((0, 0), (1, 0)) name an parameter twice",
    ),
    (
        module(h.negate(XN), params=(XN,)),
        "symbol s0 of parameter 0 (f32[s0,4]) is read nowhere; add it to Module.symbols",
    ),
    (
        module(h.negate(XN), params=(XN,), symbols=(("s0", 0, 1),)),
        "symbol s0 is not dimension 1 of parameter 0",
    ),
]


@pytest.mark.parametrize(("m", "message"), BAD, ids=[m for _, m in BAD])
def test_bad(m, message):
    with pytest.raises(VerifyError) as caught:
        verify(m)
    assert str(caught.value).startswith(message)


def test_inside_called_computations():
    inner = Computation("inner", (X,), instr("negate", (X,), Shape("f32", (5,))))
    with pytest.raises(VerifyError, match=r"negate \(#1 of computation inner\)"):
        verify(module(instr("call", (X,), Shape("f32", (5,)), to_apply=inner)))


def test_good():
    m = module(h.negate(XN), params=(XN,), symbols=(("s0", 0, 0),), aliases=((0, 0),))
    assert verify(m) is m


def test_deep():
    x = X
    for _ in range(50_000):
        x = h.negate(x)
    verify(module(x))
