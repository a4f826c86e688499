"""Reshapes, transposes and broadcasts move outward (towards the users), where they meet and cancel,
or end in a dot.

    add(reshape(a), broadcast(b))  ->  reshape(add(a, broadcast(b)))
    exponential(broadcast(x))      ->  broadcast(exponential(x))          less work
    reduce(transpose(x))           ->  reduce(x)

A pointwise instruction moves when every operand is one of the same kind or can be rearranged for
free (uniform constants, broadcasts).
"""

from collections.abc import Sequence
from typing import TypeVar

from torch_hlo.hlo.ir import (
    POINTWISE,
    Dim,
    Dims,
    Instruction,
    Module,
    Size,
    all_or_none,
    build as h,
    fixed,
    instr,
    op,
    product,
    replace,
    rewrite,
    rules,
    splat,
    var,
)

from ..hlo_pass import hlo_pass
from .moves import groups, reshape_broadcast

_POINTWISE = frozenset(POINTWISE)


def _rebuilt(out: Instruction, operands: Sequence[Instruction]) -> Instruction:
    """The pointwise `out` on operands of other dims."""
    return replace(out, operands, out.shape.with_dims(operands[0].dims))


def equal_dims(out: Instruction) -> bool:
    """False for a clamp with scalar bounds."""
    return all(o.dims == out.dims for o in out.operands)


def pointwise_of_broadcasts(out: Instruction) -> Instruction | None:
    """f(broadcast(x), broadcast(y)) -> broadcast(f(x, y)) when both repeat along the same
    dimensions"""
    first = next((o for o in out.operands if o.op == "broadcast" and o.operand.rank), None)
    if first is None:
        return None
    dimensions = first["dimensions"]
    dims = first.operand.dims
    operands = []
    for o in out.operands:
        if o.op == "broadcast" and o["dimensions"] == dimensions:
            operands.append(o.operand)
        elif splat(o) is not None or o.op == "broadcast" and not o.operand.rank:
            operands.append(h.broadcast(o.operand, dims, ()))
        else:
            return None
    return h.broadcast(_rebuilt(out, operands), out.dims, dimensions)


def pointwise_of_scalars(out: Instruction) -> Instruction | None:
    """f(broadcast(scalar), broadcast(scalar)) -> broadcast(f(scalar, scalar))"""
    if (
        not out.operands
        or not out.rank
        or any(o.op != "broadcast" or o.operand.rank for o in out.operands)
    ):
        return None
    return h.broadcast(_rebuilt(out, [o.operand for o in out.operands]), out.dims, ())


def _with_dims(o: Instruction, dims: Dims) -> Instruction | None:
    """`o` reshaped to `dims` without a reshape of its own, or None."""
    if o.op == "reshape":
        return o.operand if o.operand.dims == dims else None
    if splat(o) is not None or o.op == "broadcast" and not o.operand.rank:
        return h.broadcast(o.operand if o.op == "broadcast" else o, dims, ())
    if o.op == "broadcast":
        moved = reshape_broadcast(instr("reshape", (o,), o.shape.with_dims(dims)), o, o.operand)
        # A broadcast of a new reshape is free too: the reshape is of the smaller array.
        return moved
    if o.op == "pad":  # so is that of what is padded
        x, fill = o.operands
        kept = [d for d, n in enumerate(o.dims) if n != 1 or any(o["padding"][d])]
        if tuple(o.dims[d] for d in kept) == dims:
            return h.pad(
                h.reshape(x, [x.dims[d] for d in kept]),
                fill,
                [o["padding"][d] for d in kept],
            )
    return None


def pointwise_of_reshapes(out: Instruction) -> Instruction | None:
    """f(reshape(x), reshape(y)) -> reshape(f(x, y))"""
    reshaped = next((o for o in out.operands if o.op == "reshape"), None)
    if reshaped is None:
        return None
    dims = reshaped.operand.dims
    operands = []
    for o in out.operands:
        moved = _with_dims(o, dims)
        if moved is None:
            return None
        operands.append(moved)
    return h.reshape(_rebuilt(out, operands), out.dims)


def pointwise_of_transposes(out: Instruction) -> Instruction | None:
    """f(transpose(x), transpose(y)) -> transpose(f(x, y))"""
    transposed = next((o for o in out.operands if o.op == "transpose"), None)
    if transposed is None:
        return None
    perm = transposed["dimensions"]
    dims = transposed.operand.dims
    operands = all_or_none(_turned(o, perm, dims, {}) for o in out.operands)
    return None if operands is None else h.transpose(_rebuilt(out, operands), perm)


_OUTWARD = (
    ("broadcast", pointwise_of_scalars),
    ("broadcast", pointwise_of_broadcasts),
    ("reshape", pointwise_of_reshapes),
    ("transpose", pointwise_of_transposes),
)


def pointwise_of_moves(out: Instruction) -> Instruction | None:
    """What an operand is decides what can move: most pointwise instructions have none of these."""
    kinds = {o.op for o in out.operands}
    moves = [move for kind, move in _OUTWARD if kind in kinds]
    if not moves or not equal_dims(out):
        return None
    return next((y for move in moves if (y := move(out)) is not None), None)


# an array and an order of its dimensions -> the array whose transpose it is
_Turned = dict[tuple[Instruction, Sequence[int]], Instruction | None]
_T = TypeVar("_T")
# instructions made of iotas and broadcasts that are written again in another order
MOST_TURNED = 32


def _turned(
    o: Instruction, perm: Sequence[int], dims: Sequence[Size], done: _Turned
) -> Instruction | None:
    """The array whose transpose by `perm` is `o`, where nothing large in memory has to be moved for
    it; None elsewhere. `done`: what was found already."""
    if (o, perm) in done:
        return done[o, perm]
    # counted before its operands are: a chain of residual sums is as long as the model is deep
    found = done[o, perm] = None
    if o.op == "transpose" and o["dimensions"] == perm:
        found = o.operand
    elif o.op == "broadcast" and o.operand.rank < o.rank:
        places = [perm[d] for d in o["dimensions"]]
        order = sorted(range(len(places)), key=places.__getitem__)
        found = h.broadcast(h.transpose(o.operand, order), dims, sorted(places))
    elif o.op == "iota":
        found = h.iota(o.dtype, dims, perm[o["iota_dimension"]])
    elif o.op == "scatter":
        found = _turned_scatter(o, perm, dims)
    elif o.op == "pad" and len(done) < MOST_TURNED:
        part = _turned(o.operand, perm, before(o.operand.dims, perm), done)
        found = None if part is None else h.pad(part, o.operands[1], before(o["padding"], perm))
    elif o.op == "reshape":
        found = (
            _turned_ones(o, perm, dims)
            if o.operand.op == "transpose"
            else _turned_reshape(o, perm, dims, done)
        )
    elif o.op in _POINTWISE and equal_dims(o) and len(done) < MOST_TURNED:
        parts: list[Instruction] = []
        for x in o.operands:
            part = _turned(x, perm, dims, done) if x.op != "transpose" else None
            if part is None:
                return None
            parts.append(part)
        found = _rebuilt(o, parts)
    done[o, perm] = found
    return found


def _turned_reshape(
    o: Instruction, perm: Sequence[int], dims: Sequence[Size], done: _Turned
) -> Instruction | None:
    """A reshape of what can be turned, if the dimensions that it splits or joins stay neighbours
    (groups of channels)."""
    x = o.operand
    split = groups(x.dims, o.dims)
    if split is None or any(
        not left or not right or any(perm[b] != perm[a] + 1 for a, b in zip(right, right[1:]))
        for left, right in split
    ):
        return None
    order = [d for left, _ in sorted(split, key=lambda run: perm[run[1][0]]) for d in left]
    part = _turned(
        x,
        tuple(order.index(d) for d in range(len(order))),
        [x.dims[d] for d in order],
        done,
    )
    return None if part is None else h.reshape(part, dims)


def _turned_ones(o: Instruction, perm: Sequence[int], dims: Sequence[Size]) -> Instruction | None:
    """A transpose to which dimensions of size 1 have been added, if only they are in another place
    in the turned array."""
    inner = o.operand
    x = inner.operand
    here, there = ([d for d, n in enumerate(y.dims) if n != 1] for y in (o, inner))
    if [o.dims[d] for d in here] != [inner.dims[d] for d in there]:
        return None
    order = [inner["dimensions"][there[here.index(d)]] for d in sorted(here, key=lambda d: perm[d])]
    return h.reshape(x, dims) if order == sorted(order) else None


def _turned_scatter(
    o: Instruction, perm: Sequence[int], dims: Sequence[Size]
) -> Instruction | None:
    """Elements scattered into a uniform array (the gradient of a maximum over positions), scattered
    into the turned one."""
    if (
        o.is_tuple
        or o["update_window_dims"]
        or o.operand.op != "broadcast"
        or o.operand.operand.rank
    ):
        return None
    names = (
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "input_batching_dims",
    )
    places = {name: tuple(perm[d] for d in o.get(name) or ()) for name in names}
    if list(batch := places["input_batching_dims"]) != sorted(batch):
        return None
    places["inserted_window_dims"] = tuple(sorted(places["inserted_window_dims"]))
    attrs = dict(o.attrs) | {
        name: value for name, value in places.items() if o.get(name) is not None
    }
    return instr(
        "scatter",
        (h.broadcast(o.operand.operand, dims, ()), *o.operands[1:]),
        o.shape.with_dims(tuple(dims)),
        **attrs,
    )


def before(values: Sequence[_T], perm: Sequence[int]) -> tuple[_T, ...]:
    """Values per dimension of a transpose's result, in the order of its operand's dimensions."""
    return tuple(values[perm.index(d)] for d in range(len(perm)))


def pad_of_transpose(out: Instruction) -> Instruction:
    """pad(transpose(x), v) -> transpose(pad(x, v))"""
    x, fill = out.operands
    perm = x["dimensions"]
    return h.transpose(h.pad(x.operand, fill, before(out["padding"], perm)), perm)


def wants_channels_last(out: Instruction) -> bool:
    """Whether an instruction with a window is slow when its innermost dimension is windowed:
    gradients of pooling."""
    return out.op == "select-and-scatter" or any(w.base_dilation > 1 for w in out["window"])


def window_of_transpose(out: Instruction) -> Instruction | None:
    """reduce-window(transpose(x)) -> transpose(reduce-window(x)), if the innermost dimension stays
    one for which there are kernels"""
    x, *inits = out.operands
    if len(inits) != 1:
        return None
    perm = x["dimensions"]
    window = before(out["window"], perm)
    if wants_channels_last(out) and not window[-1].is_trivial:
        return None
    return h.transpose(
        instr("reduce-window", (x.operand, *inits), window=window, to_apply=out["to_apply"]),
        perm,
    )


def gradient_of_transpose(out: Instruction) -> Instruction | None:
    """select-and-scatter(transpose(x), y) -> transpose(select-and-scatter(x, transpose(y))) when
    the innermost dimension of x is not windowed"""
    turned, source, init = out.operands
    perm = turned["dimensions"]
    window = before(out["window"], perm)
    if wants_channels_last(out) and not window[-1].is_trivial:
        return None
    inverse = [perm.index(d) for d in range(len(perm))]
    attrs = dict(out.attrs) | {"window": window}
    return h.transpose(
        instr("select-and-scatter", (turned.operand, h.transpose(source, inverse), init), **attrs),
        perm,
    )


def reverse_of_transpose(out: Instruction) -> Instruction:
    """reverse(transpose(x)) -> transpose(reverse(x))"""
    x = out.operand
    perm = x["dimensions"]
    return h.transpose(h.reverse(x.operand, sorted(perm[d] for d in out["dimensions"])), perm)


def barrier_of_transpose(out: Instruction) -> Instruction:
    """opt-barrier(transpose(x)) -> transpose(opt-barrier(x))"""
    x = out.operand
    return h.transpose(h.opt_barrier(x.operand), x["dimensions"])


def _taken(out: Instruction) -> int | None:
    """The dimension along which a gather takes whole slices at a vector of places, or None."""
    x, indices = out.operands
    at = out["start_index_map"]
    whole = [1 if d in at else n for d, n in enumerate(x.dims)]
    others = tuple(d for d in range(out.rank) if d not in at)
    if (
        len(at) != 1
        or indices.rank != 1
        or out.get("operand_batching_dims")
        or out["collapsed_slice_dims"] != at
    ):
        return None
    return (
        at[0]
        if list(out["slice_sizes"]) == whole
        and out["offset_dims"] == others
        and out["index_vector_dim"] == 1
        else None
    )


def take_of_transpose(out: Instruction) -> Instruction | None:
    """gather(transpose(x), vector) along one dimension -> transpose(gather(x, vector))"""
    turned, indices = out.operands
    perm = turned["dimensions"]
    at = _taken(out)
    if at is None:
        return None
    new = perm[at]
    attrs = dict(out.attrs) | {
        "offset_dims": tuple(d for d in range(out.rank) if d != new),
        "collapsed_slice_dims": (new,),
        "start_index_map": (new,),
        "slice_sizes": before(out["slice_sizes"], perm),
    }
    return h.transpose(instr("gather", (turned.operand, indices), **attrs), perm)


def without_ones(out: Instruction) -> Instruction | None:
    """pad(reshape(transpose(x)), v) -> reshape(pad(transpose(x), v)) where the reshape adds
    dimensions of size 1 only (an image of a batch of one); the same of reverse, of opt-barrier, of
    reduce-window and of gather along one dimension"""
    wide = out.operand
    x = wide.operand
    kept = [d for d, n in enumerate(wide.dims) if n != 1]
    if x.dims != tuple(wide.dims[d] for d in kept):
        return None
    if out.op == "opt-barrier":
        return h.reshape(h.opt_barrier(x), out.dims)
    if out.op == "reduce-window":
        idle = len(out.operands) == 2 and all(
            w.is_trivial for d, w in enumerate(out["window"]) if d not in kept
        )
        inner = (
            instr(
                "reduce-window",
                (x, out.operands[1]),
                window=tuple(out["window"][d] for d in kept),
                to_apply=out["to_apply"],
            )
            if idle
            else None
        )
        return None if inner is None else h.reshape(inner, out.dims)
    if out.op == "reverse":
        return h.reshape(
            h.reverse(x, [kept.index(d) for d in out["dimensions"] if d in kept]),
            out.dims,
        )
    if out.op == "pad":
        idle = not any(any(edges) for d, edges in enumerate(out["padding"]) if d not in kept)
        return (
            h.reshape(h.pad(x, out.operands[1], [out["padding"][d] for d in kept]), out.dims)
            if idle
            else None
        )
    at = _taken(out)
    if at not in kept:
        return None
    new = kept.index(at)
    attrs = dict(out.attrs) | {
        "offset_dims": tuple(d for d in range(len(kept)) if d != new),
        "collapsed_slice_dims": (new,),
        "start_index_map": (new,),
        "slice_sizes": tuple(out["slice_sizes"][d] for d in kept),
    }
    return h.reshape(instr("gather", (x, out.operands[1]), **attrs), out.dims)


def reshape_of_transpose(out: Instruction) -> Instruction | None:
    """reshape(transpose(x)) -> transpose(reshape(x)) when it only splits dimensions and joins
    neighbours that are neighbours in x, too"""
    turned = out.operand
    x = turned.operand
    perm = turned["dimensions"]
    split = groups(turned.dims, out.dims)
    # see transpose_ones
    if (
        split is None
        or any(not left or not right for left, right in split)
        or any(n == 1 for n in out.dims)
    ):
        return None
    if any(perm[b] != perm[a] + 1 for left, _ in split for a, b in zip(left, left[1:])):
        return None
    # Runs of x's dimensions in their own order, with the dimensions of the result that each
    # becomes.
    runs = sorted((perm[left[0]], right) for left, right in split)
    dims = [out.dims[d] for _, right in runs for d in right]
    order = [d for _, right in runs for d in right]
    return h.transpose(h.reshape(x, dims), [order.index(d) for d in range(out.rank)])


def repeat_of_transpose(out: Instruction) -> Instruction | None:
    """reshape(broadcast(transpose(x))) -> transpose(reshape(broadcast(x))) when every element is
    repeated next to itself"""
    spread = out.operand
    turned = spread.operand
    at = spread["dimensions"]
    dims = spread.dims
    perm = turned["dimensions"]
    if not at or at[0] != 0 or len(out.dims) != len(at) or list(at) != sorted(at):
        return None
    repeats = [dims[a + 1 : b] for a, b in zip(at, (*at[1:], len(dims)))]
    sizes = [dims[a] * product(r) for a, r in zip(at, repeats)]
    if tuple(sizes) != out.dims or any(dims[a] != n for a, n in zip(at, turned.dims)):
        return None
    x = turned.operand
    order = [perm.index(d) for d in range(len(perm))]
    new: list[Size] = []
    places = []
    for d, i in enumerate(order):
        places.append(len(new))
        new += [x.dims[d], *repeats[i]]
    return h.transpose(h.reshape(h.broadcast(x, new, places), [sizes[i] for i in order]), perm)


def concatenate_of_transposes(out: Instruction) -> Instruction | None:
    """concatenate(transpose(x), transpose(y), v) -> transpose(concatenate(x, y, transpose(v))) when
    the transposed ones are most of the bytes"""
    first = next((o for o in out.operands if o.op == "transpose"), None)
    if first is None or not out.is_static:
        return None
    perm = first["dimensions"]
    moved = [o for o in out.operands if o.op == "transpose" and o["dimensions"] == perm]
    if 2 * sum(fixed(o.size) for o in moved) <= fixed(out.size):
        return None
    inverse = [perm.index(d) for d in range(len(perm))]
    parts = [o.operand if o in moved else h.transpose(o, inverse) for o in out.operands]
    return h.transpose(h.concatenate(parts, perm[out["dimensions"][0]]), perm)


def concatenate_without_ones(out: Instruction) -> Instruction | None:
    """concatenate(reshape(transpose(x)), y) -> reshape(concatenate(transpose(x), reshape(y))) where
    the reshape adds dimensions of size 1 only"""
    axis = out["dimensions"][0]
    kept = [d for d, n in enumerate(out.dims) if n != 1 or d == axis]
    parts = [tuple(o.dims[d] for d in kept) for o in out.operands]
    if not any(
        o.op == "reshape" and o.operand.op == "transpose" and o.operand.dims == dims
        for o, dims in zip(out.operands, parts)
    ):
        return None
    return h.reshape(
        h.concatenate(
            [h.reshape(o, dims) for o, dims in zip(out.operands, parts)],
            kept.index(axis),
        ),
        out.dims,
    )


def reduce_of_transposes(out: Instruction) -> Instruction | None:
    """reduce(transpose(x), dims) -> transpose(reduce(x, dims before)): the kept dimensions move, if
    any. Several arrays, of which others may be written in that order (positions beside values),
    keep theirs."""
    n = len(out.operands) // 2
    first = out.operand
    if first.op != "transpose":
        return None
    perm = first["dimensions"]
    before = sorted(perm[d] for d in out["dimensions"])
    kept = [d for d in range(len(perm)) if d not in before]
    order = [kept.index(perm[d]) for d in range(len(perm)) if d not in out["dimensions"]]
    dims = first.operand.dims
    turned = all_or_none(_turned(o, perm, dims, {}) for o in out.operands[:n])
    if turned is None:
        return None
    reduced = instr(
        "reduce",
        (*turned, *out.operands[n:]),
        dimensions=tuple(before),
        to_apply=out["to_apply"],
    )
    if n == 1:
        return h.transpose(reduced, order)
    return (
        reduced
        if order == sorted(order)
        else h.tuple_(*(h.transpose(h.get_tuple_element(reduced, i), order) for i in range(n)))
    )


def reduce_of_reshapes(out: Instruction) -> Instruction | None:
    """reduce(reshape(x)) -> reshape(reduce(x)) when whole groups of dimensions are reduced"""
    if len(out.operands) != 2 or out.operand.op != "reshape":
        return None
    reshaped = out.operand
    x = reshaped.operand
    before: list[int] = []
    for left, right in groups(x.dims, reshaped.dims) or ():
        inside = [d for d in right if d in out["dimensions"]]
        others = [d for d in right if d not in inside]
        if not inside or all(reshaped.dims[d] == 1 for d in inside) and others:
            continue
        if any(reshaped.dims[d] != 1 for d in others):
            return None
        before += [d for d in left if x.dims[d] != 1]
    if not before:
        return None
    reduced = instr(
        "reduce",
        (x, out.operands[1]),
        dimensions=tuple(before),
        to_apply=out["to_apply"],
    )
    return h.reshape(reduced, out.dims)


def reduce_of_broadcast(out: Instruction) -> Instruction | None:
    """maximum over repeated dimensions (also minimum, and, or) -> the value itself"""
    first = out.operand
    if (
        len(out.operands) != 2
        or first.op != "broadcast"
        or out["to_apply"].root.op not in ("maximum", "minimum", "and", "or")
    ):
        return None
    root = out["to_apply"].root
    params = out["to_apply"].params
    idle = [d for d in out["dimensions"] if d not in first["dimensions"]]
    if (
        not idle
        or set(root.operands) != set(params)
        or any(isinstance(s, Dim) or s == 0 for s in first.dims)
    ):
        return None
    kept = [d for d in range(first.rank) if d not in idle]
    smaller = h.broadcast(
        first.operand,
        [first.dims[d] for d in kept],
        [kept.index(d) for d in first["dimensions"]],
    )
    rest = tuple(kept.index(d) for d in out["dimensions"] if d not in idle)
    return instr("reduce", (smaller, out.operands[1]), dimensions=rest, to_apply=out["to_apply"])


RULES = rules(
    (op(" ".join(POINTWISE)), pointwise_of_moves),
    (op("pad", op("transpose"), var("v")), pad_of_transpose),
    (
        op("reduce-window"),
        window_of_transpose,
        lambda out: out.operand.op == "transpose",
    ),
    (
        op("select-and-scatter", op("transpose"), var("source"), var("init")),
        gradient_of_transpose,
    ),
    (op("reverse", op("transpose")), reverse_of_transpose),
    (op("opt-barrier", op("transpose")), barrier_of_transpose),
    (op("gather", op("transpose"), var("indices")), take_of_transpose),
    (op("pad", op("reshape", op("transpose")), var("v")), without_ones),
    (op("reverse", op("reshape", op("transpose"))), without_ones),
    (op("opt-barrier", op("reshape", op("transpose"))), without_ones),
    (
        op("reduce-window", op("reshape", op("transpose")), var("init")),
        without_ones,
    ),
    (op("gather", op("reshape", op("transpose")), var("indices")), without_ones),
    (op("reshape", op("transpose")), reshape_of_transpose),
    (op("reshape", op("broadcast", op("transpose"))), repeat_of_transpose),
    (op("concatenate"), concatenate_of_transposes),
    (
        op("concatenate"),
        concatenate_without_ones,
        lambda out: 1 in out.dims,
    ),
    (op("reduce"), reduce_of_transposes),
    (op("reduce"), reduce_of_reshapes),
    (op("reduce"), reduce_of_broadcast),
)


@hlo_pass
def reshape_motion(module: Module) -> Module:
    """Move rearrangements outward. Every firing brings one closer to the root, or makes an array
    smaller."""
    return rewrite(module, RULES)
