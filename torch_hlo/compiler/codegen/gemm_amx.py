"""Products on AMX tiles: C[m, n] = sum_k A[m, k] B[k, n] of bf16 with f32 sums, or of bytes with i32 sums. Other results are an epilogue's affair.

A register tile is 16 rows of 64 bytes. The micro-kernel holds 32 x 32 of C in four tiles; a step takes 64 bytes of K from 32 rows of A and
32 columns of B: two tiles of A ([16 rows][64 bytes of k]) and two of B ([16 groups of k][16 columns][group], a group is 4 bytes). Packing brings
any operand into a sequence of such tiles, padded with zeros along K.

A step takes 64 cycles of the tile units; on random data 33 to 40 ns as long as one operand comes from L1 and the other from L2, 43 when both come from
L2. So a block of B stays in L2 and is read past L1 (tileloaddt1), A is packed in panels of PANEL_STEPS steps, and while a panel is multiplied the rows of the
next one are asked for.

A product whose right operand is contiguous along K (a layer's weights) may be computed transposed: then packing the weights, the larger
operand, only copies, and nothing of them goes back to memory. It pays while the other operand stays in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import (
    BLOCK_PARAMETERS,
    Tile,
    lane_mask,
    masked_load,
    masked_store,
    transposed,
)
from torch_hlo.hlo.dim import Size, ceildiv

BLOCK = 32  # rows and columns of a micro-kernel
STEP_BYTES = 2048  # two tiles: what a step of the micro-kernel takes of each operand
ROWS_AHEAD = 2  # rows of which a call of the micro-kernel asks for what it packs next
FINISHED = 128  # columns of sums that an epilogue takes at a time: 16 KB of L1
PANEL_STEPS = 12  # steps of a panel of A: 16 KB of L1
K_SINGLE = 4096  # up to here K is one block
K_BLOCK = 1024
K_TRANSPOSED = 8192  # up to here C may be written transposed
B_BYTES = 1 << 20  # of L2 for a block of packed B
LANES_AHEAD = 192  # bytes: rows of lanes are read a cache line at a time, each from another page, where no processor looks ahead
COLUMNS = 512
TOGETHER = 4  # tiles of A whose sums are turned together
TURNED = 1024  # columns at a time of a product that is computed transposed
GAP = 16  # elements between the rows of sums in scratch memory: rows a power of 2 apart would share few sets of a cache
WORDS = Tile("i32", 4, 16, 16, 1)


@dataclass(frozen=True, slots=True)
class Element:
    """Types of elements of A and B that the tiles multiply, and of their sums. `depth`: elements of K in a step; `group`: those that lie together in B."""

    name: str
    kind: str
    itemsize: int
    sums: str
    instruction: str

    @property
    def group(self) -> int:
        return 4 // self.itemsize

    @property
    def depth(self) -> int:
        return 64 // self.itemsize


ELEMENTS = {("bf16", "bf16"): Element("bf16", "i16", 2, "float", "tdpbf16ps"),
            ("s8", "s8"): Element("s8", "i8", 1, "i32", "tdpbssd"), ("u8", "u8"): Element("u8", "i8", 1, "i32", "tdpbuud")}  # fmt: skip
FEATURES = {"bf16": "amx-bf16", "s8": "amx-int8", "u8": "amx-int8"}  # by type of an operand


def pack(name: str, side: str, form: str, e: Element) -> Function:
    """void(src, lane_stride, k_stride, depth, valid, dst): 16 lanes (rows of A, columns of B) as tiles 2048 bytes apart.

    `form` says what is contiguous: "k", "lane" or "none". Lanes from `valid` on repeat others; K is padded with zeros.
    """
    params = [
        ("ptr", "src"),
        ("i64", "lane_stride"),
        ("i64", "k_stride"),
        ("i64", "depth"),
        ("i64", "valid"),
        ("ptr", "dst"),
    ]
    f = Function(name, "void", params, attrs="noinline #0")
    whole = f.op(f"and i64 %depth, {-e.depth}")
    if (side, form) == ("a", "k"):
        _copy_rows(f, e, whole)
        return f
    read = {"k": _rows_along_k, "lane": _rows_along_lanes, "none": _rows_of_elements}[form](f, e)
    by_groups = (
        form == "lane"
    )  # vectors are [group of k][lane][group], as tiles of B are; else [lane][k], as tiles of A are

    def block(k: Int, tail: bool) -> None:
        vectors = read(k, tail)
        if by_groups != (side == "b"):
            vectors = transposed(f, WORDS, vectors)
        to = f.gep("i8", "%dst", f.mul(f.div(k, e.depth), STEP_BYTES))
        for i, v in enumerate(vectors):
            f.store("<16 x i32>", v, f.gep("i8", to, 64 * i), 4)

    with f.loop(0, whole, e.depth) as k:
        block(k, False)
    with f.when(f.icmp("slt", whole, "%depth")):
        block(whole, True)
    return f


def _copy_rows(f: Function, e: Element, whole: Int) -> None:
    """Rows along K as they are; one row after the other, so that memory is read in long pieces."""
    last, vector = f.sub("%valid", 1), f"<{e.depth} x {e.kind}>"
    rest = lane_mask(f, e.depth, whole, "%depth")
    with f.loop(0, 16) as lane:
        row, to = (
            f.gep(e.kind, "%src", f.mul(f.min(lane, last), "%lane_stride")),
            f.gep("i8", "%dst", f.mul(lane, 64)),
        )
        with f.loop(0, whole, e.depth) as k:
            v = f.load(vector, f.gep(e.kind, row, k), e.itemsize)
            f.store(vector, v, f.gep("i8", to, f.mul(f.div(k, e.depth), STEP_BYTES)), 4)
        with f.when(f.icmp("slt", whole, "%depth")):
            v = masked_load(f, e.kind, e.depth, f.gep(e.kind, row, whole), rest, e.itemsize)
            f.store(vector, v, f.gep("i8", to, f.mul(f.div(whole, e.depth), STEP_BYTES)), 4)


def _rows_along_k(f: Function, e: Element):
    last, vector = f.sub("%valid", 1), f"<{e.depth} x {e.kind}>"
    rows = [
        f.gep(e.kind, "%src", f.mul(f.min(i, last) if i else 0, "%lane_stride")) for i in range(16)
    ]

    def read(k: Int, tail: bool) -> list[str]:
        if tail:
            mask = lane_mask(f, e.depth, k, "%depth")
            loaded = [
                masked_load(f, e.kind, e.depth, f.gep(e.kind, row, k), mask, e.itemsize)
                for row in rows
            ]
        else:
            loaded = [f.load(vector, f.gep(e.kind, row, k), e.itemsize) for row in rows]
        return [f.op(f"bitcast {vector} {v} to <16 x i32>") for v in loaded]

    return read


def _rows_along_lanes(f: Function, e: Element):
    lanes = lane_mask(f, 16, 0, "%valid")

    def row(k: Int, tail: bool) -> str:
        mask = lanes
        if tail:
            mask = f.op(
                f"select i1 {f.icmp('slt', k, '%depth')}, <16 x i1> {lanes}, <16 x i1> zeroinitializer"
            )
        p = f.gep(e.kind, "%src", f.mul(k, "%k_stride"))
        if not tail:
            f.do(
                f"call void @llvm.prefetch.p0(ptr {f.gep('i8', p, LANES_AHEAD)}, i32 0, i32 2, i32 1)"
            )
        return masked_load(f, e.kind, 16, p, mask, e.itemsize)

    def mixed(kind: str, a: str, b: str) -> str:
        order = ", ".join(f"i32 {i // 2 + i % 2 * 16}" for i in range(32))
        return f.op(f"shufflevector <16 x {kind}> {a}, <16 x {kind}> {b}, <32 x i32> <{order}>")

    def read(k: Int, tail: bool) -> list[str]:
        found = []
        for g in range(16):
            parts, bits = (
                [row(f.add(k, e.group * g + i), tail) for i in range(e.group)],
                8 * e.itemsize,
            )
            while len(parts) > 1:
                parts = [
                    f.op(f"bitcast <32 x i{bits}> {mixed(f'i{bits}', a, b)} to <16 x i{2 * bits}>")
                    for a, b in zip(parts[::2], parts[1::2], strict=True)
                ]
                bits *= 2
            found += parts
        return found

    return read


def _rows_of_elements(f: Function, e: Element):
    block = f.alloca(e.kind, 16 * e.depth, 64)
    last = f.sub("%valid", 1)

    def read(k: Int, tail: bool) -> list[str]:
        with f.loop(0, 16) as lane, f.loop(0, e.depth) as i:
            at = f.add(k, i)
            inside = f.icmp("slt", at, "%depth")
            source = f.add(
                f.mul(f.min(lane, last), "%lane_stride"),
                f.mul(f.select(inside, "i64", at, 0), "%k_stride"),
            )
            v = f.select(
                inside, e.kind, f.load(e.kind, f.gep(e.kind, "%src", source), e.itemsize), 0
            )
            f.store(e.kind, v, f.gep(e.kind, block, f.add(f.mul(lane, e.depth), i)), e.itemsize)
        return [f.load("<16 x i32>", f.gep("i8", block, 64 * lane), 64) for lane in range(16)]

    return read


def micro(name: str, e: Element, ahead: bool = False, strided: bool = False) -> Function:
    """void(A, B, steps, C, ldc, rows, cols, more): up to 32 x 32 of C from packed panels, added to C when `more`.

    With `ahead`, every step asks for a cache line of each of ROWS_AHEAD rows that begin at `%ahead`, `%ahead_row` bytes apart.
    `strided`: A is not packed, it has rows along K that are `%a_row` bytes apart.
    """
    params = [
        ("ptr", "A"),
        ("ptr", "B"),
        ("i64", "steps"),
        ("ptr", "C"),
        ("i64", "ldc"),
        ("i64", "rows"),
        ("i64", "cols"),
        ("i1", "more"),
    ]
    params += [("ptr", "ahead"), ("i64", "ahead_row")] * ahead + [("i64", "a_row")] * strided
    f = Function(name, "void", params, attrs="noinline #0")
    whole = f.op(f"and i1 {f.icmp('sge', '%rows', BLOCK)}, {f.icmp('sge', '%cols', BLOCK)}")
    row_bytes = f.mul("%ldc", 4)

    def corners() -> list[str]:
        below = f.gep(e.sums, "%C", f.mul("%ldc", 16))
        return ["%C", f.gep(e.sums, "%C", 16), below, f.gep(e.sums, below, 16)]

    def load() -> None:
        for t, p in enumerate(corners()):
            f.do(f"call void @llvm.x86.tileloadd64(i8 {t}, ptr {p}, i64 {row_bytes})")

    def zero() -> None:
        for t in range(4):
            f.do(f"call void @llvm.x86.tilezero(i8 {t})")

    def direct() -> None:
        for t, p in enumerate(corners()):
            f.do(f"call void @llvm.x86.tilestored64(i8 {t}, ptr {p}, i64 {row_bytes})")

    f.choose(f.op(f"and i1 {whole}, %more"), load, zero)
    with f.loop(0, "%steps", known_nonempty=True) as s:
        a, b = (
            f.gep("i8", "%A", f.mul(s, 64 if strided else STEP_BYTES)),
            f.gep("i8", "%B", f.mul(s, STEP_BYTES)),
        )
        a_row = "%a_row" if strided else 64
        for t, p in (
            (6, b),
            (4, a),
            (7, f.gep("i8", b, 1024)),
            (5, f.gep("i8", a, f.mul(a_row, 16))),
        ):
            f.do(
                f"call void @llvm.x86.tileload{'dt1' if t > 5 else 'd'}64(i8 {t}, ptr {p}, i64 {64 if t > 5 else a_row})"
            )
        for row in range(ROWS_AHEAD * ahead):
            line = f.gep("i8", "%ahead", f.add(f.mul("%ahead_row", row), f.mul(s, 64)))
            f.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 2, i32 1)")
        for t in range(4):
            f.do(f"call void @llvm.x86.{e.instruction}(i8 {t}, i8 {4 + t // 2}, i8 {6 + t % 2})")
    temporary = f.alloca(e.sums, BLOCK * BLOCK, 64)

    def spill() -> None:
        for t in range(4):
            p = f.gep(e.sums, temporary, t // 2 * 16 * BLOCK + t % 2 * 16)
            f.do(f"call void @llvm.x86.tilestored64(i8 {t}, ptr {p}, i64 {4 * BLOCK})")
        _store_rows(f, e, temporary)

    f.choose(whole, direct, spill)
    return f


def _store_rows(f: Function, e: Element, temporary: str) -> None:
    """Copy the valid part of a 32 x 32 block of sums to C, adding what is there when %more."""
    masks = [lane_mask(f, 16, 16 * j, "%cols") for j in range(2)]
    vector, plus = f"<16 x {e.sums}>", "fadd" if e.sums == "float" else "add"
    with f.loop(0, f.min("%rows", BLOCK), known_nonempty=True) as r:
        for j, mask in enumerate(masks):
            v = f.load(vector, f.gep(e.sums, temporary, f.add(f.mul(r, BLOCK), 16 * j)), 64)
            to = f.gep(e.sums, "%C", f.add(f.mul(r, "%ldc"), 16 * j))
            keep = f.op(f"select i1 %more, <16 x i1> {mask}, <16 x i1> zeroinitializer")
            masked_store(
                f,
                e.sums,
                16,
                f.op(f"{plus} {vector} {v}, {masked_load(f, e.sums, 16, to, keep, 4)}"),
                to,
                mask,
                4,
            )


def turn(name: str, masked: bool) -> Function:
    """void(src, dst, ld, rows, cols): dst[j, i] = src[i, j] of a block of 32 x 32 4-byte elements; with `masked` only for i < rows and j < cols."""
    f = Function(
        name,
        "void",
        [("ptr", "src"), ("ptr", "dst"), ("i64", "ld"), ("i64", "rows"), ("i64", "cols")],
        attrs="noinline #0",
    )
    with (
        f.loop(0, BLOCK, 16, known_nonempty=True) as j,
        f.loop(0, BLOCK, 16, known_nonempty=True) as i,
    ):
        corner = f.gep("i32", "%src", f.add(f.mul(i, BLOCK), j))
        block = transposed(
            f, WORDS, [f.load("<16 x i32>", f.gep("i32", corner, BLOCK * r), 64) for r in range(16)]
        )
        to = f.gep("i32", "%dst", f.add(f.mul(j, "%ld"), i))
        valid = lane_mask(f, 16, i, "%rows") if masked else None
        for r, v in enumerate(block):
            p = f.gep("i32", to, f.mul("%ld", r))
            if not masked:
                f.store("<16 x i32>", v, p, 4)
                continue
            inside = f.icmp("slt", f.add(j, r), "%cols")
            masked_store(
                f,
                "i32",
                16,
                v,
                p,
                f.op(f"select i1 {inside}, <16 x i1> {valid}, <16 x i1> zeroinitializer"),
                4,
            )
    return f


def fetch(name: str) -> Function:
    """void(from, nbytes): ask for the cache lines of [from, from + nbytes)."""
    f = Function(name, "void", [("ptr", "from"), ("i64", "nbytes")], attrs="noinline #0")
    with f.loop(0, "%nbytes", 256, known_nonempty=True) as at:
        for line in range(0, 256, 64):
            f.do(
                f"call void @llvm.prefetch.p0(ptr {f.gep('i8', '%from', f.add(at, line))}, i32 0, i32 2, i32 1)"
            )
    return f


def configure(f: Function) -> None:
    """Eight tiles of 16 rows of 64 bytes."""
    config = f.alloca("i8", 64, 64)
    f.do(f"call void @llvm.memset.p0.i64(ptr {config}, i8 0, i64 64, i1 false)")
    f.store("i8", 1, config, 1)
    for t in range(8):
        f.store("i16", 64, f.gep("i8", config, 16 + 2 * t), 2)
        f.store("i8", 16, f.gep("i8", config, 48 + t), 1)
    f.do(f"call void @llvm.x86.ldtilecfg(ptr {config})")


@contextmanager
def tiles(f: Function) -> Iterator[None]:
    """Where tile registers may be used. Entering and leaving takes about 100 ns."""
    configure(f)
    yield
    f.do("call void @llvm.x86.tilerelease()")


@contextmanager
def pieces(f: Function, steps: Int) -> Iterator[tuple[Int, Int]]:
    """The loop over the steps of panels: (first one, number)."""
    each = f.ceildiv(steps, f.ceildiv(steps, PANEL_STEPS))
    with f.loop(0, steps, each) as s:
        yield s, f.min(each, f.sub(steps, s))


def b_panel(f: Function, base: str, s: Int, count: Int, number: Int, panels: Int) -> str:
    """Where steps [s, s + count) of a panel of packed B are: one panel follows the other, as they are read."""
    return f.gep("i8", base, f.mul(f.add(f.mul(s, panels), f.mul(number, count)), STEP_BYTES))


class AmxGemm:
    """The same interface as gemm.Gemm, for an `element` of ELEMENTS. With an `epilogue`, K is at most K_SINGLE unless B is packed, and C is not used.

    `packed`: which of A and B was packed as a whole by `prepack` functions (K up to K_SINGLE for A alone); b_free of a packed B is its number of columns.
    `in_rows`: A has rows along K, whole tiles of them, which are read where they are.
    `transposed`: for a packed B; C is written transposed, element (i, j) at j * ldc + i. `adding`: what is in C is added.
    """

    heights = (BLOCK,)

    def __init__(self, element: Element, form_a: str, form_b: str, packed: tuple[bool, bool] = (False, False), transposed: bool = False, epilogue=None,
                 adding: bool = False, in_rows: bool = False) -> None:  # fmt: skip
        self.element, self.forms, self.packed, self.transposed = (
            element,
            (form_a, form_b),
            packed,
            transposed,
        )
        self.epilogue, self.adding, self.in_rows = epilogue, adding, in_rows
        self.functions: dict[str, str] = {}
        kinds = ("packed" if p else form for p, form in zip(packed, self.forms, strict=True))
        self.name = f"gemm_amx_{element.name}_{'_'.join(kinds)}{'_transposed' * transposed}{'_add' * adding}{'_rows' * in_rows}"
        self.extra: tuple[tuple[str, str], ...] = ()
        if epilogue is not None:
            self.extra = (("i64", "first_row"), *epilogue.parameters)
            self.name += f"_{epilogue.name}"
        # scratch memory: a panel of A, a block of B, sums, sums turned
        self._b_at = STEP_BYTES * PANEL_STEPS
        self._sums_at = self._b_at + (0 if packed[1] else B_BYTES + BLOCK * STEP_BYTES)
        self._turned_at = self._sums_at
        if transposed:
            self._turned_at += 4 * BLOCK * TOGETHER * TURNED
        turned = 4 * BLOCK * (BLOCK * TOGETHER + GAP) if transposed else 4 * BLOCK * (COLUMNS + GAP)
        self.scratch_bytes = self._turned_at + (turned if epilogue is not None else 0) + 64

    def _function(self, make, name: str, *args) -> str:
        if name not in self.functions:
            self.functions[name] = make(name, *args).text()
        return name

    def _pack(
        self, f: Function, side: int, src: str, free: str, k: str, depth: Int, valid: Int, to: str
    ) -> None:
        """Both groups of 16 lanes of a panel; an empty second group is left as it is."""
        e = self.element
        name = self._function(
            pack,
            f"pack_amx_{e.kind}_{'ab'[side]}_{self.forms[side]}",
            "ab"[side],
            self.forms[side],
            e,
        )
        f.call(
            "void",
            name,
            f"ptr {src}",
            f"i64 {free}",
            f"i64 {k}",
            f"i64 {depth}",
            f"i64 {f.min(valid, 16)}",
            f"ptr {to}",
        )
        with f.when(f.icmp("sgt", valid, 16)):
            second = f.gep(e.kind, src, f.mul(free, 16))
            rest = f.min(f.sub(valid, 16), 16)
            f.call(
                "void",
                name,
                f"ptr {second}",
                f"i64 {free}",
                f"i64 {k}",
                f"i64 {depth}",
                f"i64 {rest}",
                f"ptr {f.gep('i8', to, 1024)}",
            )

    def block(self) -> str:
        """See Gemm.block; a tile is 32 rows. To be called within `tiles`."""
        f = Function(self.name, "void", [*BLOCK_PARAMETERS, *self.extra], attrs="noinline #0")
        (
            self._transposed_blocks
            if self.transposed
            else self._packed_blocks
            if self.packed[1]
            else self._blocks
        )(f)
        self.functions[self.name] = f.text()
        return self.name

    def _row_tile(
        self,
        f: Function,
        i: Int,
        first_k: Int,
        depth: Int,
        b: tuple[str, Int, Int],
        j0: Int,
        j1: Int,
        more: str,
    ) -> None:
        """Row tile `i` times the columns [j0, j1) of the block of K into C or through the epilogue; `b`: (packed B, number of the first panel, panels)."""
        e, row = self.element, f.mul(i, BLOCK)
        if self.epilogue is None:
            c = f.gep(e.sums, "%C", f.add(f.mul(row, "%ldc"), j0))
            return self._panels(f, i, first_k, depth, b, j0, j1, c, "%ldc", more)
        c, ldc = f.gep("i8", "%scratch", self._sums_at), COLUMNS + GAP

        def finish(first: Int, last: Int) -> None:
            sums = f.gep(e.sums, c, f.sub(first, j0))
            self.epilogue.call(
                f,
                f.add("%first_row", row),
                f.min(f.sub("%m", row), BLOCK),
                first,
                f.sub(last, first),
                sums,
                ldc,
            )

        self._panels(f, i, first_k, depth, b, j0, j1, c, ldc, more, BLOCK, finish)

    def _panels(self, f: Function, i: Int, first_k: Int, depth: Int, b: tuple[str, Int, Int], j0: Int, j1: Int, c: str, ldc: Int, more: str,
                room: int = 0, finish: Callable[[Int, Int], None] | None = None) -> None:  # fmt: skip
        """Sums of row tile `i`, panel by panel of A. `room`: distance of blocks of 32 columns where `c` has room for whole ones; 0: it has not.
        `finish(first, last)` is for columns whose sums are complete, while they are in L1."""
        e, row = self.element, f.mul(i, BLOCK)
        b_base, first, panels = b
        reads_rows = self.forms[0] == "k" and not self.packed[0]
        kernel = self._function(
            micro,
            f"micro_amx_{e.name}{'_ahead' * reads_rows}{'_rows' * self.in_rows}",
            e,
            reads_rows,
            self.in_rows,
        )
        steps, rows = f.ceildiv(depth, e.depth), f.sub("%m", row)
        with pieces(f, steps) as (s, count):
            if self.packed[0]:
                a = f.gep("i8", "%A", f.mul(f.add(f.mul(i, steps), s), STEP_BYTES))
            else:
                a, k = f.gep("i8", "%scratch", 0), f.mul(s, e.depth)
                src = f.gep(
                    e.kind, "%A", f.add(f.mul(row, "%a_free"), f.mul(f.add(first_k, k), "%a_k"))
                )
                if self.in_rows:
                    a = src
                else:
                    self._pack(
                        f,
                        0,
                        src,
                        "%a_free",
                        "%a_k",
                        f.min(f.mul(count, e.depth), f.sub(depth, k)),
                        rows,
                        a,
                    )
            more_here = f.op(f"or i1 {more}, {f.icmp('ne', s, 0)}")
            if (
                reads_rows
            ):  # what is packed next: more of the same rows, or the next ones from the start
                last = f.icmp("sge", f.add(s, count), steps)
                next_k = f.add(first_k, f.select(last, "i64", 0, f.mul(f.add(s, count), e.depth)))
                coming = f.gep(
                    e.kind,
                    "%A",
                    f.add(
                        f.mul(f.add(row, f.select(last, "i64", BLOCK, 0)), "%a_free"),
                        f.mul(next_k, "%a_k"),
                    ),
                )
                row_bytes = f.mul("%a_free", e.itemsize)

            def multiply(j: Int, s=s, count=count, a=a, more_here=more_here) -> None:
                number = f.div(f.sub(j, j0), BLOCK)
                panel_of_b = b_panel(f, b_base, s, count, f.add(number, first), panels)
                if self.packed[
                    1
                ]:  # the first row tile reads B from memory, where no prefetcher follows tiles: ask for the next panel
                    with f.when(f.icmp("eq", i, "%tile0")):
                        nbytes = f.mul(count, STEP_BYTES)
                        f.call(
                            "void",
                            self._function(fetch, "fetch_amx"),
                            f"ptr {f.gep('i8', panel_of_b, nbytes)}",
                            f"i64 {nbytes}",
                        )
                valid = ["i64 32", "i64 32"] if room else [f"i64 {rows}", f"i64 {f.sub(j1, j)}"]
                ahead = []
                if reads_rows:
                    ahead = [
                        f"ptr {f.gep('i8', coming, f.mul(f.rem(f.mul(number, ROWS_AHEAD), BLOCK), row_bytes))}",
                        f"i64 {row_bytes}",
                    ]
                if self.in_rows:
                    ahead.append(f"i64 {row_bytes}")
                to = f.gep(e.sums, c, f.mul(number, room or BLOCK))
                f.call(
                    "void",
                    kernel,
                    f"ptr {a}",
                    f"ptr {panel_of_b}",
                    f"i64 {count}",
                    f"ptr {to}",
                    f"i64 {ldc}",
                    *valid,
                    f"i1 {more_here}",
                    *ahead,
                )

            with f.loop(j0, j1, FINISHED) as group:
                end = f.min(f.add(group, FINISHED), j1)
                with f.loop(group, end, BLOCK) as j:
                    multiply(j)
                if finish is not None:
                    with f.when(f.icmp("sge", f.add(s, count), steps)):
                        finish(group, end)

    def _pack_b(
        self,
        f: Function,
        src: str,
        free: str,
        k: str,
        depth: Int,
        valid: Int,
        base: str,
        numbers: tuple[Int, Int],
        panels: Int,
    ) -> None:
        """Pack the panels of 32 columns with the given numbers (first, end) of `panels` at `base`; `src` is the first one's, `valid` counts columns from there.

        Where columns are contiguous, a step of all panels comes before the next step: rows are read in long pieces, each page once.
        """
        e, (begin, end) = self.element, numbers

        def pack_panel(j: Int, s: Int, count: Int, first: Int, most: Int) -> None:
            """Elements [first, first + most) of K of panel `j`, part of the piece of `count` steps from step `s` on."""
            lane = f.mul(f.sub(j, begin), BLOCK)
            here = f.gep(e.kind, src, f.add(f.mul(first, k), f.mul(lane, free)))
            to = f.gep(
                "i8",
                b_panel(f, base, s, count, j, panels),
                f.mul(f.sub(f.div(first, e.depth), s), STEP_BYTES),
            )
            self._pack(
                f, 1, here, free, k, f.min(most, f.sub(depth, first)), f.sub(valid, lane), to
            )

        with pieces(f, f.ceildiv(depth, e.depth)) as (s, count):
            if self.forms[1] == "lane":
                with f.loop(s, f.add(s, count)) as step, f.loop(begin, end) as j:
                    pack_panel(j, s, count, f.mul(step, e.depth), e.depth)
            else:
                with f.loop(begin, end) as j:
                    pack_panel(j, s, count, f.mul(s, e.depth), f.mul(count, e.depth))

    def _columns(self, f: Function, depth: Int, most: int = COLUMNS) -> Int:
        """How many columns of a packed B of this depth stay in L2."""
        fits = f.div(B_BYTES // (64 * BLOCK), f.ceildiv(depth, self.element.depth))
        return f.mul(f.max(f.min(fits, most // BLOCK), 1), BLOCK)

    def _transposed_blocks(self, f: Function) -> None:
        """Tiles of A a few at a time, so that rows of C are written in longer pieces."""
        e = self.element
        sums = f.gep("i8", "%scratch", self._sums_at)
        columns = self._columns(f, "%k", TURNED)
        with f.loop("%n0", "%n1", columns) as j0:
            j1 = f.min(f.add(j0, columns), "%n1")
            b = "%B", f.div(j0, BLOCK), f.ceildiv("%b_free", BLOCK)
            with f.loop("%tile0", "%tile1", TOGETHER) as first:
                last = f.min(f.add(first, TOGETHER), "%tile1")
                start = f.mul(first, BLOCK)
                count = f.sub(f.min(f.mul(last, BLOCK), "%m"), start)
                with f.loop(first, last) as i:
                    c = f.gep(e.sums, sums, f.mul(f.sub(i, first), BLOCK * TURNED))
                    self._panels(f, i, 0, "%k", b, j0, j1, c, BLOCK, "false", BLOCK * BLOCK)
                self._finish(f, start, count, j0, j1)

    def _finish(self, f: Function, start: Int, count: Int, j0: Int, j1: Int) -> None:
        """Turn the sums of `count` rows from `start` on, in blocks of 32 x 32, into C or through the epilogue."""
        e, sums = self.element, f.gep("i8", "%scratch", self._sums_at)
        name, ld = (
            self._function(
                turn, f"turn_amx{'_masked' * (self.epilogue is None)}", self.epilogue is None
            ),
            BLOCK * TOGETHER + GAP,
        )
        turned = f.gep("i8", "%scratch", self._turned_at)
        with f.loop(j0, j1, BLOCK) as j:
            columns = f.min(f.sub(j1, j), BLOCK)
            with f.loop(0, count, BLOCK) as i:
                block = f.gep(e.sums, sums, f.add(f.mul(i, TURNED), f.mul(f.sub(j, j0), BLOCK)))
                to, ld_to = (
                    (f.gep(e.sums, "%C", f.add(f.mul(j, "%ldc"), f.add(start, i))), "%ldc")
                    if self.epilogue is None
                    else (f.gep(e.sums, turned, i), ld)
                )
                f.call(
                    "void",
                    name,
                    f"ptr {block}",
                    f"ptr {to}",
                    f"i64 {ld_to}",
                    f"i64 {f.min(f.sub(count, i), BLOCK)}",
                    f"i64 {columns}",
                )
            if self.epilogue is not None:
                self.epilogue.call(f, f.add("%first_row", j), columns, start, count, turned, ld)

    def _packed_blocks(self, f: Function) -> None:
        columns = self._columns(f, "%k")
        with f.when(f.icmp("sgt", "%k", 0)), f.loop("%n0", "%n1", columns) as j0:
            j1 = f.min(f.add(j0, columns), "%n1")
            b = "%B", f.div(j0, BLOCK), f.ceildiv("%b_free", BLOCK)
            with f.loop("%tile0", "%tile1") as i:
                self._row_tile(f, i, 0, "%k", b, j0, j1, "false")

    def _blocks(self, f: Function) -> None:
        e = self.element
        depth_each = f.select(f.icmp("sle", "%k", K_SINGLE), "i64", f.max("%k", 1), K_BLOCK)
        columns = self._columns(f, depth_each)
        b_base = f.gep("i8", "%scratch", self._b_at)
        with f.loop("%n0", "%n1", columns) as j0:
            j1 = f.min(f.add(j0, columns), "%n1")
            with f.loop(0, "%k", depth_each) as k0:
                depth = f.min(depth_each, f.sub("%k", k0))
                panels = f.ceildiv(f.sub(j1, j0), BLOCK)
                src = f.gep(e.kind, "%B", f.add(f.mul(j0, "%b_free"), f.mul(k0, "%b_k")))
                self._pack_b(
                    f, src, "%b_free", "%b_k", depth, f.sub(j1, j0), b_base, (0, panels), panels
                )
                with f.loop("%tile0", "%tile1") as i:
                    self._row_tile(
                        f,
                        i,
                        k0,
                        depth,
                        (b_base, 0, panels),
                        j0,
                        j1,
                        "true" if self.adding else f.icmp("ne", k0, 0),
                    )

    def prepack(self, side: int) -> str:
        """Define void(lo, hi, src, packed, lanes, lane_stride, k_stride, k): panels [lo, hi) of 32 lanes of an operand."""
        e = self.element
        name = f"prepack_amx_{e.kind}_{'ab'[side]}_{self.forms[side]}"
        params = [
            ("i64", "lo"),
            ("i64", "hi"),
            ("ptr", "src"),
            ("ptr", "packed"),
            *(("i64", q) for q in ("lanes", "lane_stride", "k_stride", "k")),
        ]
        f = Function(name, "void", params)

        def operand(i: Int) -> tuple:
            first = f.mul(i, BLOCK)
            return (
                f.gep(e.kind, "%src", f.mul(first, "%lane_stride")),
                "%lane_stride",
                "%k_stride",
                "%k",
                f.sub("%lanes", first),
            )

        with f.when(f.icmp("sgt", "%k", 0)):
            if side == 0:
                with f.loop("%lo", "%hi") as i:
                    self._pack(
                        f,
                        0,
                        *operand(i),
                        f.gep(
                            "i8", "%packed", f.mul(f.mul(i, f.ceildiv("%k", e.depth)), STEP_BYTES)
                        ),
                    )
            else:
                self._pack_b(
                    f, *operand("%lo"), "%packed", ("%lo", "%hi"), f.ceildiv("%lanes", BLOCK)
                )
        self.functions[name] = f.text()
        return name

    def packed_bytes(self, lanes: Size, k: Size) -> Size:
        """Size of the memory that `prepack` fills."""
        return ceildiv(lanes, BLOCK) * ceildiv(k, self.element.depth) * STEP_BYTES
