"""bf16 products on AMX tiles: C[m, n] = sum_k A[m, k] B[k, n] with f32 accumulators. Other results are an epilogue's affair.

A register tile is 16 rows of 64 bytes. The micro-kernel holds 32 x 32 of C in four tiles and takes 32 elements of K per step: two
tiles of A ([16 rows][32 k]) and two of B ([16 pairs of k][16 columns][2]). Packing brings any operand into a sequence of such
tiles, padded with zeros along K. Blocking is that of gemm.py.

A product whose right operand is contiguous along K (a layer's weights) is computed transposed: then packing the weights, the larger
operand, only copies, tile by tile, and nothing of them goes back to memory. It pays while the other operand stays in L2.

Measured on one Granite Rapids core: 0.8 to 1.2 TF/s, 0.65 to 0.95 of oneDNN on large square products, 1.5 to 3 times it on small
ones and on very wide ones. The micro-kernel alone runs at the tile units' peak; the rest is packing.
"""
from __future__ import annotations

from torch_hlo.compiler.codegen.function import Function, Int
from torch_hlo.compiler.codegen.gemm import BLOCK_PARAMETERS, Tile, lane_mask, masked_load, masked_store, transposed
from torch_hlo.hlo.dim import Size, ceildiv

BLOCK = 32  # rows and columns of a micro-kernel, and K per step
STEP_BYTES = 2048  # two tiles
K_SINGLE = 4096  # up to here K is one block
K_BLOCK = 1024
K_TRANSPOSED = 8192  # up to here C may be written transposed
B_ELEMENTS = 1 << 19  # packed elements of a block of B: 1 MB of L2
COLUMNS = 512
TOGETHER = 4  # panels
LOCAL_LD = COLUMNS + 16  # elements between the rows of a tile of sums in scratch memory
_PAIRS = Tile("i32", 4, 16, 16, 1)
_FLOATS = Tile("float", 4, 16, 16, 1)


def pack(name: str, side: str, form: str) -> Function:
    """void(src, lane_stride, k_stride, depth, valid, dst): 16 lanes (rows of A, columns of B) as tiles 2048 bytes apart.

    `form` says what is contiguous: "k", "lane" or "none". Lanes from `valid` on repeat others; K is padded with zeros.
    """
    params = [("ptr", "src"), ("i64", "lane_stride"), ("i64", "k_stride"), ("i64", "depth"), ("i64", "valid"), ("ptr", "dst")]
    f = Function(name, "void", params, attrs="noinline #0")
    read = {"k": _rows_along_k, "lane": _rows_along_lanes, "none": _rows_of_elements}[form](f)
    by_pairs = form == "lane"  # vectors are [pair of k][lane][2], as tiles of B are; else [lane][32 k], as tiles of A are
    with f.loop(0, "%depth", BLOCK, known_nonempty=True) as k:
        vectors = read(k)
        if by_pairs != (side == "b"):
            vectors = transposed(f, _PAIRS, vectors)
        to = f.gep("i8", "%dst", f.mul(f.div(k, BLOCK), STEP_BYTES))
        for i, v in enumerate(vectors):
            f.store("<16 x i32>", v, f.gep("i8", to, 64 * i), 4)
    return f


def _rows_along_k(f: Function):
    last = f.sub("%valid", 1)
    rows = [f.gep("i16", "%src", f.mul(f.min(i, last) if i else 0, "%lane_stride")) for i in range(16)]

    def read(k: Int) -> list[str]:
        mask = lane_mask(f, 32, k, "%depth")
        loaded = [masked_load(f, "i16", 32, f.gep("i16", row, k), mask, 2) for row in rows]
        return [f.op(f"bitcast <32 x i16> {v} to <16 x i32>") for v in loaded]

    return read


def _rows_along_lanes(f: Function):
    lanes = lane_mask(f, 16, 0, "%valid")
    order = ", ".join(f"i32 {i // 2 + i % 2 * 16}" for i in range(32))

    def row(k: Int) -> str:
        inside = f.icmp("slt", k, "%depth")
        mask = f.op(f"select i1 {inside}, <16 x i1> {lanes}, <16 x i1> zeroinitializer")
        return masked_load(f, "i16", 16, f.gep("i16", "%src", f.mul(k, "%k_stride")), mask, 2)

    def read(k: Int) -> list[str]:
        pairs = [(row(f.add(k, 2 * p)), row(f.add(k, 2 * p + 1))) for p in range(16)]
        mixed = [f.op(f"shufflevector <16 x i16> {a}, <16 x i16> {b}, <32 x i32> <{order}>") for a, b in pairs]
        return [f.op(f"bitcast <32 x i16> {v} to <16 x i32>") for v in mixed]

    return read


def _rows_of_elements(f: Function):
    block = f.alloca("i16", 16 * 32, 64)
    last = f.sub("%valid", 1)

    def read(k: Int) -> list[str]:
        with f.loop(0, 16) as lane, f.loop(0, BLOCK) as i:
            at = f.add(k, i)
            inside = f.icmp("slt", at, "%depth")
            source = f.add(f.mul(f.min(lane, last), "%lane_stride"), f.mul(f.select(inside, "i64", at, 0), "%k_stride"))
            v = f.select(inside, "i16", f.load("i16", f.gep("i16", "%src", source), 2), 0)
            f.store("i16", v, f.gep("i16", block, f.add(f.mul(lane, BLOCK), i)), 2)
        return [f.load("<16 x i32>", f.gep("i8", block, 64 * lane), 64) for lane in range(16)]

    return read


def _accumulate(f: Function) -> None:
    """Add the product of two panels to tiles 0 to 3."""
    with f.loop(0, "%steps", known_nonempty=True) as s:
        a, b = (f.gep("i8", q, f.mul(s, STEP_BYTES)) for q in ("%A", "%B"))
        for t, p in ((6, b), (4, a), (7, f.gep("i8", b, 1024)), (5, f.gep("i8", a, 1024))):
            f.do(f"call void @llvm.x86.tileloadd64(i8 {t}, ptr {p}, i64 64)")
        for t in range(4):
            f.do(f"call void @llvm.x86.tdpbf16ps(i8 {t}, i8 {4 + t // 2}, i8 {6 + t % 2})")


def micro(name: str) -> Function:
    """void(A, B, steps, C, ldc, rows, cols, more): up to 32 x 32 of C from packed panels."""
    params = [("ptr", "A"), ("ptr", "B"), ("i64", "steps"), ("ptr", "C"), ("i64", "ldc"), ("i64", "rows"), ("i64", "cols"), ("i1", "more")]
    f = Function(name, "void", params, attrs="noinline #0")
    whole = f.op(f"and i1 {f.icmp('sge', '%rows', BLOCK)}, {f.icmp('sge', '%cols', BLOCK)}")
    row_bytes = f.mul("%ldc", 4)

    def corners() -> list[str]:
        below = f.gep("float", "%C", f.mul("%ldc", 16))
        return ["%C", f.gep("float", "%C", 16), below, f.gep("float", below, 16)]

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
    _accumulate(f)
    temporary = f.alloca("float", BLOCK * BLOCK, 64)

    def spill() -> None:
        for t in range(4):
            p = f.gep("float", temporary, t // 2 * 16 * BLOCK + t % 2 * 16)
            f.do(f"call void @llvm.x86.tilestored64(i8 {t}, ptr {p}, i64 {4 * BLOCK})")
        _store_rows(f, temporary)

    f.choose(whole, direct, spill)
    return f


def _store_rows(f: Function, temporary: str) -> None:
    """Copy the valid part of a 32 x 32 block of sums to C, adding what is there when %more."""
    masks = [lane_mask(f, 16, 16 * j, "%cols") for j in range(2)]
    with f.loop(0, f.min("%rows", BLOCK), known_nonempty=True) as r:
        for j, mask in enumerate(masks):
            v = f.load("<16 x float>", f.gep("float", temporary, f.add(f.mul(r, BLOCK), 16 * j)), 64)
            to = f.gep("float", "%C", f.add(f.mul(r, "%ldc"), 16 * j))
            keep = f.op(f"select i1 %more, <16 x i1> {mask}, <16 x i1> zeroinitializer")
            masked_store(f, "float", 16, f.op(f"fadd <16 x float> {v}, {masked_load(f, 'float', 16, to, keep, 4)}"), to, mask, 4)


def micro_transposed(name: str) -> Function:
    """void(A, B, steps, C, ldc, rows, cols): C[j, i] = sum_k A[i, k] B[k, j] for up to 32 i and j, from packed panels."""
    params = [("ptr", "A"), ("ptr", "B"), ("i64", "steps"), ("ptr", "C"), ("i64", "ldc"), ("i64", "rows"), ("i64", "cols")]
    f = Function(name, "void", params, attrs="noinline #0")
    for t in range(4):
        f.do(f"call void @llvm.x86.tilezero(i8 {t})")
    _accumulate(f)
    temporary = f.alloca("float", 4 * 256, 64)
    for t in range(4):
        f.do(f"call void @llvm.x86.tilestored64(i8 {t}, ptr {f.gep('float', temporary, 256 * t)}, i64 64)")
    with f.loop(0, 4) as t:  # [16 i][16 j] -> [16 j][16 i]
        tile = f.gep("float", temporary, f.mul(t, 256))
        block = transposed(f, _FLOATS, [f.load("<16 x float>", f.gep("float", tile, 16 * i), 64) for i in range(16)])
        first = f.mul(f.rem(t, 2), 16)
        row = f.mul(f.div(t, 2), 16)
        corner = f.gep("float", "%C", f.add(f.mul(first, "%ldc"), row))
        valid = lane_mask(f, 16, row, "%rows")
        for j, v in enumerate(block):
            inside = f.icmp("slt", f.add(first, j), "%cols")
            mask = f.op(f"select i1 {inside}, <16 x i1> {valid}, <16 x i1> zeroinitializer")
            masked_store(f, "float", 16, v, f.gep("float", corner, f.mul("%ldc", j)), mask, 4)
    return f


class AmxGemm:
    """The same interface as gemm.Gemm, for bf16 operands. With an `epilogue`, K is at most K_SINGLE unless `prepacked`, and C is not used.

    `prepacked`: both operands were packed as a whole by `prepack` functions, [panel of 32 lanes][step][2048 bytes].
    `transposed`: only B was, and C is written transposed, element (i, j) at j * ldc + i.
    """

    heights = (BLOCK,)

    def __init__(self, form_a: str, form_b: str, prepacked: bool, transposed: bool = False, epilogue=None) -> None:
        self.forms, self.prepacked, self.transposed, self.epilogue = (form_a, form_b), prepacked, transposed, epilogue
        self.functions: dict[str, str] = {}
        self.name = f"gemm_amx_{f'{form_a}_transposed' if transposed else 'packed' if prepacked else f'{form_a}_{form_b}'}"
        self.extra: tuple[tuple[str, str], ...] = ()
        if epilogue is not None:
            self.extra = (("i64", "first_row"), *epilogue.parameters)
            self.name += f"_{epilogue.name}"
        self.packing_bytes = 2 * BLOCK * K_TRANSPOSED if transposed else 64 if prepacked else 2 * (B_ELEMENTS + BLOCK * K_SINGLE) + BLOCK * K_SINGLE * 2 + 256

    @property
    def scratch_bytes(self) -> int:
        return self.packing_bytes + (4 * BLOCK * LOCAL_LD if self.epilogue is not None else 0)

    def _function(self, make, name: str, *args) -> str:
        if name not in self.functions:
            self.functions[name] = make(name, *args).text()
        return name

    def _pack(self, f: Function, side: int, src: str, free: str, k: str, depth: Int, valid: Int, to: str) -> None:
        """Both groups of 16 lanes of a panel; an empty second group is left as it is."""
        name = self._function(pack, f"pack_amx_{'ab'[side]}_{self.forms[side]}", "ab"[side], self.forms[side])
        f.call("void", name, f"ptr {src}", f"i64 {free}", f"i64 {k}", f"i64 {depth}", f"i64 {f.min(valid, 16)}", f"ptr {to}")
        with f.when(f.icmp("sgt", valid, 16)):
            second = f.gep("i16", src, f.mul(free, 16))
            rest = f.min(f.sub(valid, 16), 16)
            f.call("void", name, f"ptr {second}", f"i64 {free}", f"i64 {k}", f"i64 {depth}", f"i64 {rest}", f"ptr {f.gep('i8', to, 1024)}")

    def block(self) -> str:
        """See Gemm.block; a tile is 32 rows."""
        f = Function(self.name, "void", [*BLOCK_PARAMETERS, *self.extra], attrs="noinline #0")
        self._configure(f)
        (self._transposed_blocks if self.transposed else self._packed_blocks if self.prepacked else self._blocks)(f)
        f.do("call void @llvm.x86.tilerelease()")
        self.functions[self.name] = f.text()
        return self.name

    def _multiply(self, f: Function, a_panel: str, b_base: str, panel: Int, steps: Int, i: Int, j0: Int, j1: Int, more: str) -> None:
        """One row tile times the panels of columns [j0, j1), which start at `b_base`."""
        kernel = self._function(micro, "micro_amx")
        row = f.mul(i, BLOCK)
        rows = f.sub("%m", row)
        local = self.epilogue is not None
        c_row = f.gep("i8", "%scratch", self.packing_bytes) if local else f.gep("float", "%C", f.add(f.mul(row, "%ldc"), j0))
        ldc = LOCAL_LD if local else "%ldc"
        with f.loop(j0, j1, BLOCK) as j:
            done = f.sub(j, j0)
            b = f.gep("i8", b_base, f.mul(f.div(done, BLOCK), panel))
            c = f.gep("float", c_row, done)
            f.call("void", kernel, f"ptr {a_panel}", f"ptr {b}", f"i64 {steps}", f"ptr {c}", f"i64 {ldc}", f"i64 {rows}", f"i64 {f.sub(j1, j)}", f"i1 {more}")
        if local:
            self.epilogue.call(f, f.add("%first_row", row), f.min(rows, BLOCK), j0, f.sub(j1, j0), c_row, ldc)

    def _columns(self, f: Function, depth: Int, most: int = COLUMNS) -> Int:
        """How many columns of a packed B of this depth stay in L2."""
        fits = f.op(f"and i64 {f.op(f'udiv i64 {B_ELEMENTS}, {f.add(depth, BLOCK)}')}, {-BLOCK}")
        return f.max(f.min(fits, most), BLOCK)

    def _transposed_blocks(self, f: Function) -> None:
        """Panels of A are packed a few at a time, so that rows of C are written in longer pieces."""
        kernel = self._function(micro_transposed, "micro_amx_transposed")
        steps = f.ceildiv("%k", BLOCK)
        panel = f.mul(steps, STEP_BYTES)
        columns = self._columns(f, "%k", 1 << 20)
        group = f.min(f.max(f.div(K_TRANSPOSED, f.mul(steps, BLOCK)), 1), TOGETHER)
        sums = f.gep("i8", "%scratch", self.packing_bytes)
        with f.loop("%n0", "%n1", columns) as j0:
            j1 = f.min(f.add(j0, columns), "%n1")
            with f.while_([("i64", "%tile0")]) as groups:
                (first,) = groups.vars
                f.break_if(groups, f.icmp("sge", first, "%tile1"))
                last = f.min(f.add(first, group), "%tile1")
                start = f.mul(first, BLOCK)
                with f.loop(first, last) as i:
                    row = f.mul(i, BLOCK)
                    to = f.gep("i8", "%scratch", f.mul(f.sub(i, first), panel))
                    self._pack(f, 0, f.gep("i16", "%A", f.mul(row, "%a_free")), "%a_free", "%a_k", "%k", f.sub("%m", row), to)
                with f.loop(j0, j1, BLOCK) as j:
                    b, left = f.gep("i8", "%B", f.mul(f.div(j, BLOCK), panel)), f.sub(j1, j)
                    with f.loop(first, last) as i:
                        row = f.mul(i, BLOCK)
                        a = f.gep("i8", "%scratch", f.mul(f.sub(i, first), panel))
                        if self.epilogue is None:
                            c, ldc = f.gep("float", "%C", f.add(f.mul(j, "%ldc"), row)), "%ldc"
                        else:
                            c, ldc = f.gep("float", sums, f.sub(row, start)), LOCAL_LD
                        f.call("void", kernel, f"ptr {a}", f"ptr {b}", f"i64 {steps}", f"ptr {c}", f"i64 {ldc}", f"i64 {f.sub('%m', row)}", f"i64 {left}")
                    if self.epilogue is not None:
                        count = f.sub(f.min(f.mul(last, BLOCK), "%m"), start)
                        self.epilogue.call(f, f.add("%first_row", j), f.min(left, BLOCK), start, count, sums, LOCAL_LD)
                groups.next = [last]

    def _packed_blocks(self, f: Function) -> None:
        steps = f.ceildiv("%k", BLOCK)
        panel = f.mul(steps, STEP_BYTES)
        columns = self._columns(f, "%k")
        with f.when(f.icmp("sgt", "%k", 0)), f.loop("%n0", "%n1", columns) as j0:
            j1 = f.min(f.add(j0, columns), "%n1")
            b_base = f.gep("i8", "%B", f.mul(f.div(j0, BLOCK), panel))
            with f.loop("%tile0", "%tile1") as i:
                self._multiply(f, f.gep("i8", "%A", f.mul(i, panel)), b_base, panel, steps, i, j0, j1, "false")

    def _blocks(self, f: Function) -> None:
        depth_each = f.select(f.icmp("sle", "%k", K_SINGLE), "i64", f.max("%k", 1), K_BLOCK)
        columns = self._columns(f, depth_each)
        a_panel = f.gep("i8", "%scratch", 2 * B_ELEMENTS + BLOCK * K_SINGLE * 2)
        with f.loop("%n0", "%n1", columns) as j0:
            j1 = f.min(f.add(j0, columns), "%n1")
            with f.loop(0, "%k", depth_each) as k0:
                depth = f.min(depth_each, f.sub("%k", k0))
                steps = f.ceildiv(depth, BLOCK)
                panel = f.mul(steps, STEP_BYTES)
                with f.loop(j0, j1, BLOCK) as j:
                    src = f.gep("i16", "%B", f.add(f.mul(j, "%b_free"), f.mul(k0, "%b_k")))
                    to = f.gep("i8", "%scratch", f.mul(f.div(f.sub(j, j0), BLOCK), panel))
                    self._pack(f, 1, src, "%b_free", "%b_k", depth, f.sub(j1, j), to)
                with f.loop("%tile0", "%tile1") as i:
                    row = f.mul(i, BLOCK)
                    src = f.gep("i16", "%A", f.add(f.mul(row, "%a_free"), f.mul(k0, "%a_k")))
                    self._pack(f, 0, src, "%a_free", "%a_k", depth, f.sub("%m", row), a_panel)
                    self._multiply(f, a_panel, "%scratch", panel, steps, i, j0, j1, f.icmp("ne", k0, 0))

    def prepack(self, side: int) -> str:
        """Define void(lo, hi, src, packed, lanes, lane_stride, k_stride, k): panels [lo, hi) of 32 lanes of an operand."""
        name = f"prepack_amx_{'ab'[side]}_{self.forms[side]}"
        params = [("i64", "lo"), ("i64", "hi"), ("ptr", "src"), ("ptr", "packed"), *(("i64", q) for q in ("lanes", "lane_stride", "k_stride", "k"))]
        f = Function(name, "void", params)
        panel = f.mul(f.ceildiv("%k", BLOCK), STEP_BYTES)
        with f.when(f.icmp("sgt", "%k", 0)), f.loop("%lo", "%hi") as i:
            first = f.mul(i, BLOCK)
            src = f.gep("i16", "%src", f.mul(first, "%lane_stride"))
            self._pack(f, side, src, "%lane_stride", "%k_stride", "%k", f.sub("%lanes", first), f.gep("i8", "%packed", f.mul(i, panel)))
        self.functions[name] = f.text()
        return name

    @staticmethod
    def packed_bytes(lanes: Size, k: Size) -> Size:
        """Size of the memory that `prepack` fills."""
        return ceildiv(lanes, BLOCK) * ceildiv(k, BLOCK) * STEP_BYTES

    def _configure(self, f: Function) -> None:
        """Eight tiles of 16 rows of 64 bytes."""
        config = f.alloca("i8", 64, 64)
        f.do(f"call void @llvm.memset.p0.i64(ptr {config}, i8 0, i64 64, i1 false)")
        f.store("i8", 1, config, 1)
        for t in range(8):
            f.store("i16", 64, f.gep("i8", config, 16 + 2 * t), 2)
            f.store("i8", 16, f.gep("i8", config, 48 + t), 1)
        f.do(f"call void @llvm.x86.ldtilecfg(ptr {config})")
