"""Symbolic sizes: a dimension is an `int` or a `Dim`, a polynomial over named symbols.

A `Dim` is interned: equal polynomials are the same object. `+ - * // %` and `max`/`min` (the
functions `dim_max`, `dim_min`) build new ones and return an `int` whenever nothing symbolic is
left. Text form: `s0`, `4*s0+1`, `floordiv(s0,2)`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Union, overload

Size = Union[int, "Dim"]
Ints = tuple[int, ...]
Dims = tuple[Size, ...]
Pairs = tuple[tuple[int, int], ...]
_Atom = tuple[Any, ...]  # ("sym", name) | ("floordiv" | "mod" | "max" | "min", Size, Size)

_Monomial = tuple[_Atom, ...]


class Dim:
    """An interned sum of monomials; `terms` maps a sorted tuple of atoms to an integer
    coefficient."""

    __slots__ = ("terms", "_text", "__weakref__")
    _interned: dict[tuple[tuple[_Monomial, int], ...], Dim] = {}
    terms: tuple[tuple[_Monomial, int], ...]
    _text: str

    def __init__(self) -> None:
        raise TypeError("use symbol('s0') and arithmetic to build a Dim")

    def __add__(self, other: Size) -> Size:
        return _from_terms(_sum(_terms(self), _terms(other)))

    __radd__ = __add__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + -1 * other

    def __rsub__(self, other: Size) -> Size:
        return other + -1 * self

    def __mul__(self, other: Size) -> Size:
        product: dict[_Monomial, int] = {}
        for m, c in _terms(self).items():
            for n, d in _terms(other).items():
                key = tuple(sorted(m + n, key=_atom_text))
                product[key] = product.get(key, 0) + c * d
        return _from_terms(product)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        if isinstance(other, int) and other:
            if all(c % other == 0 for _, c in self.terms):
                return _from_terms({m: c // other for m, c in self.terms})
        elif self is other:
            return 1
        elif isinstance(other, Dim):
            exact = _divide(self, other)
            if exact is not None:
                return exact
        return _atom("floordiv", self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return 0 if other == 0 else _atom("floordiv", other, self)

    def __mod__(self, other: Size) -> Size:
        if isinstance(other, int) and other and all(c % other == 0 for _, c in self.terms):
            return 0
        if self is other or isinstance(other, Dim) and _divide(self, other) is not None:
            return 0
        return _atom("mod", self, other)

    def __rmod__(self, other: Size) -> Size:
        return 0 if other == 0 else _atom("mod", other, self)

    def __repr__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[Callable[[str], Size], tuple[str]]:
        return parse_dim, (self._text,)


def symbol(name: str) -> Dim:
    """The symbol `name` as a size."""
    found = _from_terms({(("sym", name),): 1})
    assert isinstance(found, Dim)
    return found


def _chosen(choice: Callable[[int, int], int], a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return choice(a, b)
    return a if a is b else _atom(choice.__name__, a, b)


dim_max = partial(_chosen, max)
dim_min = partial(_chosen, min)


@overload
def ceildiv(a: int, b: int) -> int: ...
@overload
def ceildiv(a: Size, b: Size) -> Size: ...
def ceildiv(a: Size, b: Size) -> Size:
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else (a + b - 1) // b


@overload
def round_up(a: int, b: int) -> int: ...
@overload
def round_up(a: Size, b: Size) -> Size: ...
def round_up(a: Size, b: Size) -> Size:
    """The multiple of `b` that is not below `a`."""
    return ceildiv(a, b) * b


def fixed(size: Size) -> int:
    """A size that is known to be no symbol."""
    assert isinstance(size, int)
    return size


def symbols(size: Size) -> frozenset[str]:
    """Names of the symbols that `size` depends on."""
    if isinstance(size, int):
        return frozenset()
    found: set[str] = set()
    for monomial, _ in size.terms:
        for atom in monomial:
            if atom[0] == "sym":
                found.add(atom[1])
            else:
                found |= symbols(atom[1]) | symbols(atom[2])
    return frozenset(found)


_FUNCTIONS: dict[str, Callable[..., Size]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": dim_max,
    "min": dim_min,
}


def substitute(size: Size, values: Mapping[str, Size]) -> Size:
    """`size` with symbols replaced; an int when all of them are bound to ints."""
    if isinstance(size, int):
        return size
    total: Size = 0
    for monomial, coefficient in size.terms:
        product: Size = coefficient
        for atom in monomial:
            if atom[0] == "sym":
                product *= values.get(atom[1], _from_terms({(atom,): 1}))
            else:
                product *= _FUNCTIONS[atom[0]](
                    substitute(atom[1], values), substitute(atom[2], values)
                )
        total += product
    return total


def function(names: Sequence[str], sizes: Sequence[Size]) -> Callable[..., Ints]:
    """A fast function of the values of the symbols `names` that gives the values of `sizes`. Raises
    ZeroDivisionError as Python does."""
    scope = {
        "floordiv": operator.floordiv,
        "mod": operator.mod,
        "max": max,
        "min": min,
        "__builtins__": {},
    }
    made: Callable[..., Ints] = eval(
        f"lambda {', '.join(names)}: ({''.join(f'{s}, ' for s in sizes)})", scope
    )
    return made


def parse_dim(text: str) -> Size:
    """Inverse of `str(size)`. Raises ValueError on anything else."""
    tokens = re.findall(r"\d+|[A-Za-z_]\w*|[-+*(),]", text)
    if "".join(tokens) != text.replace(" ", ""):
        raise ValueError(f"bad size {text!r}")
    value, rest = _parse_sum(tokens)
    if rest:
        raise ValueError(f"bad size {text!r}: unexpected {rest[0]!r}")
    return value


def _parse_sum(t: list[str]) -> tuple[Size, list[str]]:
    total: Size = 0
    sign = 1
    if t and t[0] == "-":
        sign = -1
        t = t[1:]
    while True:
        product, t = _parse_factor(t)
        while t and t[0] == "*":
            factor, t = _parse_factor(t[1:])
            product *= factor
        total += sign * product
        if not t or t[0] not in "+-":
            return total, t
        sign = 1 if t[0] == "+" else -1
        t = t[1:]


def _parse_factor(t: list[str]) -> tuple[Size, list[str]]:
    if not t:
        raise ValueError("bad size: unexpected end")
    head = t[0]
    t = t[1:]
    if head.isdigit():
        return int(head), t
    if head in _FUNCTIONS and t[:1] == ["("]:
        a, t = _parse_sum(t[1:])
        if t[:1] != [","]:
            raise ValueError(f"bad size: {head} takes two arguments")
        b, t = _parse_sum(t[1:])
        if t[:1] != [")"]:
            raise ValueError(f"bad size: {head} is not closed")
        return _FUNCTIONS[head](a, b), t[1:]
    if not (head[0].isalpha() or head[0] == "_"):
        raise ValueError(f"bad size: unexpected {head!r}")
    return symbol(head), t


def _terms(size: Size) -> dict[_Monomial, int]:
    return {(): size} if isinstance(size, int) else dict(size.terms)


def _sum(a: dict[_Monomial, int], b: dict[_Monomial, int]) -> dict[_Monomial, int]:
    for m, c in b.items():
        a[m] = a.get(m, 0) + c
    return a


def _divide(size: Dim, divisor: Dim) -> Size | None:
    """The polynomial quotient, or None when something is left over: `s0*s1-2*s0` by `s1-2` is
    `s0`."""
    lead, coefficient = max(divisor.terms, key=_order)
    rest = dict(size.terms)
    quotient = {}
    while rest:
        m, c = max(rest.items(), key=_order)
        left = list(m)
        for atom in lead:
            if atom not in left:
                return None
            left.remove(atom)
        if c % coefficient:
            return None
        quotient[tuple(left)] = c // coefficient
        for n, d in divisor.terms:
            key = tuple(sorted((*left, *n), key=_atom_text))
            rest[key] = rest.get(key, 0) - c // coefficient * d
            if not rest[key]:
                del rest[key]
    return _from_terms(quotient)


def _order(term: tuple[_Monomial, int]) -> tuple[int, _Reversed]:
    """Graded order of monomials: products of larger terms are larger, so that division ends."""
    names = sorted(map(_atom_text, term[0]))
    return len(names), _Reversed(names)


class _Reversed(list[str]):
    """A list that sorts the other way round: `s0*s0` is larger than `s0*s1`, as for exponents in
    lexicographic order."""

    def __lt__(self, other: list[str]) -> bool:
        return list.__gt__(self, other)

    def __gt__(self, other: list[str]) -> bool:
        return list.__lt__(self, other)


def _atom(kind: str, a: Size, b: Size) -> Size:
    return _from_terms({((kind, a, b),): 1})


def _atom_text(atom: _Atom) -> str:
    return atom[1] if atom[0] == "sym" else f"{atom[0]}({atom[1]},{atom[2]})"


def _monomial_text(monomial: _Monomial, coefficient: int) -> str:
    names = [_atom_text(a) for a in monomial]
    if not names or coefficient != 1:
        names = (
            [str(coefficient)] + names
            if coefficient != -1 or not names
            else ["-" + names[0]] + names[1:]
        )
    return "*".join(names)


def _from_terms(terms: dict[_Monomial, int]) -> Size:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    if set(kept) == {()}:
        return kept[()]
    # Constants last: the text reads "4*s0+1".
    order = sorted(kept, key=lambda m: (not m, len(m), [_atom_text(a) for a in m]))
    key = tuple((m, kept[m]) for m in order)
    found = Dim._interned.get(key)
    if found is None:
        found = object.__new__(Dim)
        found.terms = key
        found._text = "+".join(_monomial_text(m, c) for m, c in key).replace("+-", "-")
        Dim._interned[key] = found
    return found
