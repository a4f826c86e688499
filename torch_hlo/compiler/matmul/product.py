"""Products as matrices: a dot with any dimensions as [batch…, m, k] times [batch…, n, k], both with
two strides; and what is rewritten first.

    p = product(x)            # Product, or None when an operand must be transposed first
    y = rewritten(x)          # instructions that have kernels, where the dot has none; None where
                              # it has

Dimensions that do not merge into one stride become batch dimensions when that costs nothing, else
the operand is transposed. Complex products, f8 and 4-bit types are rewritten to HLO on types that
have kernels.
"""

import math
from dataclasses import replace as with_fields
from operator import itemgetter

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Dim,
    Instruction,
    Ints,
    Size,
    build,
    fixed,
    instr,
    replace,
    row_major_strides,
)

from ..codegen import CodegenError
from .tile import Source

# The upper half of a float. (LLVM's own bfloat needs library functions on machines without
# AVX512-BF16.)
_BF16 = (
    "zext {s} {v} to {i}",
    "shl {i} {v}, splat (i32 16)",
    "bitcast {i} {v} to {f}",
)
SOURCES: dict[tuple[str, str], Source] = {
    ("f32", "float"): Source("f32", "float"),
    ("f64", "double"): Source("f64", "double"),
    ("f32", "double"): Source("f32", "float", ("fpext {s} {v} to {d}",)),
    ("f64", "float"): Source("f64", "double", ("fptrunc {s} {v} to {d}",)),
    ("bf16", "float"): Source("bf16", "i16", _BF16),
    ("f16", "float"): Source("f16", "half", ("fpext {s} {v} to {d}",)),
    ("bf16", "double"): Source("bf16", "i16", (*_BF16, "fpext {f} {v} to {d}")),
    ("f16", "double"): Source("f16", "half", ("fpext {s} {v} to {d}",)),
}
for _to in ("float", "double"):
    SOURCES["s8", _to] = Source("s8", "i8", ("sitofp {s} {v} to {d}",))
    SOURCES["u8", _to] = Source("u8", "i8", ("uitofp {s} {v} to {d}",))
for _bits in (8, 16, 32, 64):
    for _kind, _sign, _extend in (("s", "s", "sext"), ("u", "u", "zext")):
        for _to, _width in (("i32", 32), ("i64", 64)):
            _step = (
                ()
                if _bits == _width
                else (f"{_extend if _bits < _width else 'trunc'} {{s}} {{v}} to {{d}}",)
            )
            SOURCES[f"{_sign}{_bits}", _to] = Source(f"{_sign}{_bits}", f"i{_bits}", _step)
for _to in ("i32", "i64"):
    SOURCES["pred", _to] = Source("pred", "i8", ("zext {s} {v} to {d}",))

# Result type -> (accumulator, HLO type of an array of accumulators)
ACCUMULATORS = {
    "f32": ("float", "f32"),
    "bf16": ("float", "f32"),
    "f16": ("float", "f32"),
    "f64": ("double", "f64"),
    "s64": ("i64", "s64"),
    "u64": ("i64", "u64"),
    "pred": ("i32", "s32"),
    **{f"{s}{b}": ("i32", f"{s}32") for s in "su" for b in (8, 16, 32)},
}


@frozen
class Product:
    """C[batch, m, n] = sum_k A[batch, m, k] B[batch, k, n]; strides in elements, C dense with `c_m`
    between rows.

    `batch`: (size, stride of A, stride of B, stride of C) per batch dimension, outermost first.
    """

    m: Size
    n: Size
    k: Size
    a: tuple[Size, Size]  # strides along (m, k)
    b: tuple[Size, Size]  # strides along (n, k)
    c_m: Size
    batch: tuple[tuple[Size, Size, Size, Size], ...]

    @property
    def count(self) -> Size:
        """Products in the batch."""
        return math.prod(size for size, *_ in self.batch)


def hint(size: Size, usual: int) -> int:
    return size if isinstance(size, int) else usual


def types_of(x: Instruction) -> tuple[str, str]:
    """Element types of the operands."""
    a, b = x.operands
    return a.dtype, b.dtype


def merged(dims: list[tuple[Size, Size]]) -> tuple[Size, Size] | None:
    """One (size, stride) for several nested dimensions, or None. Sizes of 1 are ignored."""
    dims = [d for d in dims if d[0] != 1]
    if not dims:
        return (1, 1)
    size, stride = dims[-1]
    for n, s in reversed(dims[:-1]):
        if s != size * stride:
            return None
        size = n * size
    return size, dims[-1][1]


def _contracted(
    pairs: list[tuple[Size, Size, Size]],
) -> tuple[Size, Size, Size] | None:
    """One (size, stride of A, stride of B) for the contracting dimensions in any order, or None."""
    # Outermost first as A has them; the order is free, but must be the same on both sides.
    pairs = sorted(
        (p for p in pairs if p[0] != 1),
        key=lambda p: -p[1] if isinstance(p[1], int) else float("-inf"),
    )
    a = merged([(n, s) for n, s, _ in pairs])
    b = merged([(n, s) for n, _, s in pairs])
    return None if a is None or b is None else (a[0], a[1], b[1])


def product(x: Instruction) -> Product | None:
    """The strided form of a dot, or None when an operand must be transposed first."""
    lhs = x.operand
    result = row_major_strides(x.dims)
    strides = [row_major_strides(o.dims) for o in x.operands]
    batch_dims, contract_dims, free_dims = roles(x)
    batch = [
        (lhs.dims[i], strides[0][i], strides[1][j], result[p])
        for p, (i, j) in enumerate(zip(*batch_dims, strict=True))
    ]
    k = _contracted(
        [(lhs.dims[i], strides[0][i], strides[1][j]) for i, j in zip(*contract_dims, strict=True)]
    )
    if k is None:
        return None
    free = [
        [(o.dims[d], s[d]) for d in dims]
        for o, s, dims in zip(x.operands, strides, free_dims, strict=True)
    ]
    at = len(batch)
    # Outer dimensions of the left operand that do not merge with the inner ones become batch
    # dimensions.
    rows = free[0]
    split = next(i for i in range(len(rows) + 1) if merged(rows[i:]) is not None)
    m = merged(rows[split:])
    assert m is not None
    if split and (isinstance(m[0], Dim) or m[0] < 32):
        return None
    batch += [(n, s, 0, result[at + i]) for i, (n, s) in enumerate(rows[:split])]
    n = merged(free[1])
    if n is None:
        return None
    c_m = n[0]
    return Product(m[0], n[0], k[0], (m[1], k[1]), (n[1], k[2]), c_m, _merge_batch(batch))


def the_product(x: Instruction) -> Product:
    """The product that a dot is, where it is known to be one."""
    found = product(x)
    assert found is not None
    return found


def roles(
    x: Instruction,
) -> tuple[list[Ints], list[Ints], list[list[int]]]:
    """([lhs batch, rhs batch], [lhs contracting, …], [lhs free, …]) dimension numbers of a dot."""
    batch = [tuple(x.get(f"{side}_batch_dims", ())) for side in ("lhs", "rhs")]
    contract = [tuple(x.get(f"{side}_contracting_dims", ())) for side in ("lhs", "rhs")]
    free = [
        [d for d in range(o.rank) if d not in b and d not in c]
        for o, b, c in zip(x.operands, batch, contract, strict=True)
    ]
    return batch, contract, free


def _merge_batch(
    batch: list[tuple[Size, Size, Size, Size]],
) -> tuple[tuple[Size, Size, Size, Size], ...]:
    kept: list[tuple[Size, Size, Size, Size]] = []
    for d in batch:
        if d[0] == 1:
            continue
        if kept and all(
            outer == d[0] * inner for outer, inner in zip(kept[-1][1:], d[1:], strict=True)
        ):
            kept[-1] = (kept[-1][0] * d[0], *d[1:])
        else:
            kept.append(d)
    return tuple(kept)


def canonical(x: Instruction) -> Instruction:
    """The same dot with one operand transposed, or both when that is not enough, so that `product`
    takes it."""
    batch, contract, free = roles(x)
    sizes = [float(fixed(o.nbytes)) if o.is_static else float("inf") for o in x.operands]
    pairs = list(zip(*contract, strict=True))
    for sides in sorted(([0], [1]), key=lambda s: sizes[s[0]]) + [[0, 1]]:
        # The contracting dimensions go in the order in which the operand that stays has them.
        stays = 0 if sides == [1] else 1
        ordered = list(zip(*sorted(pairs, key=itemgetter(stays)), strict=True)) or [
            (),
            (),
        ]
        found = _with_transposed(x, sides, batch, ordered, free)
        if product(found) is not None:
            return found
    raise CodegenError(
        f"dot({x.operand.shape}, {x.operands[1].shape}) -> {x.shape}: no form with two strides"
        " per operand"
    )


def _with_transposed(
    x: Instruction,
    sides: list[int],
    batch: list[Ints],
    contract: list[Ints],
    free: list[list[int]],
) -> Instruction:
    """The dot with the operands in `sides` transposed: the left to [batch, free, contracting], the
    right to [batch, contracting, free]."""
    operands = list(x.operands)
    attrs = {}
    for side, name in enumerate(("lhs", "rhs")):
        groups = [batch[side], contract[side]]
        if side in sides:
            order = (
                (*batch[side], *free[side], *contract[side])
                if side == 0
                else (*batch[side], *contract[side], *free[side])
            )
            operands[side] = build.transpose(operands[side], order)
            groups = [tuple(order.index(d) for d in g) for g in groups]
        attrs[f"{name}_batch_dims"], attrs[f"{name}_contracting_dims"] = groups
    return instr("dot", operands, x.shape, **attrs)


def swapped(p: Product) -> Product:
    """The operands in the other order. (C is not turned: `c_m` is then the distance of its
    columns.)"""
    return with_fields(
        p,
        m=p.n,
        n=p.m,
        a=p.b,
        b=p.a,
        batch=tuple((size, b, a, c) for size, a, b, c in p.batch),
    )


def retyped(x: Instruction, dtype: str, operands: list[Instruction]) -> Instruction:
    return replace(x, operands, x.shape.with_dtype(dtype))


def in_real_parts(x: Instruction) -> Instruction:
    """A complex product as four real ones."""
    real = {"c64": "f32", "c128": "f64"}[x.dtype]
    wanted = [o if o.dtype == x.dtype else build.convert(o, x.dtype) for o in x.operands]
    (ar, ai), (br, bi) = ((build.real(o), build.imag(o)) for o in wanted)

    def part(a: Instruction, b: Instruction) -> Instruction:
        return retyped(x, real, [a, b])

    return build.complex_(
        build.subtract(part(ar, br), part(ai, bi)),
        build.add(part(ar, bi), part(ai, br)),
    )


def rewritten(x: Instruction) -> Instruction | None:
    """A dot that no kernel takes, as instructions that have kernels; None when one does."""
    dtype = x.dtype
    if x.size == 0:
        return None
    if product(x) is None:
        return canonical(x)
    if x.kind == "c":
        return in_real_parts(x)
    if dtype not in ACCUMULATORS:
        return build.convert(retyped(x, "f32" if x.kind == "f" else "s32", list(x.operands)), dtype)
    kind, wide = ACCUMULATORS[dtype]
    if any((o.dtype, kind) not in SOURCES for o in x.operands):
        return retyped(
            x,
            dtype,
            [o if (o.dtype, kind) in SOURCES else build.convert(o, wide) for o in x.operands],
        )
    return build.full(0, x.dtype, x.dims) if the_product(x).k == 0 else None
