"""One form of dot: no size-1 dimensions, no operand that is transposed or repeated for nothing.

    dot(transpose(x), y)            -> dot(x, y) with other dimension numbers
    dot(x, broadcast(w)) batched    -> dot(x, w): one large product instead of many with the same
        matrix
    dot(f32[1,64], f32[64,8])       -> reshape(dot(f32[64], f32[64,8]))
    dot without contraction         -> multiply(broadcast(x), broadcast(y))
    dot(convert(s8), convert(s8))   -> dot(s8, s8) with s32 sums
    dot(f32[b,64], f32[b,64])       -> reduce(multiply(x, y)) where only b is left
    ragged-dot(transpose(x), y)     -> ragged-dot(x, y) with other dimension numbers

Dimensions of the result: batch, free of lhs, free of rhs. Contracting dimensions are sorted by lhs.
The sign of a zero that a dot gives is not defined: its sum may start from either zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dims, Instruction, Module, Pairs, build as h, op, rewrite, rules

from ..hlo_pass import hlo_pass


@frozen
class Dot:
    """A dot with dimension numbers as tuples of (lhs, rhs) pairs."""

    x: Instruction
    y: Instruction
    batch: Pairs
    contract: Pairs
    dtype: str

    @property
    def lhs_free(self) -> list[int]:
        taken = {a for a, _ in (*self.batch, *self.contract)}
        return [d for d in range(self.x.rank) if d not in taken]

    @property
    def rhs_free(self) -> list[int]:
        taken = {b for _, b in (*self.batch, *self.contract)}
        return [d for d in range(self.y.rank) if d not in taken]

    def build(self) -> Instruction:
        lhs_batch, rhs_batch = zip(*self.batch) if self.batch else ((), ())
        lhs, rhs = zip(*self.contract) if self.contract else ((), ())
        return h.dot(self.x, self.y, lhs, rhs, lhs_batch, rhs_batch, self.dtype)

    def with_lhs(self, x: Instruction, new: dict[int, int]) -> Dot:
        """Another left operand; `new`: dimension of the old one -> of this one."""
        batch, contract = (
            tuple((new[a], b) for a, b in pairs if a in new)
            for pairs in (self.batch, self.contract)
        )
        return with_fields(self, x=x, batch=batch, contract=contract)

    def swapped(self) -> Dot:
        batch, contract = (tuple((b, a) for a, b in pairs) for pairs in (self.batch, self.contract))
        return with_fields(self, x=self.y, y=self.x, batch=batch, contract=contract)


def parts(out: Instruction) -> Dot:
    batch = tuple(zip(out["lhs_batch_dims"], out["rhs_batch_dims"]))
    contract = tuple(zip(out["lhs_contracting_dims"], out["rhs_contracting_dims"]))
    return Dot(out.operand, out.operands[1], batch, contract, out.dtype)


def plain(out: Instruction) -> bool:
    return out.get("operand_precision") is None


def sort_contraction(out: Instruction) -> Instruction | None:
    d = parts(out)
    return (
        with_fields(d, contract=tuple(sorted(d.contract))).build()
        if list(d.contract) != sorted(d.contract)
        else None
    )


def no_elements(out: Instruction) -> Instruction | None:
    """A sum over nothing -> 0"""
    d = parts(out)
    return h.full(0, d.dtype, out.dims) if any(d.x.dims[a] == 0 for a, _ in d.contract) else None


def drop_ones(out: Instruction) -> Instruction | None:
    """Size-1 dimensions of operands are reshaped away, and back in the result"""
    d = parts(out)
    pairs = {*d.batch, *d.contract}
    lhs_ones = [a for a in range(d.x.rank) if d.x.dims[a] == 1]
    rhs_ones = [b for b in range(d.y.rank) if d.y.dims[b] == 1]
    if not lhs_ones and not rhs_ones:
        return None
    keep_x = [a for a in range(d.x.rank) if a not in lhs_ones]
    keep_y = [b for b in range(d.y.rank) if b not in rhs_ones]
    batch = tuple(
        (keep_x.index(a), keep_y.index(b)) for a, b in d.batch if (a, b) in pairs and a in keep_x
    )
    contract = tuple((keep_x.index(a), keep_y.index(b)) for a, b in d.contract if a in keep_x)
    x = h.reshape(d.x, [d.x.dims[a] for a in keep_x])
    y = h.reshape(d.y, [d.y.dims[b] for b in keep_y])
    return h.reshape(Dot(x, y, batch, contract, d.dtype).build(), out.dims)


def outer_product(out: Instruction) -> Instruction | None:
    """A dot without contraction -> multiply of broadcasts"""
    d = parts(out)
    if d.contract or out.kind == "p":
        return None
    return _products(d, d.dtype, out.dims)


def inner_product(out: Instruction) -> Instruction | None:
    """A dot whose operands have no free dimensions -> sums of a multiply"""
    d = parts(out)
    if d.lhs_free or d.rhs_free or not d.contract or out.kind == "p":
        return None
    return sums(d, out)


def sums(d: Dot, out: Instruction) -> Instruction:
    """A dot as sums of a multiply."""
    wide = "f32" if d.dtype in ("bf16", "f16") else d.dtype
    depth = [d.x.dims[a] for a, _ in d.contract]
    # before the columns, where the right operand has it there
    first = out.rank - len(d.rhs_free)
    if not d.rhs_free or d.contract[0][1] > d.rhs_free[0]:
        first = out.rank
    terms = _products(d, wide, (*out.dims[:first], *depth, *out.dims[first:]), first)
    gone = range(first, first + len(depth))
    return h.convert(h.reduce(terms, h.full(0, wide), gone, "add"), d.dtype)


def _products(d: Dot, dtype: str, dims: Dims, first: int = 0) -> Instruction:
    """Elements of both operands multiplied, in a space with those that are summed from dimension
    `first` on."""
    summed = range(first, first + len(d.contract))
    free = [i for i in range(len(dims)) if i not in summed]
    n = len(d.batch)
    m = len(d.lhs_free)
    sides = (0, d.x, d.lhs_free, free[n : n + m]), (1, d.y, d.rhs_free, free[n + m :])
    spread = []
    for side, x, own, at in sides:
        place = dict(zip(own, at, strict=True))
        place |= {pair[side]: i for pair, i in zip(d.batch, free)}
        place |= {pair[side]: i for pair, i in zip(d.contract, summed)}
        order = sorted(range(x.rank), key=place.__getitem__)
        x = h.transpose(h.convert(x, dtype), order)
        spread.append(h.broadcast(x, dims, sorted(place.values())))
    return h.multiply(*spread)


def bytes_product(out: Instruction) -> Instruction | None:
    """A dot of bytes that were made s32 -> a dot of bytes with s32 sums"""
    d = parts(out)
    kinds = {o.operand.dtype if o.op == "convert" else None for o in (d.x, d.y)}
    if out.dtype != "s32" or kinds not in ({"s8"}, {"u8"}):
        return None
    return with_fields(d, x=d.x.operand, y=d.y.operand).build()


def fold_transpose(d: Dot) -> Dot | None:
    """dot(transpose(x), y) -> dot(x, y) unless that would reorder the result"""
    if d.x.op != "transpose":
        return None
    perm = d.x["dimensions"]
    new = d.with_lhs(d.x.operand, dict(enumerate(perm)))
    return new if [perm[a] for a in d.lhs_free] == new.lhs_free else None


def fold_broadcast(d: Dot) -> Dot | None:
    """dot(x, broadcast(w)): batch dimensions that only repeat w become free dimensions of x, when
    the result keeps its order"""
    if d.y.op != "broadcast":
        return None
    carried = d.y["dimensions"]
    idle = [i for i, (_, b) in enumerate(d.batch) if b not in carried]
    if not idle or len(carried) != d.y.rank - len(idle):
        return None
    kept = [pair for i, pair in enumerate(d.batch) if i not in idle]
    before = [a for a, _ in d.batch] + d.lhs_free
    new = with_fields(
        d,
        batch=tuple((a, carried.index(b)) for a, b in kept),
        contract=tuple((a, carried.index(b)) for a, b in d.contract),
        y=d.y.operand,
    )
    return new if [a for a, _ in new.batch] + new.lhs_free == before else None


def either_side(fold: Callable[..., Any]) -> Callable[..., Any]:
    """`fold` on the left operand of the dot, then on the right one."""

    def rule(out: Instruction) -> Instruction | None:
        d = parts(out)
        left = fold(d)
        if left is not None:
            built: Instruction = left.build()
            return built
        right = fold(d.swapped())
        return None if right is None else right.swapped().build()

    rule.__name__ = fold.__name__
    return rule


def rhs_broadcast(out: Instruction) -> Instruction | None:
    new = fold_broadcast(parts(out))
    return None if new is None else new.build()


def ragged_transpose(out: Instruction) -> Instruction | None:
    """ragged-dot(transpose(x), transpose(y)) -> ragged-dot(x, y) where each operand has one
    dimension that the result shows"""
    x, y, sizes = out.operands
    (ragged,) = out["lhs_ragged_dims"]
    if out["lhs_batch_dims"] or (x.rank, y.rank) != (
        (2, 2) if ragged in out["lhs_contracting_dims"] else (2, 3)
    ):
        return None
    if "transpose" not in (x.op, y.op):
        return None
    x, of_x = _untransposed(x)
    y, of_y = _untransposed(y)
    lhs, rhs = (
        [of[d] for d in out[f"{side}_contracting_dims"]]
        for side, of in (("lhs", of_x), ("rhs", of_y))
    )
    return h.ragged_dot(
        x,
        y,
        sizes,
        lhs_contract=lhs,
        rhs_contract=rhs,
        lhs_ragged=[of_x[ragged]],
        rhs_group=[of_y[d] for d in out["rhs_group_dims"]],
        dtype=out.dtype,
    )


def _untransposed(x: Instruction) -> tuple[Instruction, Sequence[int]]:
    """The operand of a transpose, and which of its dimensions each dimension of `x` is."""
    return (x.operand, x["dimensions"]) if x.op == "transpose" else (x, range(x.rank))


RULES = rules(
    (op("dot", where=plain), no_elements),
    (op("dot", where=plain), sort_contraction),
    (op("dot", where=plain), drop_ones),
    (op("dot", where=plain), outer_product),
    (op("dot", where=plain), inner_product),
    (op("dot", where=plain), bytes_product),
    (op("dot", where=plain), either_side(fold_transpose)),
    (op("dot", where=plain), rhs_broadcast),
    (op("ragged-dot", where=plain), ragged_transpose),
)


@hlo_pass
def dot_canon(module: Module) -> Module:
    """Bring dots into one form. Every firing removes a dimension, a transpose or a broadcast from
    an operand."""
    return rewrite(module, RULES)
