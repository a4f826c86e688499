"""Convolution on a grid: an implicit matrix product per group of features; the matrix of patches is
never in memory.

    rows: output features of the group    columns: images x output positions    K: input features of
        the group x taps

Groups of few output features (depthwise) would leave blocks almost empty: a thread computes an
element there. What matrix units take is gpu_conv_matrix.py's.
"""

from torch_hlo.hlo.ir import (
    Instruction,
    Size,
    build,
    ceildiv,
    parameters_of,
    product,
    replace,
    row_major_strides,
)

from ..gather.gather_scatter import Sizes, digits
from ..gpu.gpu_program import GpuProgram
from ..gpu.gpu_writer import GpuWriter
from ..llvm import Int
from ..matmul.dot import emit_apart, emit_tree, parts_of_output
from ..matmul.gpu import gpu_fma
from ..matmul.gpu.gpu_blocks import Store, element
from ..matmul.product import ACCUMULATORS
from . import gpu_conv_matrix
from .convolution import Labels, with_kernel_types

SIDE = 64  # of a block
FEW_FEATURES = 8  # of a group, that are computed by a thread each


def convolution(program: GpuProgram, x: Instruction) -> None:
    if x.size == 0 or gpu_conv_matrix.emit(program, x):
        return
    rewritten = with_kernel_types(x)
    if rewritten is not None:
        return emit_tree(program, rewritten, x.operands, x)
    dtype = x.dtype
    kind = ACCUMULATORS[dtype][0]
    lhs, rhs = x.operands
    if lhs.size == 0 or rhs.size == 0:
        return emit_tree(program, build.full(0, dtype, x.dims), (), x)
    keyed = replace(x, parameters_of(o.shape for o in x.operands), x.shape)
    name, symbols, groups = program.made(_write, keyed, kind)
    arguments = program.arguments(map(program.pointer, (lhs, rhs, x)), symbols)
    program.parallel(name, arguments, groups)


def fusion(program: GpuProgram, x: Instruction) -> None:
    """A fusion of kind output around a convolution."""
    o = parts_of_output(program, x, x["calls"], "convolution")
    if o.outer.size != 0:
        emit_apart(program, o)


def _write(program: GpuProgram, x: Instruction, kind: str) -> tuple[str, list[Size], Size]:
    """(function, its symbolic sizes, number of groups of threads) of a convolution of these
    shapes."""
    parameters = "i64 lo, i64 hi, ptr A, ptr B, ptr C"
    f = GpuWriter(program, "conv", parameters)
    c = _Convolution(f, x, kind)
    size = c.size
    m = c.m
    n = c.n
    k = c.k
    groups = c.groups
    direct = isinstance(m, int) and m <= FEW_FEATURES and groups != 1
    across, down, side = (n, m, 1) if direct else (ceildiv(n, SIDE), ceildiv(m, SIDE), SIDE)
    rest = f.div("%lo", size(across))
    column = f.mul(f.rem("%lo", size(across)), side)
    c.group = f.div(rest, size(down))
    row = f.mul(f.rem(rest, size(down)), side)
    if direct:
        t = f.typed(kind)
        with f.loop(0, size(k), carry=[(kind, t.const(0))]) as loop:
            (p,) = c.weight(row, loop.index, 1)
            (q,) = c.patch(column, loop.index, 1)
            old = loop.vars[0]
            loop.next = [t.fma(p, q, old) if t.is_float else t.add(t.mul(p, q), old)]
        c.store(row, column, 1, loop.vars[0])
        return f.define(), list(size.names), across * down * groups
    block = gpu_fma.Block(f, kind, SIDE)
    block.write(
        gpu_fma.Operand(c.weight, size(m), row, True),
        gpu_fma.Operand(c.patch, size(n), column, False),
        size(k),
        Store(c.store),
    )
    f.unit.declare(program)
    text = block.declarations() + f.text()
    name = program.group_function("conv", text, gpu_fma.THREADS)
    return name, list(size.names), across * down * groups


class _Convolution:
    """A convolution as a product per group: m features times n pixels, over k pairs of channel and
    tap. `group`: the one that is computed."""

    group: Int

    def __init__(self, f: GpuWriter, x: Instruction, kind: str) -> None:
        self.f = f
        self.x = x
        self.kind = kind
        self.at = Labels.parse(x["dim_labels"])
        lhs, rhs = x.operands
        at = self.at
        window = x["window"]
        self.groups = x["feature_group_count"] * x["batch_group_count"]
        self.size = Sizes(f)
        shapes = lhs.dims, rhs.dims, x.dims
        self.s_l, self.s_r, self.s_o = (
            [self.size(s) for s in row_major_strides(d)] for d in shapes
        )
        # output features of all groups, input features of one
        features = rhs.dims[at.rhs[0]]
        self.channels = rhs.dims[at.rhs[1]]
        self.m = features // self.groups
        self.images = x.dims[at.out[0]]
        self.out_sizes = [x.dims[d] for d in at.out[2:]]
        self.taps = [w.size for w in window]
        self.n = self.images * product(self.out_sizes)
        self.k = self.channels * product(self.taps)

    def weight(self, i: Int, deep: Int, lanes: int) -> list[str]:
        f = self.f
        size = self.size
        at = self.at
        channel, *tap = digits(f, deep, [size(v) for v in (self.channels, *self.taps)])
        feature = f.mul(f.muladd(self.group, size(self.m), i), self.s_r[at.rhs[0]])
        place = f.muladd(channel, self.s_r[at.rhs[1]], feature)
        for d, t, w in zip(at.rhs[2:], tap, self.x["window"], strict=True):
            turned = f.sub(size(w.size - 1), t) if w.reversal else t
            place = f.muladd(turned, self.s_r[d], place)
        return element(f, self.x.operands[1].dtype, self.kind, "%B", place)

    def patch(self, j: Int, deep: Int, lanes: int) -> list[str]:
        f = self.f
        size = self.size
        at = self.at
        lhs = self.x.operand.shape
        channel, *tap = digits(f, deep, [size(v) for v in (self.channels, *self.taps)])
        image, *where = digits(f, j, [size(v) for v in (self.images, *self.out_sizes)])
        if self.x["batch_group_count"] > 1:
            image = f.muladd(self.group, size(self.images), image)
        if self.x["feature_group_count"] > 1:
            channel = f.muladd(self.group, size(self.channels), channel)
        in_image = f.mul(image, self.s_l[at.lhs[0]])
        place = f.muladd(channel, self.s_l[at.lhs[1]], in_image)
        inside = "true"
        for d, o, t, w in zip(at.lhs[2:], where, tap, self.x["window"], strict=True):
            p = f.sub(f.muladd(o, w.stride, f.mul(t, w.window_dilation)), size(w.pad_low))
            if w.base_dilation > 1:
                q = f.op(f"sdiv i64 {p}, {w.base_dilation}")
                whole = f.icmp("eq", f.mul(q, w.base_dilation), p)
                positive = f.icmp("sge", p, 0)
                inside = f.op(f"and i1 {inside}, {f.op(f'and i1 {whole}, {positive}')}")
                p = q
            inside = f.op(f"and i1 {inside}, {f.icmp('ult', p, size(lhs.dims[d]))}")
            place = f.muladd(p, self.s_l[d], place)
        zero = f.typed(self.kind).const(0)
        return f.choose(
            inside,
            lambda: element(f, lhs.dtype, self.kind, "%A", place),
            lambda: [zero],
            [self.kind],
        )

    def store(self, i: Int, j: Int, lanes: int, value: str) -> None:
        f = self.f
        size = self.size
        at = self.at
        image, *where = digits(f, j, [size(v) for v in (self.images, *self.out_sizes)])
        in_image = f.mul(image, self.s_o[at.out[0]])
        feature = f.muladd(self.group, size(self.m), i)
        place = f.muladd(feature, self.s_o[at.out[1]], in_image)
        for d, o in zip(at.out[2:], where, strict=True):
            place = f.muladd(o, self.s_o[d], place)
        f.store_at(self.kind, value, "%C", place)
