"""convolution: any dimension numbers, groups, strides, dilations and reversals, as matrix products that read the input in place.

An instruction is first brought to the form of its engine by HLO around it: padding and base dilation become a padded copy, a
reversed window a reversed kernel, foreign dimension orders transposes. Two engines (conv_gemm.py) cover what training needs:
pixels as columns for the forward pass and the gradient of the input, taps as columns for the gradient of the weights
(recognised by a window larger than the output). Measured on the layers of ResNet-18, batch 8, one core: together 1.15 times oneDNN
(NCHW) forward, 0.9 for input gradients, 1.0 for weight gradients; oneDNN is ahead on 7x7 and 14x14 images. Groups with a single output feature and few taps are vector loops.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from torch_hlo.compiler.codegen import gemm
from torch_hlo.compiler.codegen import index as ix
from torch_hlo.compiler.codegen.conv_gemm import PixelColumns, TapColumns, geometry, offset_table
from torch_hlo.compiler.codegen.dot import ACCUMULATORS, SOURCES, Product, emit_product, emit_tree, merged
from torch_hlo.compiler.codegen.function import Function
from torch_hlo.compiler.codegen.plan import Planner
from torch_hlo.compiler.codegen.registry import emits_step, emits_value
from torch_hlo.compiler.codegen.views import choose
from torch_hlo.hlo import build
from torch_hlo.hlo.dim import Size, ceildiv
from torch_hlo.hlo.ir import Instruction, instr
from torch_hlo.hlo.shape import row_major_strides
from torch_hlo.hlo.window import WindowDim

UNROLLED_TAPS = 64


@dataclass(frozen=True, slots=True)
class Labels:
    """Positions of the dimensions: (batch, feature, spatial…), (output feature, input feature, spatial…), (batch, feature, spatial…)."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> Labels:
        lhs, rest = text.split("_")
        rhs, out = rest.split("->")
        digits = [c for c in lhs if c.isdigit()]
        digits.sort()
        return Labels(*(tuple(side.index(c) for c in (*names, *digits)) for side, names in ((lhs, "bf"), (rhs, "oi"), (out, "bf"))))


def _digits(n: int) -> str:
    return "".join(str(i) for i in range(n))


def _product(sizes) -> Size:
    total: Size = 1
    for s in sizes:
        total = total * s
    return total


def _remake(x: Instruction, lhs: Instruction, rhs: Instruction, **changes) -> Instruction:
    """The convolution with other operands and attributes, of the same result type."""
    attrs = {k: x[k] for k in ("window", "dim_labels", "feature_group_count", "batch_group_count")} | changes
    inferred = instr("convolution", (lhs, rhs), **attrs)
    return instr("convolution", (lhs, rhs), inferred.shape.with_dtype(x.shape.dtype), **attrs)


def is_plain(w: WindowDim) -> bool:
    return w.pad_low == 0 and w.pad_high == 0 and w.base_dilation == 1


@emits_step("convolution")
def convolution(program, x: Instruction) -> None:
    if x.shape.size == 0:
        return
    dtype = x.shape.dtype
    rewritten = _typed(x)
    if rewritten is None and _has_phases(x):
        return _emit_phases(program, x)
    if rewritten is None:
        rewritten = _prepared(x)
    if rewritten is not None:
        return emit_tree(program, rewritten, x.operands, x)
    kind = ACCUMULATORS[dtype][0]
    if x.operands[0].shape.size == 0 or x.operands[1].shape.size == 0:
        return emit_tree(program, build.full(0, dtype, x.shape.dims), (), x)
    if _is_pointwise(x) and (found := _pointwise_product(x)) is not None:
        p, first = found
        operands = x.operands if first == 0 else x.operands[::-1]
        return emit_product(program, p, kind, tuple(o.shape.dtype for o in operands), [program.pointer(o) for o in (*operands, x)])
    if _is_unrolled(x):
        return _emit_unrolled(program, x)
    (_emit_taps if _by_taps(x) else _emit_pixels)(program, x, kind)


def _typed(x: Instruction) -> Instruction | None:
    """The convolution on element types that have kernels, or None when it is already."""
    dtype = x.shape.dtype
    if x.shape.kind == "c":
        real = {"c64": "f32", "c128": "f64"}[dtype]
        wanted = [o if o.shape.dtype == dtype else build.convert(o, dtype) for o in x.operands]
        (ar, ai), (br, bi) = ((build.real(o), build.imag(o)) for o in wanted)

        def part(a: Instruction, b: Instruction) -> Instruction:
            return instr("convolution", (a, b), x.shape.with_dtype(real), **dict(x.attrs))

        return build.complex_(build.subtract(part(ar, br), part(ai, bi)), build.add(part(ar, bi), part(ai, br)))
    wide = ACCUMULATORS[dtype][1] if dtype in ACCUMULATORS else "f32" if x.shape.kind == "f" else "s32"
    if wide != dtype:
        accumulated = instr("convolution", x.operands, x.shape.with_dtype(wide), **dict(x.attrs))
        return build.compare(accumulated, build.full_like(accumulated, 0), "NE") if dtype == "pred" else build.convert(accumulated, dtype)
    kind = ACCUMULATORS[dtype][0]
    if any((o.shape.dtype, kind) not in SOURCES for o in x.operands):
        return instr("convolution", tuple(build.convert(o, dtype) for o in x.operands), x.shape, **dict(x.attrs))
    return None


def _prepared(x: Instruction) -> Instruction | None:
    """The convolution in an engine's form, or None when it is: no padding, dilation or reversal left, rows of pixels contiguous."""
    lhs, rhs = x.operands
    at = Labels.parse(x["dim_labels"])
    window, spatial = x["window"], len(x["window"])
    if spatial == 0:  # a matrix product with a dimension of size 1 added
        grown = _remake(x, build.reshape(lhs, (*lhs.shape.dims, 1)), build.reshape(rhs, (*rhs.shape.dims, 1)), window=(WindowDim(1),),
                        dim_labels="->".join("_".join(s + "0" for s in side.split("_")) for side in x["dim_labels"].split("->")))
        return build.reshape(grown, x.shape.dims)
    by_taps = _by_taps(x)
    if any(w.reversal and (by_taps or w.size == 1) for w in window):
        flipped = build.reverse(rhs, [at.rhs[2 + i] for i, w in enumerate(window) if w.reversal and w.size != 1])
        return _remake(x, lhs, flipped, window=tuple(replace(w, reversal=False) for w in window))
    # Rows of pixels innermost on every side; the kernel as [output feature, input feature, taps], or with those two exchanged.
    orders = [at.lhs[2:] == tuple(range(lhs.shape.rank - spatial, lhs.shape.rank)), at.rhs[2:] == tuple(range(2, 2 + spatial)),
              at.out[2:] == tuple(range(2, 2 + spatial))]
    orders[1] = orders[1] and (by_taps or at.rhs[0] == 0 or x["feature_group_count"] * x["batch_group_count"] == 1)
    merged = by_taps or _is_merged(x)
    if merged:
        orders[2] = orders[2] and at.out[:2] == (1, 0)
    if not all(orders):
        names = ["bf", "io" if orders[1] and at.rhs[0] == 1 else "oi", "fb" if merged else "bf"]
        digits = _digits(spatial)
        label = f"{names[0]}{digits}_{names[1]}{digits}->{names[2]}{digits}"
        operands = [o if good and _label(x, i)[:2] == names[i] else build.transpose(o, p)
                    for i, (o, p, good) in enumerate(((lhs, at.lhs, orders[0]), (rhs, at.rhs, orders[1])))]
        inner = _remake(x, *operands, dim_labels=label)
        have = Labels.parse(label).out
        back = [0] * x.shape.rank  # dimension of `inner` at each dimension of x
        for a, b in zip(at.out, have, strict=True):
            back[a] = b
        return build.transpose(inner, back)
    if not all(is_plain(w) for w in window):
        padding = [(0, 0, 0)] * lhs.shape.rank
        for i, w in enumerate(window):
            padding[at.lhs[2 + i]] = (w.pad_low, w.pad_high, w.base_dilation - 1)
        plain = tuple(WindowDim(w.size, w.stride, 0, 0, 1, w.window_dilation, w.reversal) for w in window)
        if _is_unrolled(x):
            return None
        return _remake(x, build.pad(lhs, build.full(0, lhs.shape.dtype), padding), rhs, window=plain)
    return None


def _label(x: Instruction, side: int) -> str:
    lhs, rest = x["dim_labels"].split("_")
    rhs, out = rest.split("->")
    return (lhs, rhs, out)[side]


def _by_taps(x: Instruction) -> bool:
    """Whether the window has more positions than the output: the gradient of weights."""
    at = Labels.parse(x["dim_labels"])
    out = _product(x.shape.dims[d] for d in at.out[2:])
    taps = _product(w.size for w in x["window"])
    return isinstance(taps, int) and isinstance(out, int) and taps > out


def _is_merged(x: Instruction) -> bool:
    """Whether pixels of all images are columns of one product, so that small images do not leave vector lanes unused. The result
    is then [features, images, pixels]."""
    at = Labels.parse(x["dim_labels"])
    pixels, images = _product(x.shape.dims[d] for d in at.out[2:]), x.shape.dims[at.out[0]]
    groups = x["feature_group_count"] * x["batch_group_count"]
    if not (isinstance(pixels, int) and isinstance(images, int)) or images == 1 or groups > 1 and _is_unrolled(x):
        return False
    return pixels < 0.9 * (-(-pixels // 32) * 32)


def _has_phases(x: Instruction) -> bool:
    """Whether the base is dilated (gradient of a strided convolution) in a way that splits into convolutions without holes."""
    return any(w.base_dilation > 1 for w in x["window"]) and x.shape.is_static and all(o.shape.is_static for o in x.operands) and all(
        w.base_dilation == 1 or w.stride == 1 and w.window_dilation == 1 for w in x["window"]) and not _is_unrolled(x)


def _emit_phases(program, x: Instruction) -> None:
    """Outputs u = d * v + r of dilation d only meet the taps t = r' + d * j: one dense convolution per remainder r."""
    from torch_hlo.compiler.codegen.loop import emit_instruction

    lhs, rhs = x.operands
    at, target = Labels.parse(x["dim_labels"]), program.place(x)
    for phase in itertools.product(*(range(w.base_dilation) for w in x["window"])):
        window, starts, counts = [], [0] * rhs.shape.rank, list(x.shape.dims)
        steps = [1] * rhs.shape.rank
        for s, (w, r) in enumerate(zip(x["window"], phase, strict=True)):
            d, n, outputs = w.base_dilation, lhs.shape.dims[at.lhs[2 + s]], x.shape.dims[at.out[2 + s]]
            if d == 1:
                window.append(w)
                continue
            first = (w.pad_low - r) % d
            taps, count = max(0, -(-(w.size - first) // d)), -(-(outputs - r) // d)
            low = (w.pad_low - r - first) // d
            window.append(WindowDim(taps, 1, low, count - n - low + taps - 1, 1, 1, w.reversal))
            if w.reversal:  # tap t is element size - 1 - t of the kernel
                first = (w.size - 1 - first) % d
            starts[at.rhs[2 + s]], steps[at.rhs[2 + s]], counts[at.out[2 + s]] = first, d, count
        if 0 in counts:
            continue
        if any(w.size == 0 for w in window):
            y = build.full(0, x.shape.dtype, counts)
        else:
            y = _remake(x, lhs, build.slice_(rhs, starts, rhs.shape.dims, steps), window=tuple(window))

        def place(index, phase=phase) -> ix.Index:
            spread = list(index)
            for s, (w, r) in enumerate(zip(x["window"], phase, strict=True)):
                spread[at.out[2 + s]] = index[at.out[2 + s]] * w.base_dilation + r
            return ix.linear(spread, x.shape.dims)

        with program.rebound():
            program.bind(y, program.allocate_shape(y.shape))
            emit_tree(program, y, x.operands, y)
            emit_instruction(program, instr("copy", (y,), y.shape), target, place, key=(x, phase))


def _is_pointwise(x: Instruction) -> bool:
    window = x["window"]
    return all(w.size == 1 and w.stride == 1 for w in window) and x["feature_group_count"] == 1 and x["batch_group_count"] == 1


def _pointwise_product(x: Instruction) -> tuple[Product, int] | None:
    """A window of one element as a strided product, and which operand is its left one: the kernel times the pixels of each image, or
    where features are innermost the pixels times the kernel."""
    at = Labels.parse(x["dim_labels"])
    lhs, rhs = x.operands
    data, kernel, out = _strides(lhs, at.lhs), _strides(rhs, at.rhs), _strides(x, at.out)
    sizes = [lhs.shape.dims[d] for d in at.lhs[2:]]
    images, features = (lhs.shape.dims[d] for d in at.lhs[:2])
    o = rhs.shape.dims[at.rhs[0]]
    pixels = merged(list(zip(sizes, data[2:], strict=True)))
    pixels_out = merged(list(zip(sizes, out[2:], strict=True)))
    if pixels is None or pixels_out is None:
        return None
    batch = () if images == 1 else ((images, 0, data[0], out[0]),)
    if pixels_out[1] == 1 or pixels[0] == 1:
        return Product(o, pixels[0], features, (kernel[0], kernel[1]), (pixels[1], data[1]), out[1], batch), 1
    if out[1] == 1:
        batch = () if images == 1 else ((images, data[0], 0, out[0]),)
        return Product(pixels[0], o, features, (pixels[1], data[1]), (kernel[0], kernel[1]), pixels_out[1], batch), 0
    return None


# -- the engines ---------------------------------------------------------------------------------------------------------
def _table(program, channels: Size, channel_step: Size, sizes, steps, start: Size = 0):
    """Scratch memory with the element offset of every (channel, tap), the first being `start`, and the number of entries."""
    entries = channels * _product(sizes)
    place = program.scratch(entries * 8)
    name = program.function(f"offset_table_{len(sizes)}", offset_table(f"offset_table_{len(sizes)}", len(sizes)).text())
    numbers = [channels, channel_step, start, *(v for pair in zip(sizes, steps, strict=True) for v in pair)]
    program.call(name, [f"ptr {program.at(place)}", *(f"i64 {program.size(n)}" for n in numbers)])
    return place, entries


def _hint(size: Size, usual: int) -> int:
    return size if isinstance(size, int) else usual


def _task(name: str, engine, t: gemm.Tile, m_heights: tuple[int, ...], outer: int, extras: list[str], kinds: tuple[str, str, str]) -> Function:
    """Items (image, group, row block, column block): find the corners of the block and call the engine."""
    params = [("i64", "lo"), ("i64", "hi"), ("ptr", "A"), ("ptr", "B"), ("ptr", "C"), ("ptr", "table")]
    names = ["m", "n", "k", "a_free", "ldc", "tiles_each", "columns_each", "blocks_m", "blocks_n", "groups", "b_image_step", "c_image_step", "a_group",
             "b_group", "c_group", *extras]
    params += [("i64", q) for q in names] + geometry(outer)
    f = Function(name, "void", params)
    scratch = f.alloca("i8", t.scratch_bytes, 64)
    with f.loop("%lo", "%hi") as item:
        rest, column_block = f.div(item, "%blocks_n"), f.rem(item, "%blocks_n")
        rest, row_block = f.div(rest, "%blocks_m"), f.rem(rest, "%blocks_m")
        image, group = f.div(rest, "%groups"), f.rem(rest, "%groups")
        a = f.gep(kinds[0], "%A", f.mul(group, "%a_group"))
        b = f.gep(kinds[1], "%B", f.add(f.mul(image, "%b_image_step"), f.mul(group, "%b_group")))
        c = f.gep(kinds[2], "%C", f.add(f.mul(image, "%c_image_step"), f.mul(group, "%c_group")))
        n0 = f.mul(column_block, "%columns_each")
        n1 = f.min(f.add(n0, "%columns_each"), "%n")
        first = f.mul(row_block, "%tiles_each")
        last = f.min(f.add(first, "%tiles_each"), f.ceildiv("%m", m_heights[0]))
        numbers = [f"i64 {v}" for v in (first, last, "%m", n0, n1, "%k")]
        tail = [f"i64 %{q}" for q in extras] + [f"i64 %{q}" for _, q in geometry(outer)]
        f.call("void", engine, f"ptr {a}", "i64 %a_free", "i64 1", f"ptr {b}", "i64 0", "i64 0", f"ptr {c}", "i64 %ldc", *numbers, f"ptr {scratch}",
               "ptr %table", *tail)
    return f


def _run(program, x: Instruction, engine_class, kind: str, operands, m: Size, n: Size, k: Size, images: Size, groups: int, table, a_free: Size, ldc: Size,
         steps: dict[str, Size], pixel_sizes, pixel_steps, extras: dict[str, Size], work: float, by_feature=None) -> None:  # fmt: skip
    """Call the engine on every image, group and block. `steps`: b_image_step, c_image_step, a_group, b_group, c_group."""
    a, b = operands
    t = gemm.tile(kind, program.target.vector_bytes)
    sources = (SOURCES[a.shape.dtype, kind], SOURCES[b.shape.dtype, kind])
    heights = gemm.tile_heights(t, m)
    outer, step_x = len(pixel_sizes) - 1, pixel_steps[-1] if pixel_steps[-1] in (1, 2) else None
    tiles = ceildiv(m, heights[0])
    cut = gemm.partition(t, tiles, m, n, k * extras.get("images", 1), images * groups, 0.25, groups == 1)
    prepacked = cut.prepacked or groups == 1 and images != 1 or by_feature is not None
    engine = engine_class(t, *sources, heights, isinstance(m, int), outer, step_x, prepacked)

    def write() -> str:
        block = engine.block()
        for name, text in engine.functions.items():
            program.function(name, text)
        kinds = (t.kind if prepacked else sources[0].kind, sources[1].kind, t.kind)
        f = _task(f"{block}_task", block, t, heights, outer, list(extras), kinds)
        return program.function(f.name, f.text())

    name = program.once(("convolution", engine.name), write)
    pointer_a = program.pointer(a)
    if prepacked:
        pointer_a = _prepack(program, engine, pointer_a, m, a_free, k, extras, by_feature)
    numbers = [m, n, k, a_free, ldc, cut.tiles_each, cut.columns_each, cut.blocks_m, cut.blocks_n, groups, *steps.values(), *extras.values()]
    sizes = [*pixel_sizes[:-1], *pixel_steps[:-1], pixel_sizes[-1], pixel_steps[-1]]
    pointers = [f"ptr {pointer_a}", f"ptr {program.pointer(b)}", f"ptr {program.pointer(x)}", f"ptr {program.at(table)}"]
    items = images * groups * cut.blocks_m * cut.blocks_n
    cost = 100 + work / max(1, _hint(items, 8)) / (1.2 * t.lanes)
    program.parallel(name, pointers + [f"i64 {program.size(v)}" for v in (*numbers, *sizes)], program.size(items), cost=cost)


def _prepack(program, engine, a: str, m: Size, a_free: Size, k: Size, extras: dict[str, Size], by_feature) -> str:
    """Pack all of A, in parallel; returns the pointer to it. `by_feature`: (input features, taps, strides of output and input features)."""
    def write() -> str:
        name = engine.prepack()
        for function, text in engine.functions.items():
            program.function(function, text)
        return name

    images = extras.get("images", 1)
    packed = program.at(program.scratch(engine.prepacked_bytes(m, k * images)))
    numbers = (m, a_free, 1, k, images, extras.get("a_image", 0))
    if by_feature is not None:
        features, taps, free, step = by_feature
        numbers = (m, free, 1, taps, features, step)
    name = program.once(("prepack", engine.name), write)
    program.parallel(name, [f"ptr {a}", f"ptr {packed}", *(f"i64 {program.size(v)}" for v in numbers)], program.size(ceildiv(m, engine.heights[0])),
                     cost=0.12 * engine.heights[0] * _hint(k * images, 1000))
    return packed


def _strides(x: Instruction, at: tuple[int, ...]) -> list[Size]:
    strides = row_major_strides(x.shape.dims)
    return [strides[d] for d in at]


def _emit_pixels(program, x: Instruction, kind: str) -> None:
    """Columns are output pixels: out[b, o, pixel] = sum over (i, tap)."""
    lhs, rhs = x.operands
    at, window = Labels.parse(x["dim_labels"]), x["window"]
    feature_groups, batch_groups = x["feature_group_count"], x["batch_group_count"]
    groups = feature_groups * batch_groups
    data, out = _strides(lhs, at.lhs), _strides(x, at.out)
    o, i = (rhs.shape.dims[d] for d in at.rhs[:2])
    images = x.shape.dims[at.out[0]]
    merged = at.out[0] == 1
    pixel_sizes = [x.shape.dims[d] for d in at.out[2:]]
    pixel_steps = [s * w.stride for s, w in zip(data[2:], window, strict=True)]
    if merged:
        pixel_sizes, pixel_steps = [images, *pixel_sizes], [data[0], *pixel_steps]
    taps = [w.size for w in window]
    tap_steps = [s * w.window_dilation for s, w in zip(data[2:], window, strict=True)]
    # A mirrored kernel meets the input in the opposite order: the table runs backwards.
    start = 0
    for n, (w, step) in enumerate(zip(window, tap_steps, strict=True)):
        if w.reversal:
            start, tap_steps[n] = start + (w.size - 1) * step, step * -1
    table, k = _table(program, i, data[1], taps, tap_steps, start)
    m, n = o // groups, _product(pixel_sizes)
    steps = {"b_image_step": data[0], "c_image_step": out[0], "a_group": m * k,
             "b_group": data[1] * i if feature_groups > 1 else data[0] * images, "c_group": out[1] * m}
    repeats = 1 if merged else images
    work = float(_hint(repeats, 4)) * groups * _hint(m, 64) * _hint(n, 1024) * _hint(k, 512)
    # A kernel with its input features first is packed feature by feature.
    by_feature = (i, _product(taps), *_strides(rhs, at.rhs)[:2]) if at.rhs[0] == 1 else None
    _run(program, x, PixelColumns, kind, (rhs, lhs), m, n, k, repeats, groups, table, k, out[1], steps, pixel_sizes, pixel_steps, {}, work, by_feature)


def _emit_taps(program, x: Instruction, kind: str) -> None:
    """Columns are (b, output position), K is (i, window position): out[o, b, position]."""
    lhs, rhs = x.operands
    at, window = Labels.parse(x["dim_labels"]), x["window"]
    feature_groups, batch_groups = x["feature_group_count"], x["batch_group_count"]
    groups = feature_groups * batch_groups
    data, kernel, out = _strides(lhs, at.lhs), _strides(rhs, at.rhs), _strides(x, at.out)
    o, images = (rhs.shape.dims[d] for d in at.rhs[:2])
    b = x.shape.dims[at.out[0]]
    positions = [x.shape.dims[d] for d in at.out[2:]]
    table, n = _table(program, b, data[0], positions, [s * w.stride for s, w in zip(data[2:], window, strict=True)])
    pixel_sizes = [w.size for w in window]
    pixel_steps = [s * w.window_dilation for s, w in zip(data[2:], window, strict=True)]
    m, k = o // groups, _product(pixel_sizes)
    steps = {"b_image_step": 0, "c_image_step": 0, "a_group": kernel[0] * m,
             "b_group": data[1] * images if feature_groups > 1 else data[0] * b, "c_group": out[1] * m}
    extras = {"images": images, "a_image": kernel[1], "b_image": data[1]}
    work = float(_hint(images, 4)) * groups * _hint(m, 64) * _hint(n, 1024) * _hint(k, 512)
    _run(program, x, TapColumns, kind, (rhs, lhs), m, n, k, 1, groups, table, kernel[0], out[1], steps, pixel_sizes, pixel_steps, extras, work)


# -- groups of one feature -----------------------------------------------------------------------------------------------
def _is_unrolled(x: Instruction) -> bool:
    """One output feature per group and few taps: nothing is shared between outputs that a matrix product could use."""
    at = Labels.parse(x["dim_labels"])
    groups = x["feature_group_count"] * x["batch_group_count"]
    o, i = (x.operands[1].shape.dims[d] for d in at.rhs[:2])
    taps = _product((i, *(w.size for w in x["window"])))
    return groups > 1 and isinstance(o, int) and o // groups <= 2 and isinstance(taps, int) and taps <= UNROLLED_TAPS and x.shape.kind == "f"


def _emit_unrolled(program, x: Instruction) -> None:
    from torch_hlo.compiler.codegen.loop import emit_instruction

    emit_instruction(program, x, program.place(x))


@emits_value("convolution")
def convolution_value(k, x: Instruction, index: tuple[ix.Index, ...]):
    """One output as an unrolled sum over input features of its group and taps."""
    lhs, rhs = x.operands
    at, window = Labels.parse(x["dim_labels"]), x["window"]
    feature_groups, batch_groups = x["feature_group_count"], x["batch_group_count"]
    o, i = (rhs.shape.dims[d] for d in at.rhs[:2])
    feature = index[at.out[1]]
    group = ix.divide(feature, o // (feature_groups * batch_groups))[0]
    total = None
    t = k.e.typed("double" if x.shape.dtype == "f64" else "float")
    for channel in range(i):
        for offsets in itertools.product(*(range(w.size) for w in window)):
            place = [ix.ZERO] * lhs.shape.rank
            tap = [ix.ZERO] * rhs.shape.rank
            place[at.lhs[0]] = index[at.out[0]] + (group * x.shape.dims[at.out[0]] if batch_groups > 1 else ix.ZERO)
            place[at.lhs[1]] = (group * i if feature_groups > 1 else ix.ZERO) + channel
            tap[at.rhs[0]], tap[at.rhs[1]] = feature, ix.constant(channel)
            conditions = []
            for s, (w, offset) in enumerate(zip(window, offsets, strict=True)):
                n = lhs.shape.dims[at.lhs[2 + s]]
                p = index[at.out[2 + s]] * w.stride + (offset * w.window_dilation - w.pad_low)
                if w.base_dilation > 1:
                    conditions.append((p, 0, (n - 1) * w.base_dilation + 1))
                    p, rest = ix.divide(p + w.base_dilation * (1 << 20), w.base_dilation)  # never negative
                    p = p - (1 << 20)
                    conditions.append((rest, 0, 1))
                else:
                    conditions.append((p, 0, n))
                place[at.lhs[2 + s]] = p
                tap[at.rhs[2 + s]] = ix.constant(w.size - 1 - offset if w.reversal else offset)
            value = choose(k, lhs.shape.dtype, conditions, lambda p=tuple(place): k.value(lhs, p), lambda: t.const(0))
            weight = k.value(rhs, tuple(tap))
            if isinstance(k, Planner):
                k.cost += 1
                total = value
            else:
                total = t.fma(value, weight, total if total is not None else t.const(0))
    return total
