"""Convolution on a grid: an implicit matrix product per group of features; the matrix of patches is never in memory.

    rows: output features of the group    columns: images x output positions    K: input features of the group x taps

Groups of few output features (depthwise) would leave blocks almost empty: a thread computes an element there. What matrix units take is conv_matrix.py's.
"""

from __future__ import annotations

from torch_hlo.compiler.codegen.conv import Labels, with_kernel_types
from torch_hlo.compiler.codegen.dot import emit_tree
from torch_hlo.compiler.codegen.function import Int
from torch_hlo.compiler.codegen.gpu import conv_matrix, fma
from torch_hlo.compiler.codegen.gpu.dot import element
from torch_hlo.compiler.codegen.indexing import Sizes, digits
from torch_hlo.compiler.codegen.inline import Writer
from torch_hlo.compiler.codegen.product import ACCUMULATORS
from torch_hlo.compiler.codegen.registry import emits_step
from torch_hlo.hlo import build
from torch_hlo.hlo.dim import Size, ceildiv
from torch_hlo.hlo.ir import Instruction, instr
from torch_hlo.hlo.shape import row_major_strides

SIDE = 64  # of a block
FEW_FEATURES = 8  # of a group, that are computed by a thread each


@emits_step("convolution", grid=True)
def convolution(program, x: Instruction) -> None:
    if x.shape.size == 0 or conv_matrix.emit(program, x):
        return
    rewritten = with_kernel_types(x)
    if rewritten is not None:
        return emit_tree(program, rewritten, x.operands, x)
    dtype = x.shape.dtype
    kind = ACCUMULATORS[dtype][0]
    lhs, rhs = x.operands
    if lhs.shape.size == 0 or rhs.shape.size == 0:
        return emit_tree(program, build.full(0, dtype, x.shape.dims), (), x)
    keyed = instr(
        "convolution",
        tuple(instr("parameter", (), o.shape, index=i) for i, o in enumerate(x.operands)),
        x.shape,
        **dict(x.attrs),
    )
    name, symbols, groups = program.once(
        ("grid convolution", keyed), lambda: _write(program, keyed, kind)
    )
    arguments = [f"ptr {program.pointer(o)}" for o in (lhs, rhs, x)] + [
        f"i64 {program.size(s)}" for s in symbols
    ]
    program.parallel(name, arguments, program.size(groups))


def _product(sizes) -> Size:
    total: Size = 1
    for s in sizes:
        total = total * s
    return total


def _write(program, x: Instruction, kind: str):
    """(function, its symbolic sizes, number of groups of threads) of a convolution of these shapes."""
    lhs, rhs = x.operands
    at, window = Labels.parse(x["dim_labels"]), x["window"]
    feature_groups, batch_groups = x["feature_group_count"], x["batch_group_count"]
    groups = feature_groups * batch_groups
    f = Writer(
        program, "conv", [("i64", "lo"), ("i64", "hi"), ("ptr", "A"), ("ptr", "B"), ("ptr", "C")]
    )
    size = Sizes(f)
    d_l, d_r, d_o = lhs.shape.dims, rhs.shape.dims, x.shape.dims
    s_l, s_r, s_o = ([size(s) for s in row_major_strides(d)] for d in (d_l, d_r, d_o))
    features, channels = (
        d_r[at.rhs[0]],
        d_r[at.rhs[1]],
    )  # output features of all groups, input features of one
    m, images = features // groups, d_o[at.out[0]]
    out_sizes, taps = [d_o[d] for d in at.out[2:]], [w.size for w in window]
    n, k = images * _product(out_sizes), channels * _product(taps)
    direct = isinstance(m, int) and m <= FEW_FEATURES and groups != 1
    across, down, side = (n, m, 1) if direct else (ceildiv(n, SIDE), ceildiv(m, SIDE), SIDE)
    rest, column = f.div("%lo", size(across)), f.mul(f.rem("%lo", size(across)), side)
    group, row = f.div(rest, size(down)), f.mul(f.rem(rest, size(down)), side)

    def weight(i: Int, deep: Int, lanes: int) -> list[str]:
        channel, *tap = digits(f, deep, [size(v) for v in (channels, *taps)])
        place = f.add(
            f.mul(f.add(i, f.mul(group, size(m))), s_r[at.rhs[0]]), f.mul(channel, s_r[at.rhs[1]])
        )
        for d, t, w in zip(at.rhs[2:], tap, window, strict=True):
            place = f.add(place, f.mul(f.sub(size(w.size - 1), t) if w.reversal else t, s_r[d]))
        return element(f, rhs.shape.dtype, kind, "%B", place)

    def patch(j: Int, deep: Int, lanes: int) -> list[str]:
        channel, *tap = digits(f, deep, [size(v) for v in (channels, *taps)])
        image, *where = digits(f, j, [size(v) for v in (images, *out_sizes)])
        if batch_groups > 1:
            image = f.add(image, f.mul(group, size(images)))
        if feature_groups > 1:
            channel = f.add(channel, f.mul(group, size(channels)))
        place = f.add(f.mul(image, s_l[at.lhs[0]]), f.mul(channel, s_l[at.lhs[1]]))
        inside = "true"
        for d, o, t, w in zip(at.lhs[2:], where, tap, window, strict=True):
            p = f.sub(f.add(f.mul(o, w.stride), f.mul(t, w.window_dilation)), size(w.pad_low))
            if w.base_dilation > 1:
                q = f.op(f"sdiv i64 {p}, {w.base_dilation}")
                whole = f.icmp("eq", f.mul(q, w.base_dilation), p)
                positive = f.icmp("sge", p, 0)
                inside = f.op(f"and i1 {inside}, {f.op(f'and i1 {whole}, {positive}')}")
                p = q
            inside = f.op(f"and i1 {inside}, {f.icmp('ult', p, size(d_l[d]))}")
            place = f.add(place, f.mul(p, s_l[d]))
        zero = f.emit().typed(kind).const(0)
        return f.choose(
            inside, lambda: element(f, lhs.shape.dtype, kind, "%A", place), lambda: [zero], [kind]
        )

    def store(i: Int, j: Int, lanes: int, value: str) -> None:
        image, *where = digits(f, j, [size(v) for v in (images, *out_sizes)])
        place = f.add(
            f.mul(image, s_o[at.out[0]]), f.mul(f.add(i, f.mul(group, size(m))), s_o[at.out[1]])
        )
        for d, o in zip(at.out[2:], where, strict=True):
            place = f.add(place, f.mul(o, s_o[d]))
        f.store(kind, value, f.gep(kind, "%C", place))

    if direct:
        t = f.emit().typed(kind)
        with f.loop(0, size(k), carry=[(kind, t.const(0))]) as loop:
            (p,), (q,), old = weight(row, loop.index, 1), patch(column, loop.index, 1), loop.vars[0]
            loop.next = [t.fma(p, q, old) if t.is_float else t.add(t.mul(p, q), old)]
        store(row, column, 1, loop.vars[0])
        return f.define(), list(size.names), across * down * groups
    block = fma.Block(f, kind, SIDE)
    block.write(
        fma.Operand(weight, size(m), row, True),
        fma.Operand(patch, size(n), column, False),
        size(k),
        store,
    )
    f.unit.declare(program)
    return (
        program.group_function("conv", block.declarations() + f.text(), fma.THREADS),
        list(size.names),
        across * down * groups,
    )
