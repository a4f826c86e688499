"""Index expressions of kernels: affine sums of loop variables, in pure Python, without writing any
code.

An `Index` is `sum(coefficient * Var) + constant`; coefficients are sizes (int or Dim). `divide`
splits linear indices exactly where ranges allow it, so a reshape of a broadcast of a transpose
stays an affine address; what does not divide becomes an opaque `Var` (quotient, remainder, or a
value loaded at run time), and `d*(x/d) + x%d` folds back into x. Everything is interned: equal
indices are the same object.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch_hlo.hlo.ir import Dim, Instruction, Size, row_major_strides

Payload = tuple[Any, ...]  # of a Var, by its kind


class Var:
    """A variable with values in [0, extent). `kind`: loop | div | mod | value; `payload` says what
    it is made of.

    loop: (name,)   div, mod: (Index, divisor)   value: (instruction, index tuple): an element
    converted to an index, clamped into the range. `depth`: the loop level it changes at (0:
    constant within the function)."""

    __slots__ = ("kind", "payload", "extent", "depth", "serial")
    kind: str
    payload: Payload
    extent: Size
    depth: int
    serial: int

    def __repr__(self) -> str:
        return self.payload[0] if self.kind == "loop" else f"{self.kind}{self.payload}"


class Index:
    """`terms`: ((Var, coefficient), …) without zeros, in creation order of the variables; `const`;
    `depth`: its largest Var.depth."""

    __slots__ = ("terms", "const", "depth")
    terms: tuple[tuple[Var, Size], ...]
    const: Size
    depth: int

    def __add__(self, other: Index | Size) -> Index:
        if not isinstance(other, Index):
            return _index(self.terms, self.const + other)
        return combine(((self, 1), (other, 1)))

    def __sub__(self, other: Index | Size) -> Index:
        return (
            combine(((self, 1), (other, -1)))
            if isinstance(other, Index)
            else _index(self.terms, self.const - other)
        )

    def __mul__(self, factor: Size) -> Index:
        return combine(((self, factor),))

    def __repr__(self) -> str:
        return " + ".join([f"{c}*{v}" for v, c in self.terms] + [str(self.const)])

    def bounds(self) -> tuple[Size, Size]:
        """Smallest and largest value (symbolic coefficients count as non-negative)."""
        low = high = self.const
        for v, c in self.terms:
            if isinstance(c, int) and c < 0:
                low += c * (v.extent - 1)
            else:
                high += c * (v.extent - 1)
        return low, high


# Interning tables live as long as one compilation: see `reset`.
_INDICES: dict[tuple[tuple[tuple[Var, Size], ...], Size], Index] = {}
_VARS: dict[tuple[str, Payload, Size, int], Var] = {}


def reset() -> None:
    """Forget all indices. Called between modules; indices of different modules are never
    compared."""
    _INDICES.clear()
    _VARS.clear()
    _INDICES[(), 0] = ZERO


def _index(terms: tuple[tuple[Var, Size], ...], const: Size) -> Index:
    key = (terms, const)
    found = _INDICES.get(key)
    if found is None:
        found = object.__new__(Index)
        found.terms = terms
        found.const = const
        found.depth = max((v.depth for v, _ in terms), default=0)
        _INDICES[key] = found
    return found


ZERO = _index((), 0)


def constant(value: Size) -> Index:
    return _index((), value)


def of(var: Var, coefficient: Size = 1) -> Index:
    return _index(((var, coefficient),), 0)


def variable(kind: str, payload: Payload, extent: Size, depth: int) -> Var:
    key = (kind, payload, extent, depth)
    found = _VARS.get(key)
    if found is None:
        found = object.__new__(Var)
        found.kind = kind
        found.payload = payload
        found.extent = extent
        found.depth = depth
        found.serial = len(_VARS)
        _VARS[key] = found
    return found


def loaded(x: Instruction, index: tuple[Index, ...], extent: Size) -> Index:
    """The element of integer instruction `x` at `index` as an index, clamped into [0, extent).
    What is computed from positions, as where windows begin, is no value that is loaded."""
    place = _position(x, index)
    if place is not None:
        low, high = place.bounds()
        if below(-1, low) and below(high, extent):
            return place
    return of(variable("value", (x, index), extent, max((i.depth for i in index), default=0)))


def _position(x: Instruction, index: tuple[Index, ...]) -> Index | None:
    """The element of `x` at `index` where that is a linear function of `index`. Narrow numbers
    might wrap around on the way to it."""
    if x.dtype not in ("s64", "u64"):
        return None
    match x.op:
        case "constant":
            return constant(int(x["literal"].numpy().item())) if x.size == 1 else None
        case "iota":
            along: int = x["iota_dimension"]
            return index[along]
        case "broadcast":
            dims = zip(x["dimensions"], x.operand.dims, strict=True)
            return _position(x.operand, tuple(ZERO if n == 1 else index[d] for d, n in dims))
        case "reshape":
            return _position(x.operand, regroup(index, x.dims, x.operand.dims))
        case "add" | "subtract" | "multiply":
            a, b = (_position(o, index if o.rank else ()) for o in x.operands)
            if a is None or b is None:
                return None
            if x.op != "multiply":
                return a + b if x.op == "add" else a - b
            if b.terms:
                a, b = b, a
            return None if b.terms else a * b.const
    return None


def combine(parts: Iterable[tuple[Index, Size]]) -> Index:
    """Sum of index * factor."""
    total: dict[Var, Size] = {}
    const: Size = 0
    folding = False
    for index, factor in parts:
        const += index.const * factor
        for v, c in index.terms:
            total[v] = total.get(v, 0) + c * factor
            folding = folding or v.kind == "mod"
    if folding:
        return _fold(total, const)
    return _finish(total, const)


def _finish(total: dict[Var, Size], const: Size) -> Index:
    kept = [(v, c) for v, c in total.items() if c != 0]
    if len(kept) > 1:
        kept.sort(key=lambda t: t[0].serial)
    return _index(tuple(kept), const)


def _fold(total: dict[Var, Size], const: Size) -> Index:
    """Replace c*d*(x/d) + c*(x%d) by c*x."""
    again = True
    while again:
        again = False
        for v, c in list(total.items()):
            if v.kind != "mod" or c == 0 or v not in total:
                continue
            quotient = _VARS.get(("div", v.payload, _quotient_extent(v.payload), v.depth))
            if quotient is not None and quotient in total and total[quotient] == c * v.payload[1]:
                del total[v], total[quotient]
                inner = v.payload[0]
                const += inner.const * c
                for w, k in inner.terms:
                    total[w] = total.get(w, 0) + k * c
                again = True
    return _finish(total, const)


def exact(a: Size, b: Size) -> Size | None:
    """a / b when it divides for certain."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if isinstance(a, int):
        return 0 if a == 0 else None
    quotient = a // b
    # A Dim that did not divide comes back wrapped in a floordiv atom.
    return quotient if quotient * b == a else None


def below(a: Size, b: Size) -> bool:
    """True when a < b for certain."""
    difference = b - a
    if isinstance(difference, int):
        return difference > 0
    # symbols are at least 1 here: a sum of non-negative monomials is at least its value at 1
    return (
        all(c > 0 for m, c in difference.terms if m)
        and sum(c for _, c in difference.terms) > 0
        and _plain(difference)
    )


def _plain(size: Dim) -> bool:
    return all(atom[0] == "sym" for m, _ in size.terms for atom in m)


def _quotient_extent(payload: Payload) -> Size:
    inner: Index = payload[0]
    d: Size = payload[1]
    high = inner.bounds()[1]
    return high // d + 1


def divide(index: Index, d: Size) -> tuple[Index, Index]:
    """(index / d, index % d) for an index that is never negative where its value matters."""
    if d == 1:
        return index, ZERO
    quotient: list[tuple[Var, Size]] = []
    rest: list[tuple[Var, Size]] = []
    for v, c in index.terms:
        q = exact(c, d)
        if q is None:
            rest.append((v, c))
        else:
            quotient.append((v, q))
    qc: Size = 0
    rc: Size = index.const
    number = rc if isinstance(rc, int) else dict(rc.terms).get((), 0)
    q = exact(rc - number, d)
    if q is not None:  # 1 - 2 * s = 2 * -s + 1
        qc = q
        rc = number
    if isinstance(rc, int) and isinstance(d, int):
        more, rc = divmod(rc, d)
        qc += more
    q_index = _index(tuple(quotient), qc)
    r_index = _index(tuple(rest), rc)
    low, high = r_index.bounds()
    is_whole = not (q_index.terms or q_index.const)
    if below(-1, low) or (is_whole and not isinstance(low, int)):
        if below(high, d):
            return q_index, r_index
    elif not is_whole:
        # What was split off may have kept the rest from being negative, as in (5 - i) / 3 = 1 + (2
        # - i) / 3.
        if not (isinstance(low, int) and isinstance(d, int)):
            return _opaque(index, d)
        shift = -(low // d)
        q_index = q_index - shift
        r_index = r_index + shift * d
    more_q, more_r = _opaque(r_index, d)
    return q_index + more_q, more_r


def _opaque(rest: Index, d: Size) -> tuple[Index, Index]:
    """Quotient and remainder of an index no term of which divides exactly: peel off what is smaller
    than a common factor."""
    if isinstance(d, int) and all(isinstance(c, int) for _, c in rest.terms):
        for g in sorted(
            {math.gcd(d, c) for _, c in rest.terms if isinstance(c, int)}, reverse=True
        ):
            if g == 1:
                break
            high = [(v, c) for v, c in rest.terms if c % g == 0]
            low = _index(
                tuple((v, c) for v, c in rest.terms if c % g),
                rest.const % g if isinstance(rest.const, int) else rest.const,
            )
            least, most = low.bounds()
            if (
                isinstance(least, int)
                and isinstance(rest.const, int)
                and least >= 0
                and below(most, g)
            ):
                scaled = _index(tuple((v, c // g) for v, c in high), rest.const // g)
                q, r = divide(scaled, d // g)
                return q, combine(((r, g), (low, 1)))
    payload = (rest, d)
    whole = variable("div", payload, _quotient_extent(payload), rest.depth)
    left = variable("mod", payload, d, rest.depth)
    return of(whole), of(left)


def linear(index: Sequence[Index], dims: Sequence[Size]) -> Index:
    """Row-major element number of a multi-index."""
    if len(index) == 1:
        return index[0]
    return combine(zip(index, row_major_strides(tuple(dims)), strict=True))


def delinear(index: Index, dims: Sequence[Size]) -> tuple[Index, ...]:
    """Inverse of `linear`."""
    result: list[Index] = []
    for d in reversed(dims[1:]):
        if d == 1:
            result.append(ZERO)
            continue
        index, r = divide(index, d)
        result.append(r)
    if dims:
        result.append(ZERO if dims[0] == 1 else index)
    return tuple(reversed(result))


def regroup(
    index: Sequence[Index], source: Sequence[Size], target: Sequence[Size]
) -> tuple[Index, ...]:
    """Index into dims `target` of the element at `index` of dims `source` (equal sizes). Runs of
    dimensions with equal products are handled on their own, so that a dimension that both have
    keeps its index, whatever its bounds say."""
    result: list[Index] = []
    i = j = 0
    while i < len(source) or j < len(target):
        if j < len(target) and target[j] == 1:
            result.append(ZERO)
            j += 1
            continue
        if i < len(source) and source[i] == 1:
            i += 1
            continue
        if i == len(source) or j == len(target):
            return delinear(linear(index, source) if index else ZERO, target)
        first_i = i
        first_j = j
        a = source[i]
        b = target[j]
        i = i + 1
        j = j + 1
        while a != b:
            if j < len(target) and exact(a, b) is not None:
                b = b * target[j]
                j = j + 1
            elif i < len(source) and exact(b, a) is not None:
                a = a * source[i]
                i = i + 1
            elif (
                isinstance(a, int)
                and isinstance(b, int)
                and (j < len(target) if a > b else i < len(source))
            ):
                if a > b:
                    b = b * target[j]
                    j = j + 1
                else:
                    a = a * source[i]
                    i = i + 1
            else:
                return delinear(linear(index, source), target)
        result += delinear(linear(index[first_i:i], source[first_i:i]), target[first_j:j])
    return tuple(result)


def variables(indices: Iterable[Index]) -> set[Var]:
    """All variables that the indices are made of, opaque ones and their parts included."""
    found: set[Var] = set()
    stack = [v for i in indices for v, _ in i.terms]
    while stack:
        v = stack.pop()
        if v not in found:
            found.add(v)
            inner = (
                (v.payload[0],)
                if v.kind in ("div", "mod")
                else v.payload[1]
                if v.kind == "value"
                else ()
            )
            stack.extend(w for i in inner for w, _ in i.terms)
    return found
