"""Fourier transforms of as many lines as a vector has lanes: where numbers are read and written,
butterflies, passes.

A number is a pair of vectors, real and imaginary parts of one point of every line. Lines lie beside
each other (`Columns`: a point of all of them is contiguous), one after the other (`rows_in` and
`rows_out` transpose), or in scratch memory (`Block`). Inverse transforms exchange real and
imaginary parts where they read and where they write; nothing else differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..codegen import Writer
from ..llvm import Int, Typed, complex as complex_math
from ..matmul.tile import Tile
from .fft_plan import lane_order, passes

Pair = tuple[str, str]


@dataclass
class Lines:
    """What the functions here share: the function written to, and the vector."""

    f: Writer
    tile: Tile

    @property
    def kind(self) -> str:
        return self.tile.kind

    @property
    def lanes(self) -> int:
        return self.tile.lanes

    @property
    def itemsize(self) -> int:
        return self.tile.itemsize

    @property
    def t(self) -> Typed:
        return self.f.typed(self.kind, self.lanes)

    def at(self, pointer: str, index: Int) -> str:
        return self.f.gep(self.kind, pointer, index)

    def scalar(self, pointer: str, index: Int) -> str:
        """An element in all lanes."""
        return self.f.splat(
            self.kind,
            self.lanes,
            self.f.load(self.kind, self.at(pointer, index)),
        )

    def shuffle(self, a: str, b: str, order: list[int]) -> str:
        return self.f.emit(self.lanes).shuffle(self.kind, a, b, self.lanes, order)

    def parted(self, low: str, high: str) -> Pair:
        """Real and imaginary parts of the numbers in two vectors, in `lane_order`."""
        order = [2 * c for c in lane_order(self.lanes, self.itemsize)]
        return self.shuffle(low, high, order), self.shuffle(low, high, [i + 1 for i in order])

    def joined(self, value: Pair) -> Pair:
        """The inverse of `parted`."""
        lane = {c: i for i, c in enumerate(lane_order(self.lanes, self.itemsize))}
        order = [lane[c] + part * self.lanes for c in range(self.lanes) for part in (0, 1)]
        return self.shuffle(*value, order[: self.lanes]), self.shuffle(*value, order[self.lanes :])

    def product(self, a: Pair, w: Pair) -> Pair:
        t = self.t
        return fma(t, t.neg(a[1]), w[1], t.mul(a[0], w[0])), fma(t, a[1], w[0], t.mul(a[0], w[1]))

    def root(self, pointer: str, index: Int) -> Pair:
        """Number `index` of a table of twiddle factors, in all lanes."""
        at = self.f.mul(index, 2)
        return self.scalar(pointer, at), self.scalar(pointer, self.f.add(at, 1))


@dataclass
class Block:
    """Points in scratch memory: for each the real parts of all lines, then the imaginary ones."""

    lines: Lines
    pointer: str

    def get(self, i: Int) -> Pair:
        c = self.lines
        at = c.f.mul(i, 2 * c.lanes)
        real, imaginary = (
            c.t.load(c.at(self.pointer, c.f.add(at, d)), c.lanes * c.itemsize) for d in (0, c.lanes)
        )
        return real, imaginary

    def put(self, i: Int, value: Pair) -> None:
        c = self.lines
        at = c.f.mul(i, 2 * c.lanes)
        for d, v in zip((0, c.lanes), value, strict=True):
            c.t.store(v, c.at(self.pointer, c.f.add(at, d)), c.lanes * c.itemsize)

    def part(self, i: Int) -> Block:
        """From point i on."""
        return Block(
            self.lines,
            self.lines.at(self.pointer, self.lines.f.mul(i, 2 * self.lines.lanes)),
        )


@dataclass
class Columns:
    """Points in memory, those of all lines beside each other, `stride` elements from one to the
    next. `masks`: of the vectors' elements that are there, or None. `factor(i)`: what to multiply
    by before point i is written."""

    lines: Lines
    pointer: str
    stride: Int
    masks: Pair | None
    swap: bool
    scale: float = 1.0
    factor: Callable[[Int], Pair] | None = None

    def get(self, i: Int) -> Pair:
        c = self.lines
        at = c.at(self.pointer, c.f.mul(i, self.stride))
        low, high = (
            c.t.load(c.at(at, d), mask=m)
            for d, m in zip((0, c.lanes), self.masks or (None, None), strict=True)
        )
        return swapped(c.parted(low, high), self.swap)

    def put(self, i: Int, value: Pair) -> None:
        c = self.lines
        if self.factor:
            value = c.product(value, self.factor(i))
        value = swapped(scaled(c, value, self.scale), self.swap)
        at = c.at(self.pointer, c.f.mul(i, self.stride))
        for d, v, m in zip((0, c.lanes), c.joined(value), self.masks or (None, None), strict=True):
            c.t.store(v, c.at(at, d), mask=m)


@dataclass
class RealColumns:
    """Real points in memory, those of all lines beside each other; two neighbouring ones are a
    number. `mask`: of the lines that are there."""

    lines: Lines
    pointer: str
    stride: Int
    mask: str | None
    swap: bool
    scale: float = 1.0

    def _places(self, i: Int) -> list[str]:
        c = self.lines
        return [c.at(self.pointer, c.f.mul(c.f.muladd(i, 2, d), self.stride)) for d in (0, 1)]

    def get(self, i: Int) -> Pair:
        c = self.lines
        order = lane_order(c.lanes, c.itemsize)
        parts = [c.t.load(p, mask=self.mask) for p in self._places(i)]
        real, imaginary = (c.shuffle(v, v, order) for v in parts)
        return swapped((real, imaginary), self.swap)

    def put(self, i: Int, value: Pair) -> None:
        c = self.lines
        order = lane_order(c.lanes, c.itemsize)
        value = swapped(scaled(c, value, self.scale), self.swap)
        for p, v in zip(self._places(i), value, strict=True):
            c.t.store(
                c.shuffle(v, v, [order.index(k) for k in range(c.lanes)]),
                p,
                mask=self.mask,
            )


def scaled(c: Lines, value: Pair, scale: float) -> Pair:
    if scale == 1.0:
        return value
    real, imaginary = (c.t.mul(v, scale) for v in value)
    return real, imaginary


def swapped(value: Pair, swap: bool) -> Pair:
    return (value[1], value[0]) if swap else value


Points = Block | Columns | RealColumns  # where the points of a vector of lines are


def column_masks(c: Lines, left: Int) -> Pair:
    """Masks of `Columns` of which `left` are there."""
    low, high = (c.f.lane_mask(c.lanes, d, c.f.mul(left, 2)) for d in (0, c.lanes))
    return low, high


def rows_in(
    c: Lines,
    source: str,
    stride: Int,
    left: Int,
    points: int,
    block: Block,
    swap: bool,
) -> None:
    """Bring `points` points of `lanes` lines that are `stride` elements apart to `block`. Of `left`
    lines that are there, the last stands for the missing."""
    _transpose(
        c,
        source,
        stride,
        left,
        points,
        lambda t, addresses, masks: _read(c, t, addresses, masks, block, swap),
    )


def rows_out(
    c: Lines,
    target: str,
    stride: Int,
    left: Int,
    points: int,
    block: Block,
    swap: bool,
    scale: float = 1.0,
) -> None:
    """The other way. Missing lines hold what the last one does, so it is written more than once."""
    _transpose(
        c,
        target,
        stride,
        left,
        points,
        lambda t, addresses, masks: _write(c, t, addresses, masks, block, swap, scale),
    )


def _transpose(
    c: Lines,
    pointer: str,
    stride: Int,
    left: Int,
    points: int,
    move: Callable[..., None],
) -> None:
    """move(point, addresses of it in all lines, mask) for every vector of points."""
    f, step = c.f, c.lanes // 2
    last = f.sub(left, 1)
    lines = [c.at(pointer, f.mul(f.min(i, last), stride)) for i in range(c.lanes)]
    whole = points - points % step
    if whole:
        with f.loop(0, whole, step, known_nonempty=True) as i:
            move(i, [c.at(p, f.mul(i, 2)) for p in lines], None)
    if points > whole:
        move(
            whole,
            [c.at(p, 2 * whole) for p in lines],
            f.lane_mask(c.lanes, 0, 2 * (points - whole)),
        )


def _turned(c: Lines, vectors: list[str]) -> list[str]:
    """Vectors of `lanes // 2` numbers, as many as that, transposed."""
    return c.tile.transposed(c.f, vectors, group=2)


def _read(
    c: Lines,
    i: Int,
    addresses: list[str],
    mask: str | None,
    block: Block,
    swap: bool,
) -> None:
    half = c.lanes // 2
    vectors = [c.t.load(p, mask=mask) for p in addresses]
    part = block.part(i)
    for k, (low, high) in enumerate(
        zip(_turned(c, vectors[:half]), _turned(c, vectors[half:]), strict=True)
    ):
        part.put(k, swapped(c.parted(low, high), swap))


def _write(
    c: Lines,
    i: Int,
    addresses: list[str],
    mask: str | None,
    block: Block,
    swap: bool,
    scale: float,
) -> None:
    half = c.lanes // 2
    part = block.part(i)
    pairs = [c.joined(swapped(scaled(c, part.get(k), scale), swap)) for k in range(half)]
    vectors = [v for side in zip(*pairs, strict=True) for v in _turned(c, list(side))]
    for p, v in zip(addresses, vectors, strict=True):
        c.t.store(v, p, mask=mask)


def fma(t: Typed, a: str, b: str, c: str) -> str:
    """a b + c, rounded once where that is an instruction."""
    return t.fma(a, b, c) if t.e.unit.fuses else t.add(t.mul(a, b), c)


def butterfly(t: Typed, x: list[Pair]) -> list[Pair]:
    """The transform of len(x) numbers, 2, 4, 8 or odd."""

    add = partial(complex_math.add, t)
    sub = partial(complex_math.subtract, t)

    def fused(factor: str, v: Pair, e: Pair) -> Pair:
        return fma(t, factor, v[0], e[0]), fma(t, factor, v[1], e[1])

    if len(x) == 1:
        return x
    if len(x) == 2:
        return [add(*x), sub(*x)]
    if len(x) == 4:
        a = add(x[0], x[2])
        b = sub(x[0], x[2])
        c = add(x[1], x[3])
        d = sub(x[1], x[3])
        return [
            add(a, c),
            (t.add(b[0], d[1]), t.sub(b[1], d[0])),
            sub(a, c),
            (t.sub(b[0], d[1]), t.add(b[1], d[0])),
        ]
    if len(x) == 8:
        even = butterfly(t, x[::2])
        odd = butterfly(t, x[1::2])
        up = t.const(math.sqrt(0.5))
        down = t.const(-math.sqrt(0.5))
        # odd[1] (1 - i) / sqrt(2) and odd[3] (-1 - i) / sqrt(2) are multiplied as they are added
        a = (t.add(*odd[1]), t.sub(odd[1][1], odd[1][0]))
        b = (t.sub(odd[3][1], odd[3][0]), t.neg(t.add(*odd[3])))
        late = [None, a, None, b]
        odd[2] = (odd[2][1], t.neg(odd[2][0]))
        return [
            op(e, o) if v is None else fused(factor, v, e)
            for op, factor in ((add, up), (sub, down))
            for e, o, v in zip(even, odd, late, strict=True)
        ]
    return _odd(t, x, add, sub)


Sum = Callable[[Pair, Pair], Pair]


def _odd(
    t: Typed,
    x: list[Pair],
    add: Sum,
    sub: Sum,
) -> list[Pair]:
    """By the definition, points k and r - k together: r - 1 squared multiply-adds."""
    r = len(x)
    sums, differences = ([op(x[k], x[r - k]) for k in range(1, r // 2 + 1)] for op in (add, sub))
    total = x[0]
    for s in sums:
        total = add(total, s)
    low, high = [], []
    for j in range(1, r // 2 + 1):
        real, turn = x[0], ("", "")
        for k, (s, d) in enumerate(zip(sums, differences, strict=True), 1):
            cos, sin = (t.const(fn(2 * math.pi * (j * k % r) / r)) for fn in (math.cos, math.sin))
            real = fma(t, cos, s[0], real[0]), fma(t, cos, s[1], real[1])
            if k == 1:
                turn = t.mul(sin, d[0]), t.mul(sin, d[1])
            else:
                turn = fma(t, sin, d[0], turn[0]), fma(t, sin, d[1], turn[1])
        low.append((t.add(real[0], turn[1]), t.sub(real[1], turn[0])))
        high.append((t.sub(real[0], turn[1]), t.add(real[1], turn[0])))
    return [total, *low, *reversed(high)]


def transform(
    c: Lines,
    n: int,
    source: Points,
    target: Points,
    spare: tuple[Block, Block],
    twiddles: str,
) -> None:
    """target[k] = sum over i of source[i] exp(-2 pi i k / n). Passes between first and last use the
    `spare` blocks, of which `source` and `target` may be one each; `twiddles`: pointer to
    `pass_twiddles(n)`. With one pass source and target may be the same memory."""
    f, rs = c.f, passes(n)
    # of the transforms that are left; points that are done, one after the other
    length, run, table = n, 1, 0
    for number, r in enumerate(rs or (1,)):
        free = spare[0] if getattr(source, "pointer", None) != spare[0].pointer else spare[1]
        to = target if number + 1 >= len(rs) else free
        m = length // r
        first = m * (r - 1)

        def butterflies(p: Int, q: Int) -> None:
            at = f.muladd(p, run, q)
            values = butterfly(c.t, [source.get(f.add(at, run * m * k)) for k in range(r)])
            if m > 1:
                w = f.mul(p, r - 1)
                values = [
                    values[0],
                    *(
                        c.product(v, c.root(twiddles, f.add(w, table, k)))
                        for k, v in enumerate(values[1:])
                    ),
                ]
            at = f.muladd(p, run * r, q)
            for k, v in enumerate(values):
                to.put(f.add(at, run * k), v)

        if m == 1:
            with f.loop(0, run, known_nonempty=True) as q:
                butterflies(0, q)
        else:
            with f.loop(0, m, known_nonempty=True) as p:
                if run == 1:
                    butterflies(p, 0)
                else:
                    with f.loop(0, run, known_nonempty=True) as q:
                        butterflies(p, q)
        source = to
        length = m
        run *= r
        table += first * (m > 1)


def _halves(
    c: Lines,
    a: Pair,
    b: Pair,
    w: Pair,
    inverse: bool,
) -> tuple[Pair, Pair]:
    """Points k and n - k after `untangle` (or twice what they were before it, `inverse`) from those
    before."""
    t = c.t
    even = (t.add(a[0], b[0]), t.sub(a[1], b[1]))
    odd = (t.sub(a[0], b[0]), t.add(a[1], b[1]))
    if inverse:  # i conj(w) (a - conj b)
        turn = c.product(odd, (w[0], t.neg(w[1])))
        turn = t.neg(turn[1]), turn[0]
    else:  # w (a - conj b) / 2i
        even, odd = scaled(c, even, 0.5), scaled(c, odd, 0.5)
        turn = c.product((odd[1], t.neg(odd[0])), w)
    return (t.add(even[0], turn[0]), t.add(even[1], turn[1])), (
        t.sub(even[0], turn[0]),
        t.sub(turn[1], even[1]),
    )


def untangle(c: Lines, n: int, source: Points, target: Points) -> None:
    """Spectrum of 2n real points, n + 1 numbers, from the transform of the n numbers that pairs of
    them are. In place if need be. (Cooley, Lewis, Welch 1970.)"""
    t, zero = c.t, c.t.const(0.0)
    x = source.get(0)
    with c.f.loop(1, n // 2 + 1) as k:
        other = c.f.sub(n, k)
        low, high = _halves(c, source.get(k), source.get(other), c.root("%roots", k), False)
        target.put(k, low)
        target.put(other, high)
    target.put(0, (t.add(*x), zero))
    target.put(n, (t.sub(*x), zero))


def tangle(c: Lines, n: int, source: Points, target: Points) -> None:
    """Twice the inverse of `untangle`, with real and imaginary parts exchanged for an inverse
    transform. Imaginary parts of the ends are ignored."""
    t = c.t
    first = source.get(0)[0]
    last = source.get(n)[0]
    with c.f.loop(1, n // 2 + 1) as k:
        other = c.f.sub(n, k)
        low, high = _halves(c, source.get(k), source.get(other), c.root("%roots", k), True)
        target.put(k, low[::-1])
        target.put(other, high[::-1])
    target.put(0, (t.sub(first, last), t.add(first, last)))


def mirror_line(
    c: Lines,
    n: int,
    source: str,
    target: str,
    blocks: tuple[Int, Int],
    inverse: bool,
) -> None:
    """`untangle` (or `tangle`) one line, points along the lanes: vectors `blocks` of the points 1
    to n / 2 and what mirrors them. %roots: `mirror_roots`."""
    f, lanes = c.f, c.lanes
    lane = lane_order(lanes, c.itemsize)
    back = [2 * (lanes - 1 - i) for i in lane]
    held = {lanes - 1 - i: place for place, i in enumerate(lane)}
    order = [held[i] + part * lanes for i in range(lanes) for part in (0, 1)]
    with f.loop(*blocks) as block:
        k = f.muladd(block, lanes, 1)
        low, high = (
            Columns(c, c.at(pointer, f.mul(k, 2)), 0, None, False) for pointer in (source, target)
        )
        mirrored = f.mul(f.sub(n - lanes + 1, k), 2)
        first, second = (c.t.load(c.at(source, f.add(mirrored, d))) for d in (0, lanes))
        odd = [i + 1 for i in back]
        other = c.shuffle(first, second, back), c.shuffle(first, second, odd)
        a, b = _halves(c, low.get(0), other, Block(c, "%roots").get(block), inverse)
        high.put(0, a[::-1] if inverse else a)
        b = b[::-1] if inverse else b
        for d, part in zip((0, lanes), (order[:lanes], order[lanes:]), strict=True):
            c.t.store(c.shuffle(*b, part), c.at(target, f.add(mirrored, d)))


def mirror_ends(c: Lines, n: int, source: str, target: str, inverse: bool) -> None:
    """Points 0 and n of `mirror_line`."""
    f, t = c.f, c.f.typed(c.kind)
    a, b = (f.load(c.kind, c.at(source, i)) for i in ((0, 2 * n) if inverse else (0, 1)))
    plus = t.add(a, b)
    minus = t.sub(a, b)
    zero = t.const(0.0)
    found = {0: minus, 1: plus} if inverse else {0: plus, 1: zero, 2 * n: minus, 2 * n + 1: zero}
    for i, v in found.items():
        f.store(c.kind, v, c.at(target, i))
