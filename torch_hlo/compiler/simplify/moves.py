"""Identities of opcodes that only move elements, part of the algebra pass.

Canonical forms: a broadcast has sorted dimensions, an operand without size-1 dimensions, and adds
at least one dimension larger than 1; a transpose moves at least one dimension of a size other than
1 (else it is a reshape); slices sit next to their source."""

from collections.abc import Sequence

from torch_hlo.hlo.ir import (
    Dim,
    Instruction,
    Ints,
    Op,
    Size,
    Var,
    build as h,
    ceildiv,
    op,
    product,
    rules,
    splat,
    var,
)

x = var("x")
y = var("y")
inner = "inner"


def groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]] | None:
    """The finest common grouping of the dimensions of a reshape: pairs of runs with equal products,
    covering both sides.

    Size-1 dimensions join the run before them (or the first one). None when sizes are zero or do
    not divide symbolically."""
    if any(d == 0 for d in (*old, *new)):
        return None
    result: list[tuple[list[int], list[int]]] = []
    a = b = 0
    while a < len(old) or b < len(new):
        left = [a] if a < len(old) else []
        right = [b] if b < len(new) else []
        p: Size = old[a] if left else 1
        q: Size = new[b] if right else 1
        a = a + len(left)
        b = b + len(right)
        while p != q:
            # Grow the smaller side; of symbolic products the one that the other is divisible by.
            if _smaller(p, q):
                if a == len(old):
                    return None
                p = p * old[a]
                left = [*left, a]
                a = a + 1
            else:
                if b == len(new):
                    return None
                q = q * new[b]
                right = [*right, b]
                b = b + 1
        while a < len(old) and old[a] == 1:
            left = [*left, a]
            a = a + 1
        while b < len(new) and new[b] == 1:
            right = [*right, b]
            b = b + 1
        result.append((left, right))
    return result


def _smaller(p: Size, q: Size) -> bool:
    if isinstance(p, int) and isinstance(q, int):
        return p < q
    if isinstance(p, int):
        return True
    if isinstance(q, int):
        return False
    return "floordiv" in str(p // q)  # q divides p: q is the smaller


# Broadcast


def broadcast_sorted(out: Instruction, x: Instruction) -> Instruction | None:
    """broadcast(x, {1,0}) -> broadcast(transpose(x), {0,1})"""
    dims = out["dimensions"]
    order = sorted(range(len(dims)), key=dims.__getitem__)
    if order == list(range(len(dims))):
        return None
    return h.broadcast(h.transpose(x, order), out.dims, sorted(dims))


def broadcast_ones(out: Instruction, x: Instruction) -> Instruction | None:
    """broadcast(f32[4,1], {0,1}) -> broadcast(reshape f32[4], {0}); broadcast that adds only size-1
    dimensions -> reshape"""
    if x.op == "constant" and not x.dims:
        return None  # the form of every uniform constant
    if all(out.dims[d] == 1 for d in range(out.rank) if d not in out["dimensions"]):
        return h.reshape(x, out.dims)
    keep = [i for i, s in enumerate(x.dims) if s != 1]
    if len(keep) == x.rank:
        return None
    return h.broadcast(
        h.reshape(x, [x.dims[i] for i in keep]),
        out.dims,
        [out["dimensions"][i] for i in keep],
    )


def broadcast_broadcast(out: Instruction, inner: Instruction, x: Instruction) -> Instruction:
    return h.broadcast(x, out.dims, [out["dimensions"][d] for d in inner["dimensions"]])


def broadcast_iota(out: Instruction, inner: Instruction) -> Instruction:
    """broadcast(iota) -> iota along the dimension it became"""
    return h.iota(out.dtype, out.dims, out["dimensions"][inner["iota_dimension"]])


def reshape_broadcast(out: Instruction, inner: Instruction, x: Instruction) -> Instruction | None:
    """reshape(broadcast(x)) -> broadcast(reshape(x)) when no group of dimensions mixes repeated
    ones with others"""
    if not x.rank:
        return h.broadcast(x, out.dims, ())
    split = groups(inner.dims, out.dims)
    if split is None:
        return None
    carried = inner["dimensions"]
    dims: list[int] = []
    for left, right in split:
        own = [d for d in left if d in carried and inner.dims[d] != 1]
        repeated = [d for d in left if d not in carried and inner.dims[d] != 1]
        if own and repeated:
            return None
        if own:
            dims += right
    return h.broadcast(h.reshape(x, [out.dims[d] for d in dims]), out.dims, dims)


def transpose_broadcast(out: Instruction, inner: Instruction, x: Instruction) -> Instruction:
    """transpose(broadcast(x)) -> broadcast(transpose(x)): the smaller array moves"""
    perm = out["dimensions"]
    return h.broadcast(x, out.dims, [perm.index(d) for d in inner["dimensions"]])


def slice_broadcast(out: Instruction, inner: Instruction, x: Instruction) -> Instruction:
    """slice(broadcast(x)) -> broadcast(slice(x))"""
    ranges = [out["slice"][d] for d in inner["dimensions"]]
    return h.broadcast(h.slice_(x, *zip(*ranges)) if ranges else x, out.dims, inner["dimensions"])


# Reshape and transpose


def reshape_iota(out: Instruction, inner: Instruction) -> Instruction | None:
    """reshape(iota) -> iota when only size-1 dimensions come and go"""
    split = groups(inner.dims, out.dims)
    size = inner.dims[inner["iota_dimension"]]
    for left, right in split or ():
        if inner["iota_dimension"] in left:
            if sum(inner.dims[d] != 1 for d in left) != 1:
                return None
            target = [d for d in right if out.dims[d] == size]
            return h.iota(out.dtype, out.dims, target[0]) if len(target) == 1 else None
    return None


def transpose_transpose(out: Instruction, inner: Instruction, x: Instruction) -> Instruction:
    return h.transpose(x, [inner["dimensions"][d] for d in out["dimensions"]])


def transpose_ones(out: Instruction, x: Instruction) -> Instruction | None:
    """Size-1 dimensions are reshaped away and back; a transpose of nothing else is a reshape"""
    moved = [d for d in out["dimensions"] if x.dims[d] != 1]
    if moved == sorted(moved):
        return h.reshape(x, out.dims)
    if len(moved) == x.rank:
        return None
    kept = sorted(moved)
    small = h.transpose(h.reshape(x, [x.dims[d] for d in kept]), [kept.index(d) for d in moved])
    return h.reshape(small, out.dims)


def transpose_iota(out: Instruction, inner: Instruction) -> Instruction:
    return h.iota(out.dtype, out.dims, out["dimensions"].index(inner["iota_dimension"]))


def transpose_slice(out: Instruction, inner: Instruction, x: Instruction) -> Instruction:
    """slice(transpose(x)) -> transpose(slice(x)): less to move"""
    perm = inner["dimensions"]
    ranges = [out["slice"][perm.index(d)] for d in range(x.rank)]
    return h.transpose(h.slice_(x, *zip(*ranges)), perm)


# Slice, pad, concatenate, reverse


def slice_slice(out: Instruction, inner: Instruction, x: Instruction) -> Instruction:
    ranges = []
    for (s, e, k), (start, _, stride) in zip(out["slice"], inner["slice"]):
        count = e - s if k == 1 else ceildiv(e - s, k)
        first = start + s * stride
        empty = isinstance(count, int) and count <= 0
        ranges.append(
            (
                first,
                first if empty else first + (count - 1) * k * stride + 1,
                k * stride,
            )
        )
    return h.slice_(x, *zip(*ranges))


def slice_reshape(out: Instruction, inner: Instruction, x: Instruction) -> Instruction | None:
    """slice(reshape(x)) -> reshape(slice(x)) when the slice is one range in every dimension of x,
    as in splitting a projection in heads"""
    ranges: list[tuple[Size, Size, Size]] = [(0, 0, 1)] * x.rank
    for left, right in groups(x.dims, inner.dims) or ():
        cut = [d for d in right if out["slice"][d] != (0, inner.dims[d], 1)]
        wide = [d for d in left if x.dims[d] != 1]
        for d in left:
            ranges[d] = (0, x.dims[d], 1)
        if not cut:
            continue
        start, limit, stride = out["slice"][cut[0]]
        outer = [d for d in right if d < cut[0] and inner.dims[d] != 1]
        if len(cut) > 1 or len(wide) != 1 or outer or stride != 1:
            return None
        step = product(inner.dims[d] for d in right if d > cut[0])
        ranges[wide[0]] = (start * step, limit * step, 1)
    if not any(limit != 0 for _, limit, _ in ranges):
        return None
    return h.reshape(h.slice_(x, *zip(*ranges)), out.dims)


def slice_iota(out: Instruction, inner: Instruction) -> Instruction | None:
    """slice(iota) -> smaller iota, plus the start"""
    start, _, stride = out["slice"][inner["iota_dimension"]]
    if stride != 1 or isinstance(start, Dim):
        return None
    small = h.iota(out.dtype, out.dims, inner["iota_dimension"])
    return (
        small
        if start == 0
        else h.add(small, h.full_like(small, start))
        if out.kind in "su"
        else None
    )


def slice_concatenate(out: Instruction, inner: Instruction) -> Instruction | None:
    """slice(concatenate(a, b, c)) -> concatenate of the operands it touches"""
    (d,) = inner["dimensions"]
    start, limit, stride = out["slice"][d]
    sizes = [o.dims[d] for o in inner.operands]
    if stride != 1 or not all(isinstance(n, int) for n in (start, limit, *sizes)):
        return None
    pieces = []
    position = 0
    for o, n in zip(inner.operands, sizes):
        low = max(start, position) - position
        high = min(limit, position + n) - position
        position += n
        if low < high:
            ranges = list(out["slice"])
            ranges[d] = (low, high, 1)
            pieces.append(h.slice_(o, *zip(*ranges)))
    # nothing is dropped: leave one slice instead of many
    whole = len(pieces) == len(inner.operands)
    return h.concatenate(pieces, d) if pieces and not whole else None


def slice_pad(
    out: Instruction, inner: Instruction, x: Instruction, y: Instruction
) -> Instruction | None:
    """slice(pad(x)) -> slice(x) inside of x, a constant outside of it"""
    ranges = []
    for (s, e, k), (low, _, interior), n in zip(out["slice"], inner["padding"], x.dims):
        if interior != 0 or any(isinstance(v, Dim) for v in (s, e, low, n)):
            return None
        if s >= low + n or e <= low:
            return h.broadcast(y, out.dims, ())
        if s < low or e > low + n:
            return None
        ranges.append((s - low, e - low, k))
    return h.slice_(x, *zip(*ranges)) if ranges else None


def pad_pad(
    out: Instruction, inner: Instruction, x: Instruction, y: Instruction
) -> Instruction | None:
    """pad(pad(x, v), v) -> pad(x, v) when nothing is cropped in between"""
    if out.operands[1] is not y or any(i != 0 for *_, i in out["padding"]):
        return None
    if any(
        isinstance(v, Dim) or v < 0 for p in (*out["padding"], *inner["padding"]) for v in p[:2]
    ):
        return None
    return h.pad(
        x,
        y,
        [(a + lo, b + hi, i) for (a, b, i), (lo, hi, _) in zip(inner["padding"], out["padding"])],
    )


def pad_crop(out: Instruction, x: Instruction) -> Instruction | None:
    """pad with negative amounts only -> slice"""
    if any(isinstance(v, Dim) or v > 0 for p in out["padding"] for v in p):
        return None
    return h.slice_(
        x,
        [-lo for lo, *_ in out["padding"]],
        [n + hi for n, (_, hi, _) in zip(x.dims, out["padding"])],
    )


def pad_splat(out: Instruction, x: Instruction, y: Instruction) -> Instruction | None:
    """pad(broadcast(v), v) -> broadcast(v)"""
    scalar = x.operand if x.op == "broadcast" else x
    return h.broadcast(y, out.dims, ()) if scalar is y else None


def concatenate_fewer(out: Instruction) -> Instruction | None:
    """Empty operands go, nested concatenates along the same dimension and adjacent slices of one
    source merge"""
    (d,) = out["dimensions"]
    parts: list[Instruction] = []
    for o in out.operands:
        if o.dims[d] == 0:
            continue
        for part in o.operands if o.op == "concatenate" and o["dimensions"] == (d,) else (o,):
            joined = _joined(parts[-1], part, d) if parts else None
            if joined is not None:
                parts[-1] = joined
            else:
                parts.append(part)
    if not parts:
        return out.operand
    return None if len(parts) == len(out.operands) > 1 else h.concatenate(parts, d)


def _joined(a: Instruction, b: Instruction, d: int) -> Instruction | None:
    """concatenate(a, b) as one slice or one broadcast of a scalar."""
    if a.op == b.op == "slice" and a.operands == b.operands:
        ranges = list(a["slice"])
        s, e, k = a["slice"][d]
        s2, e2, k2 = b["slice"][d]
        rest = [r for i, r in enumerate(ranges) if i != d] == [
            r for i, r in enumerate(b["slice"]) if i != d
        ]
        if rest and k == k2 == 1 and e == s2:
            ranges[d] = (s, e2, 1)
            return h.slice_(a.operand, *zip(*ranges))
    if (
        a.op == b.op == "broadcast"
        and a.operands == b.operands
        and a["dimensions"] == b["dimensions"]
        and d not in a["dimensions"]
    ):
        dims = list(a.dims)
        dims[d] += b.dims[d]
        return h.broadcast(a.operand, dims, a["dimensions"])
    return None


def reverse_ones(out: Instruction, x: Instruction) -> Instruction | None:
    """Dimensions of size 1, and repeated ones of a broadcast, need no reversal"""
    fixed = [d for d in range(x.rank) if x.op == "broadcast" and d not in x["dimensions"]]
    dims = [d for d in out["dimensions"] if x.dims[d] != 1 and d not in fixed]
    return h.reverse(x, dims) if len(dims) < len(out["dimensions"]) else None


def reverse_reverse(out: Instruction, inner: Instruction, x: Instruction) -> Instruction:
    return h.reverse(x, sorted(set(out["dimensions"]) ^ set(inner["dimensions"])))


# Dynamic indices


def dynamic_slice_constant(out: Instruction) -> Instruction | None:
    """dynamic-slice at constants, or of everything -> slice (starts are clamped)"""
    source, *starts = out.operands
    sizes = out["dynamic_slice_sizes"]
    if sizes == source.dims:
        return source
    first = _constant_starts(source, starts, sizes)
    return h.slice_(source, first, [a + n for a, n in zip(first, sizes)]) if first else None


def _constant_starts(
    source: Instruction, starts: Sequence[Instruction], sizes: Ints
) -> list[int] | None:
    """Where a part of these sizes begins, if that is known."""
    if not source.is_static:
        return None
    first = []
    for s, n, full in zip(starts, sizes, source.shape.sizes):
        value = 0 if n == full else splat(s)
        if not isinstance(value, int):
            return None
        first.append(min(max(value, 0), full - n))
    return first


def update_everything(out: Instruction) -> Instruction | None:
    """dynamic-update-slice of the whole array -> the update; of nothing -> the array"""
    source, update = out.operands[:2]
    if any(n == 0 for n in update.dims):
        return source
    return update if update.shape == source.shape else None


def update_filled(out: Instruction) -> Instruction | None:
    """dynamic-update-slice(broadcast(v), u, constants) -> pad(u, v)"""
    source, update, *starts = out.operands
    if source.op != "broadcast" or source.operand.rank or not update.is_static:
        return None
    first = _constant_starts(source, starts, update.shape.sizes)
    sizes = zip(first or (), update.dims, source.dims)
    padding = [(a, full - n - a, 0) for a, n, full in sizes]
    return h.pad(update, source.operand, padding) if padding else None


def slice_of_update(out: Instruction) -> Instruction | None:
    """dynamic-slice(dynamic-update-slice(x, u, i), i) of the same size -> u"""
    inner = out.operand
    if inner.op != "dynamic-update-slice":
        return None
    same = out.operands[1:] == inner.operands[2:] and out.shape == inner.operands[1].shape
    return inner.operands[1] if same else None


def after(outer: str, first: str, *operands: Var) -> Op:
    """The opcode `outer` on the value, named inner, of the opcode `first`."""
    return op(outer, op(first, *operands, name="inner"))


MOVES = rules(
    # Broadcasts absorb what follows them
    (op("broadcast", x), broadcast_sorted),
    (op("broadcast", x), broadcast_ones),
    # broadcast(broadcast(x)) -> broadcast(x)
    (after("broadcast", "broadcast", x), broadcast_broadcast),
    (after("broadcast", "iota"), broadcast_iota),
    (after("reshape", "broadcast", x), reshape_broadcast),
    (after("transpose", "broadcast", x), transpose_broadcast),
    (after("slice", "broadcast", x), slice_broadcast),
    (after("convert", "broadcast", x),
     lambda out, inner, x:
     h.broadcast(h.convert(x, out.dtype), out.dims, inner["dimensions"])),
    # Reshapes and transposes
    # reshape(reshape(x)) -> reshape(x)
    (op("reshape", op("reshape", x)), lambda out, x: h.reshape(x, out.dims)),
    (op("reshape", x, where=lambda x: x.shape == x.operand.shape), lambda x: x),
    (after("reshape", "iota"), reshape_iota),
    (op("reshape", op("constant", name=inner, where=lambda x: not x.dims)),
     lambda out, inner: h.broadcast(inner, out.dims, ())),
    # T(T(x)) -> T(x)
    (after("transpose", "transpose", x), transpose_transpose),
    (op("transpose", x), transpose_ones),
    (after("transpose", "iota"), transpose_iota),
    # Slices move towards their source
    (op("slice", x, where=lambda x: x.dims == x.operand.dims and x.is_static),
     lambda x: x),
    # slice(slice(x)) -> slice(x)
    (after("slice", "slice", x), slice_slice),
    (after("slice", "transpose", x), transpose_slice),
    (after("slice", "reshape", x), slice_reshape),
    (after("slice", "iota"), slice_iota),
    (after("slice", "concatenate"), slice_concatenate),
    (after("slice", "pad", x, y), slice_pad),
    (op("pad", op("pad", x, y, name=inner), var("v")), pad_pad),
    (op("pad", x, y, where=lambda x: not any(any(v != 0 for v in p) for p in x["padding"])),
     lambda x: x),
    (op("pad", x, y), pad_crop),
    (op("pad", x, y), pad_splat),
    (op("concatenate"), concatenate_fewer),
    (op("reverse", x), reverse_ones),
    # reverse(reverse(x)) -> x
    (after("reverse", "reverse", x), reverse_reverse),
    # Iota of one element, dynamic indices
    (op("iota", where=lambda x: x.dims[x["iota_dimension"]] == 1),
     lambda out: h.full(0, out.dtype, out.dims)),
    (op("dynamic-slice"), dynamic_slice_constant),
    (op("dynamic-slice"), slice_of_update),
    (op("dynamic-update-slice"), update_everything),
    (op("dynamic-update-slice"), update_filled),
)  # fmt: skip
