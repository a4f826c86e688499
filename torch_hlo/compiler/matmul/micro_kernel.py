"""The micro-kernel: a register tile of C in registers over a block of K, and its way to memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch_hlo.frozen import frozen

from ..llvm import Function, Int, signature
from ..thresholds import LOADS, PREFETCH
from .tile import Source, Tile, converted

SHARED = 7  # rows of A, read where they are, that follow one pointer
# i = (1, 3, 5)[which] * scale: registers and the scales that addresses have
_MULTIPLES = ((0, 0), (0, 1), (0, 2), (1, 1), (0, 4), (2, 1), (1, 2))


def embedded(t: Tile, rows: int) -> int:
    """How many rows of a register tile are broadcast by each multiplication that reads them, as an
    operand in memory, instead of once by an instruction.

    Such a row takes one slot of the processor's front end less and `vectors` - 1 loads more. Slots
    are what decides where a core has half of them, because its other hyperthread is busy: the 14 x
    32 tile went from 54 per element of K, with 28 multiplications, to 40."""
    if t.lanes * t.itemsize < 64 or t.vectors == 1 or not t.is_float:
        return 0  # only AVX-512 has such operands
    spare = LOADS / 2 * rows * t.vectors - rows - t.vectors
    return max(0, min(rows, int(spare) // (t.vectors - 1)))


@frozen
class MicroKernel:
    """C[rows, columns] (+)= A panel x B. `cols` columns are valid, all with `whole`; with `partial`
    only `%valid_rows` rows.

    B holds `vectors` panels of [depth][lanes], one after the other; with `direct` it is the
    unpacked operand, its rows `%b_k` elements apart. (A masked load takes a multiplier's port,
    which costs a `direct` kernel 6 % when nothing is masked.) With `ahead`, every `ahead`
    iterations ask for the cache line `%ahead_step` bytes after the last one: 2 to 5 % of products
    of large matrices. With `block_ahead` they ask for one after the other from `%block` on. With
    `in_rows` A is the unpacked operand, rows along K `%a_free` elements apart, with `in_lanes` one
    whose rows are adjacent and whose K is `%a_k` elements apart. `unroll` divides the depth.
    `fetch`: rows of a `direct` B are asked for in advance. `right`: what panels of B hold, which is
    converted as it is read; None if they hold the tile's elements."""

    tile: Tile
    rows: int
    partial: bool = False
    direct: bool = False
    whole: bool = False
    ahead: int = 0
    block_ahead: bool = False
    in_rows: bool = False
    in_lanes: bool = False
    unroll: int = 1
    fetch: bool = True
    right: Source | None = None

    @property
    def name(self) -> str:
        flags = (
            "p" * self.partial,
            "d" * self.direct,
            "w" * self.whole,
            f"a{self.ahead}" * (self.ahead > 0),
            "b" * self.block_ahead,
            "r" * self.in_rows,
            "l" * self.in_lanes,
            "n" * (not self.fetch),
            self.right.name if self.right else "",
        )
        size = f"{self.rows}x{self.tile.vectors}"
        return f"micro_{self.tile.suffix}_{size}{''.join(flags)}u{self.unroll}"

    @property
    def parameters(self) -> list[tuple[str, str]]:
        return [
            ("ptr noalias", "A"),
            ("ptr noalias", "B"),
            ("i64", "depth"),
            ("ptr noalias", "C"),
            *signature("i64 ldc, i64 cols, i1 more"),
            *[("i64", "valid_rows")] * self.partial,
            *[("i64", "b_k")] * self.direct,
            *signature("ptr ahead, i64 ahead_step") * (self.ahead > 0),
            *[("ptr", "block")] * self.block_ahead,
            *[("i64", "a_free")] * self.in_rows,
            *[("i64", "a_k")] * self.in_lanes,
        ]

    def function(self) -> Function:
        return _Writing(self).function()


class _Writing:
    """A micro-kernel while it is written.

    Operands are followed by pointers: with addresses computed from the loop's index, loads move
    away from their use and accumulators to memory."""

    def __init__(self, kernel: MicroKernel) -> None:
        self.kernel = kernel
        self.t = kernel.tile
        t = self.t
        f = self.f = Function(kernel.name, kernel.parameters, attrs="noinline #0")
        # B is read under them: where it is packed only what is stored has an edge
        self.masks = edge(f, t) if kernel.direct and not kernel.whole else [""] * t.vectors
        self.kind = kernel.right.kind if kernel.right else t.kind
        self.right = ["%B"]
        for _ in range(0 if kernel.direct else t.vectors - 1):
            self.right.append(f.gep(self.kind, self.right[-1], f.mul("%depth", t.lanes)))
        self.distances: list[Int] = []
        self.again = 0
        if kernel.in_rows:
            rows = range(0, kernel.rows, SHARED)
            self.left = [t.gep(f, "%A", f.mul("%a_free", i)) for i in rows]
            self.distances = [f.mul("%a_free", t.itemsize * i) for i in (1, 3, 5)]
        else:
            self.again = 0 if kernel.in_lanes else embedded(t, kernel.rows)
            # what several pointers read, LLVM does not load once for all
            self.left = ["%A"] * (t.vectors if self.again else 1)
        self.far = f.mul("%b_k", PREFETCH) if kernel.direct else 0
        self.a_step: Int = "%a_k" if kernel.in_lanes else t.lanes

    def function(self) -> Function:
        f = self.f
        t = self.t
        kernel = self.kernel
        sums = kernel.rows * t.vectors
        pointers = len(self.left)
        carry = [(t.vector, "zeroinitializer")] * sums
        carry += [("ptr", p) for p in (*self.left, *self.right)]
        with f.loop(0, "%depth", kernel.unroll, carry=carry, known_nonempty=True) as loop:
            c = loop.vars[:sums]
            rest = loop.vars[sums:]
            a_at = rest[:pointers]
            b_at = rest[pointers:]
            self.ask(loop.index)
            for u in range(kernel.unroll):
                self.step(c, a_at, b_at, u)
            loop.next = [*c, *self.advanced(a_at, b_at)]
        store_tile(f, t, kernel.rows, loop.vars[:sums], kernel.partial, kernel.whole)
        return f

    def ask(self, index: str) -> None:
        """Ask for what is read next, a line per iteration."""
        f = self.f
        ahead = self.kernel.ahead
        if ahead:
            line = f.gep("i8", "%ahead", f.mul(f.div(index, ahead), "%ahead_step"))
            f.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 2, i32 1)")
        if self.kernel.block_ahead:
            line = self.t.gep(f, "%block", index)
            f.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 2, i32 1)")

    def step(self, c: list[str], a_at: list[str], b_at: list[str], u: int) -> None:
        """Add the products of step `u` along K to the sums `c`."""
        f = self.f
        t = self.t
        b = self.right_vectors(b_at, u)
        for i in range(self.kernel.rows):
            for j, a in enumerate(self.broadcast(a_at, i, u)):
                at = i * t.vectors + j
                c[at] = t.fma(f, a, b[j], c[at])

    def broadcast(self, pointers: list[str], i: int, u: int) -> list[str]:
        """Element `u` of row `i`, for each vector of B."""
        f = self.f
        t = self.t
        if self.kernel.in_rows:
            at = pointers[i // SHARED]
            which, scale = _MULTIPLES[i % SHARED]
            row = f.gep(f"i{8 * scale}", at, self.distances[which]) if scale else at
            places = [t.gep(f, row, u)]
        else:
            places = [
                t.gep(f, t.gep(f, p, f.mul(self.a_step, u)), i)
                for p in (pointers if i < self.again else pointers[:1])
            ]
        values = [f.splat(t.kind, t.lanes, f.load(t.kind, p)) for p in places]
        return values if len(values) == t.vectors else values * t.vectors

    def right_vectors(self, pointers: list[str], u: int) -> list[str]:
        f = self.f
        t = self.t
        kernel = self.kernel
        if not kernel.direct:
            places = [f.gep(self.kind, p, u * t.lanes) for p in pointers]
            source = kernel.right
            if source is None:
                return [t.load(f, p) for p in places]
            narrow = f"<{t.lanes} x {source.kind}>"
            return [converted(f, t, source, f.load(narrow, p, source.itemsize)) for p in places]
        row = t.gep(f, pointers[0], f.mul("%b_k", u))
        coming = t.gep(f, row, self.far) if kernel.fetch else row
        for j in range(t.vectors * kernel.fetch):
            line = t.gep(f, coming, j * t.lanes)
            f.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 3, i32 1)")
        places = [t.gep(f, row, j * t.lanes) for j in range(t.vectors)]
        return [t.load(f, p, m) for p, m in zip(places, self.masks, strict=True)]

    def advanced(self, a_at: list[str], b_at: list[str]) -> list[str]:
        """The pointers after `unroll` steps."""
        f = self.f
        t = self.t
        unroll = self.kernel.unroll
        a: list[str] = []
        for p in a_at:
            a.append(t.gep(f, p, unroll if self.kernel.in_rows else f.mul(self.a_step, unroll)))
        b: list[str] = []
        for p in b_at:
            step = f.mul("%b_k", unroll) if self.kernel.direct else unroll * t.lanes
            b.append(f.gep(self.kind, p, step))
        return a + b


def edge(f: Function, t: Tile) -> list[str]:
    """Masks of the first %cols columns of a tile."""
    return [f.lane_mask(t.lanes, j * t.lanes, "%cols") for j in range(t.vectors)]


def store_tile(
    f: Function,
    t: Tile,
    rows: int,
    values: list[str],
    partial: bool = False,
    whole: bool = False,
) -> None:
    """Store a register tile to %C (leading dimension %ldc), adding what is there when %more. Its
    first %cols columns are valid, all with `whole`; those of whole tiles need no masked stores."""
    add = "fadd" if t.is_float else "add"

    def places(masks: list[str]) -> Iterator[tuple[str, str, str]]:
        for i in range(rows):
            row = t.gep(f, "%C", f.mul("%ldc", i))
            inside = f.icmp("slt", i, "%valid_rows") if partial else None
            for j in range(t.vectors):
                mask = masks[j]
                if inside:
                    mask = f.op(
                        f"select i1 {inside}, <{t.lanes} x i1> {mask}, <{t.lanes} x i1>"
                        " zeroinitializer"
                    )
                yield values[i * t.vectors + j], t.gep(f, row, j * t.lanes), mask

    def store(masks: list[str]) -> None:
        def write(more: bool) -> None:
            for value, p, mask in places(masks):
                if more:
                    old = t.load(f, p, mask)
                    value = f.op(f"{add} {t.vector} {value}, {old}")
                t.store(f, value, p, mask)

        f.choose("%more", lambda: write(True), lambda: write(False))

    no_masks = [""] * t.vectors
    if whole and not partial:
        store(no_masks)
    elif partial or t.masks_stores:
        store(edge(f, t))
    else:
        is_whole = f.icmp("sge", "%cols", t.columns)
        f.choose(is_whole, lambda: store(no_masks), lambda: store(edge(f, t)))
