"""Kernels of convolutions, packed for kernels that run over vectors of output features: panels
[tap][channel][columns]."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, Size, ceildiv, fixed, product, row_major_strides

from ..codegen import Place, Program
from ..llvm import Function, Int, signature
from ..matmul.packing import pack_transpose
from ..matmul.product import SOURCES, hint
from ..matmul.tile import (
    Source,
    Tile,
    converted,
)
from ..thresholds import PACK_DEPTH

PACK_PARAMETERS = tuple(
    signature(
        "ptr table, i64 features, i64 taps, i64 depth, i64 o_step, i64 c_step,"
        " i64 o_group, i64 packed_group"
    )
)


def static_dims(x: Instruction) -> Ints:
    """The dimensions of an instruction that has no symbolic ones."""
    return tuple(fixed(d) for d in x.dims)


def pack_kernel(
    name: str,
    t: Tile,
    source: Source,
    form: str,
) -> tuple[Function, Function | None]:
    """void(lo, hi, W, packed, table, features, taps, depth, o_step, c_step, o_group, packed_group):
    groups of `lanes` output features [lo, hi) into panels [tap][channel][columns]; and the function
    that it calls, if any.

    form "copy" (o_step is 1) and "gather": element (o, c, tap) is W[o * o_step + c * c_step +
    table[tap]]. form "turn": for one o the (c, tap) are contiguous, in this order; table[tap] is
    the tap's place in the panel."""
    f = Function(
        name,
        [
            *signature("i64 lo, i64 hi, ptr W, ptr packed"),
            *PACK_PARAMETERS,
        ],
    )
    n = t.lanes
    kind = source.kind
    turn = None
    temporary = ""
    steps = ""
    if form == "turn":
        turn = pack_transpose(f"pack_transpose_{t.suffix}_{source.name}", t, source)
        temporary = f.alloca(t.kind, (PACK_DEPTH + n) * n, 64)
    numbers = "<" + ", ".join(f"i64 {i}" for i in range(n)) + ">"
    if form == "gather":
        steps = f.op(f"mul <{n} x i64> {numbers}, {f.splat('i64', n, '%o_step')}")
    per_group = f.ceildiv("%features", n)
    with f.items() as item:
        group, number = f.divmod(item, per_group)
        first = f.mul(number, n)
        valid = f.min(f.sub("%features", first), n)
        mask = f.lane_mask(n, 0, valid)
        start = f.gep(kind, "%W", f.muladd(group, "%o_group", f.mul(first, "%o_step")))
        panel = f.mul(f.div(number, t.vectors), t.columns)
        # a last panel may be one vector wide
        width = f.min(t.columns, f.sub(f.mul(per_group, n), panel))
        in_group = f.mul(group, "%packed_group")
        to = t.gep(f, "%packed", f.muladd(panel, f.mul("%taps", "%depth"), in_group))
        to = t.gep(f, to, f.sub(first, panel))
        packed = _Panel(f, t, source, start, to, width, mask, valid)
        if turn is not None:
            packed.turned(turn.name, temporary)
        else:
            packed.read(steps)
    return f, turn


@frozen
class _Panel:
    """A vector of features of the kernel, from `start` on, and its place `to` in a panel of `width`
    columns."""

    f: Function
    t: Tile
    source: Source
    start: str
    to: str
    width: Int
    mask: str
    valid: Int

    def put(self, v: str, tap: Int, c: Int) -> None:
        f = self.f
        t = self.t
        at = f.mul(f.muladd(tap, "%depth", c), self.width)
        t.store(f, v, t.gep(f, self.to, at))

    def entry(self, tap: Int) -> str:
        return self.f.load_at("i64", "%table", tap)

    def turned(self, turn: str, temporary: str) -> None:
        """Blocks of (channel, tap), transposed by `turn`."""
        f = self.f
        t = self.t
        n = self.t.lanes
        kind = self.source.kind
        each = f.max(f.div(PACK_DEPTH, "%taps"), 1)  # channels that are turned at a time
        with (
            f.loop(0, "%depth", each) as c0,
            f.loop(0, f.mul(f.min(each, f.sub("%depth", c0)), "%taps"), PACK_DEPTH) as q0,
        ):
            all_taps = f.mul(f.min(each, f.sub("%depth", c0)), "%taps")
            many = f.min(f.sub(all_taps, q0), PACK_DEPTH)
            src = f.gep(kind, self.start, f.muladd(c0, "%taps", q0))
            sizes = "i64 %o_step", f"i64 {many}", f"i64 {self.valid}"
            f.call(turn, f"ptr {src}", *sizes, f"ptr {temporary}")
            first = f.rem(q0, "%taps"), f.add(c0, f.div(q0, "%taps"))
            carry = [("i64", str(v)) for v in first]
            with f.loop(0, many, carry=carry, known_nonempty=True) as run:
                tap, c = run.vars
                place = t.gep(f, temporary, f.mul(run.index, n))
                v = t.load(f, place)
                self.put(v, self.entry(tap), c)
                wrap = f.icmp("eq", f.add(tap, 1), "%taps")
                run.next = [
                    f.select(wrap, "i64", 0, f.add(tap, 1)),
                    f.select(wrap, "i64", f.add(c, 1), c),
                ]

    def read(self, steps: str) -> None:
        """Vectors of features where they are, `steps` elements apart, or adjacent without."""
        f = self.f
        n = self.t.lanes
        kind = self.source.kind
        source = self.source
        with f.loop(0, "%taps") as tap:
            from_tap = f.gep(kind, self.start, self.entry(tap))
            with f.loop(0, "%depth") as c:
                p = f.gep(kind, from_tap, f.mul(c, "%c_step"))
                if not steps:
                    v = f.masked_load(kind, n, p, self.mask)
                else:
                    v = f.typed(kind, n).gather(p, steps, "i64", self.mask)
                self.put(converted(f, self.t, source, v), tap, c)


@frozen
class Packing:
    """How a kernel is packed: the function made by `pack_kernel`, its arguments W, table and
    numbers, over how many items, into how many bytes."""

    name: str
    kernel: str
    table: str
    numbers: list[str]
    items: Size
    nbytes: Size
    cost: float

    def everything(self, program: Program) -> str:
        """Emit the packing of all of the kernel; the pointer to it."""
        packed = program.at(program.scratch(self.nbytes))
        program.parallel(
            self.name,
            [*program.arguments((self.kernel, packed, self.table)), *self.numbers],
            self.items,
            cost=self.cost,
        )
        return packed


def packing(
    program: Program,
    x: Instruction,
    t: Tile,
    groups: int,
    features: Size,
    taps: Size,
    channels: Size,
) -> Packing:
    """How the kernel of a convolution is packed."""
    rhs = x.operands[1]
    window = x["window"]
    label = x["dim_labels"].split("_")[1].split("->")[0]
    strides = dict(zip(label, row_major_strides(rhs.dims), strict=True))
    o_step = strides["o"]
    c_step = strides["i"]
    tap_steps = [strides[str(i)] for i in range(len(window))]
    mirrored = [w.reversal and w.size != 1 for w in window]
    form = "copy" if o_step == 1 else "gather"
    if label.startswith("oi") and label[2:] == "".join(map(str, range(len(window)))):
        form = "turn"
        tap_steps = list(row_major_strides(tuple(w.size for w in window)))  # places in the panel
    start: Size = 0
    for i, (w, flip) in enumerate(zip(window, mirrored, strict=True)):
        if flip:
            start += (w.size - 1) * tap_steps[i]
            tap_steps = [*tap_steps[:i], tap_steps[i] * -1, *tap_steps[i + 1 :]]
    table = _table(program, [w.size for w in window], tap_steps, start)
    lanes = ceildiv(features, t.lanes)
    source = SOURCES[rhs.dtype, t.kind]

    def write() -> str:
        f, inner = pack_kernel(f"conv_pack_{form}_{t.suffix}", t, source, form)
        if inner:
            program.define(inner)
        return program.define(f)

    name = program.once(("conv_pack", form, t, source), write)
    numbers = (
        features,
        taps,
        channels,
        o_step,
        c_step,
        features * o_step,
        lanes * t.lanes * taps * channels,
    )
    return Packing(
        name,
        program.pointer(rhs),
        program.at(table),
        program.arguments((), numbers),
        lanes * groups,
        lanes * t.lanes * taps * channels * groups * t.itemsize,
        0.2 * t.lanes * hint(taps * channels, 512),
    )


def _table(
    program: Program,
    sizes: list[Size],
    steps: Sequence[int],
    start: Size,
) -> Place:
    """Scratch memory with start + sum of index * step for every index within `sizes`, row-major."""
    place = program.scratch(product(sizes) * 8)
    name = program.function(
        f"offset_table_{len(sizes)}",
        offset_table(f"offset_table_{len(sizes)}", len(sizes)).text(),
    )
    numbers = [start, *(v for pair in zip(sizes, steps, strict=True) for v in pair)]
    program.call(name, program.arguments([place], numbers))
    return place


def offset_table(name: str, taps: int) -> Function:
    """void(table, start, then size and step per tap dimension): start + sum of index * step,
    row-major."""
    params = signature("ptr table, i64 start")
    params += [("i64", f"{what}{i}") for i in range(taps) for what in ("size", "step")]
    f = Function(name, params)

    def nest(level: int, number: Int, offset: Int) -> None:
        if level == taps:
            f.store_at("i64", offset, "%table", number)
            return
        with f.loop(0, f"%size{level}") as i:
            nest(
                level + 1,
                f.muladd(number, f"%size{level}", i),
                f.muladd(i, f"%step{level}", offset),
            )

    nest(0, 0, "%start")
    return f
