"""Index algebra: reshapes of affine indices stay affine, and quotients fold back."""

from __future__ import annotations

from torch_hlo.compiler.codegen.index import delinear, divide, linear, of, variable
from torch_hlo.hlo.ir.dim import symbol


def loop(name: str, extent):
    return of(variable("loop", (name,), extent, 1))


def test_delinear_and_back():
    i = loop("i", 4 * 12 * 64)
    assert linear(delinear(i, (4, 12, 64)), (4, 12, 64)) is i


def test_merging_and_splitting_evenly_is_exact():
    h, d = loop("h", 12), loop("d", 64)
    assert delinear(linear((h, d), (12, 64)), (768,)) == (h * 64 + d,)
    assert delinear(linear((h, d), (12, 64)), (12, 64)) == (h, d)
    assert linear(delinear(linear((h, d), (12, 64)), (24, 32)), (24, 32)) is h * 64 + d


def test_symbolic_sizes():
    s = symbol("s0")
    i, j = loop("a", s), loop("b", 33)
    assert delinear(linear((i, j), (s, 33)), (s, 33)) == (i, j)
    j, i = loop("b", 33), loop("c", s)
    assert delinear(linear((j, i), (33, s)), (33, s)) == (j, i)


def test_constants_divide():
    q, r = divide(loop("i", 8) * 4 + 9, 4)
    assert q is loop("i", 8) + 2 and r.const == 1 and not r.terms
    s = symbol("s0")
    q, r = divide(loop("i", 8) * 2 + (1 - 2 * s), 2)
    assert q is loop("i", 8) - s and r.const == 1 and not r.terms


def test_what_is_left_is_never_negative():
    """(2 i + j - s) / 2 is not i with j - s left: that may be negative."""
    s = symbol("s0")
    i, j = loop("i", 8), loop("j", 2)
    q, r = divide(i * 2 + j - s, 2)
    assert [v.kind for v, _ in q.terms] == ["div"] and [v.kind for v, _ in r.terms] == ["mod"]
