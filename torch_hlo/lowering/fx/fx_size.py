"""Sizes and strides of FX graphs: SymInts -> `Size`, and which physical order the strides of a
dense tensor mean."""

import operator
import weakref
from collections.abc import Sequence
from typing import Any, Self

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dims, Ints, Shape, Size, dim_max, dim_min, symbol

from ..core import TORCH_TO_HLO, LoweringError


def size_of(x: int | torch.SymInt) -> Size:
    """A Size from an int or SymInt. Raises LoweringError for an expression that a Dim cannot
    hold."""
    if isinstance(x, int):
        return x
    solved = _solved(x.node.shape_env)
    return size_of_expression(x.node.expr.xreplace(solved) if solved else x.node.expr)


def _solved(env: ShapeEnv) -> dict[sympy.Expr, sympy.Expr]:
    """What the guards determine: symbols, as the pieces of a split whose sizes add up to a known
    one (s1 = 8 - s0), and terms between equal bounds, as sizes that were compared with 1 when a
    view dropped them (s0//4 >= 8 and s0//4 - 7 <= 1)."""
    guards = env.guards
    count, solved, bounds = _SOLVED.get(env, (0, {}, {}))
    if count == len(guards):
        return solved
    bounds = dict(bounds)
    for e in (g.expr.xreplace(solved) for g in guards[count:]):
        if not isinstance(e, sympy.core.relational.Relational) or isinstance(e, sympy.Ne):
            continue
        difference = e.lhs - e.rhs
        terms = difference.as_coefficients_dict()
        found = {}
        if isinstance(e, sympy.Eq) and (e.lhs.is_Add or e.rhs.is_Add):
            alone = [
                s
                for s in terms
                if s.is_Symbol
                and abs(terms[s]) == 1
                and sum(s in t.free_symbols for t in terms) == 1
            ]
            if alone:
                s = max(alone, key=str)
                found = {s: sympy.expand(s - difference / terms[s])}
        else:
            found = _bounded(e, terms, bounds)
        if found:
            solved = {k: v.xreplace(found) for k, v in solved.items()} | found
    _SOLVED[env] = (len(guards), solved, bounds)
    return solved


def _bounded(
    e: sympy.core.relational.Relational,
    terms: dict[sympy.Expr, sympy.Expr],
    bounds: dict[sympy.Expr, tuple[sympy.Expr, sympy.Expr]],
) -> dict[sympy.Expr, sympy.Expr]:
    """Note what `e` says about the one term it has beside a number; that term's value if its bounds
    meet."""
    variable = [t for t in terms if not t.is_number]
    if len(variable) != 1 or abs(terms[variable[0]]) != 1:
        return {}
    term = variable[0]
    sign = terms[variable[0]]
    limit = -sum(t * c for t, c in terms.items() if t != term) / sign
    low, high = bounds.get(term, (-sympy.oo, sympy.oo))
    strict = 1 if isinstance(e, (sympy.StrictLessThan, sympy.StrictGreaterThan)) else 0
    if isinstance(e, sympy.Eq):
        low = high = limit
    elif isinstance(e, (sympy.GreaterThan, sympy.StrictGreaterThan)) == (sign > 0):
        low = max(low, limit + strict)
    else:
        high = min(high, limit - strict)
    bounds[term] = (low, high)
    return {term: low} if low == high else {}


# ShapeEnv -> (guards seen, solution, bounds of terms)
_SOLVED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def size_of_expression(e: sympy.Expr) -> Size:
    """The same of PyTorch's symbolic expression."""
    if e.is_Integer:
        return int(e)
    if e.is_Symbol:
        return symbol(str(e))
    rule = _RULES.get(type(e).__name__)
    if rule is None:
        raise LoweringError(
            f"size expression {e} is not supported; mark the dimension static with"
            " torch._dynamo.mark_static"
        )
    # sympy writes s0/2 where 2 divides s0
    if rule is operator.mul and e.args[0].is_Rational and not e.args[0].is_Integer:
        return size_of_expression(sympy.Mul(*e.args[1:]) * e.args[0].p) // int(e.args[0].q)
    result = size_of_expression(e.args[0])
    for a in e.args[1:]:
        result = rule(result, size_of_expression(a))
    return result


def _power(base: Size, exponent: Any) -> Size:
    result: Size = 1
    for _ in range(int(exponent)):
        result *= base
    return result


# By name: these are sympy's classes and PyTorch's own (torch.utils._sympy.functions).
_RULES = {
    "Add": operator.add, "Mul": operator.mul, "Pow": _power, "PowByNatural": _power,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "IntTrueDiv": operator.floordiv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Max": dim_max, "Min": dim_min,
}  # fmt: skip


def hint(x: int | torch.SymInt) -> int:
    """The value that a size had when the graph was traced."""
    return x if isinstance(x, int) else int(x.node.hint if x.node.hint is not None else 2)


def shape_of(value: torch.Tensor) -> Shape:
    """HLO shape of a (fake) tensor. Raises LoweringError for a dtype or layout that the language
    lacks."""
    dtype = TORCH_TO_HLO.get(value.dtype)
    if dtype is None or value.layout != torch.strided:
        raise LoweringError(
            f"tensors of {value.dtype}, {value.layout} are not supported on hlo; convert them first"
        )
    return Shape(dtype, tuple(size_of(d) for d in value.shape))


@frozen
class Layout:
    """How a tensor lies in memory: `order` lists its dimensions from the slowest, those in
    `repeated` have stride 0.
    `dense`: nothing but its elements lies there (then size and order say everything)."""

    order: Ints
    repeated: Ints
    dense: bool
    strides: Dims

    @classmethod
    def row_major(cls, rank: int) -> Self:
        """How a contiguous tensor lies."""
        return cls(tuple(range(rank)), (), True, ())

    @property
    def without_gaps(self) -> Self:
        """The layout, or the row-major one of a tensor that has to be copied."""
        return self if self.dense and not self.repeated else self.row_major(len(self.order))

    @property
    def plain(self) -> bool:
        """Row-major without gaps."""
        return self.dense and not self.repeated and self.order == tuple(range(len(self.order)))

    def physical(self, dims: Sequence[Size]) -> Dims:
        """Sizes of the array in memory."""
        return tuple(1 if d in self.repeated else dims[d] for d in self.order)


def layout_of(value: torch.Tensor) -> Layout:
    """Layout of a (fake) tensor."""
    sizes = tuple(map(size_of, value.shape))
    strides = tuple(map(size_of, value.stride()))
    rank = len(sizes)
    repeated = tuple(d for d in range(rank) if strides[d] == 0 and sizes[d] != 1)
    known = {d: hint(s) for d, s in enumerate(value.stride())}
    # Where size 1 leaves the stride open, the dimension keeps its place.
    order = list(range(rank))
    movable = [d for d in order if sizes[d] != 1 and d not in repeated]
    for place, d in zip(movable, sorted(movable, key=lambda d: (-known[d], d))):
        order[place] = d
    empty = any(s == 0 for s in sizes)
    step: Size = 1
    dense = True
    for d in reversed(order):
        if sizes[d] == 1 or d in repeated:
            continue
        dense = dense and strides[d] == step
        step *= sizes[d]
    if empty:
        order = list(range(rank))
        repeated = ()
        dense = True
    return Layout(tuple(order), repeated, dense, strides)
