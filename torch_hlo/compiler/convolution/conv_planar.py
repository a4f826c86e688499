"""conv_planar: what conv_layout gave channels last goes back to channels first where nothing around
it wants them last, and a kernel reads them first.

    transpose(f(convolution(transpose(x), k)))  ->  f(convolution(x, k)), dim_labels=bf01_oi01->bf01
        channels filtered on their own
    transpose(f(dot(transpose(x), w)))          ->  f(dot(broadcast(w), x)), a product per image
        windows of one element

In networks such transposes have met and cancelled before; those that stay are of a layer alone, or
of the first and the last one.
"""

from __future__ import annotations

from torch_hlo.hlo.ir import (
    POINTWISE,
    Computation,
    Instruction,
    Ints,
    Module,
    Users,
    build as h,
    instr,
    postorder,
    rewrite_bottom_up,
    users,
)

from ..conv_forms import is_planar, sides
from ..hlo_pass import fixpoint, hlo_pass, over_computations
from ..matmul.dot_canon import plain
from ..simplify.algebra import algebra
from ..simplify.reshape_motion import reshape_motion
from ..thresholds import COPIED

_POINTWISE = frozenset(POINTWISE)


def _to_last(rank: int) -> Ints:
    return (0, *range(2, rank), 1)


def _to_first(rank: int) -> Ints:
    return (0, rank - 1, *range(1, rank - 1))


def _only_turned(
    x: Instruction,
    reads: Users,
    done: dict[Instruction, bool],
) -> bool:
    """Whether what is computed from `x`, element by element, is only read with its channels first.
    A matrix of pixels and features may become an array before."""
    if x not in done:
        done[x] = False

        def turned(y: Instruction) -> bool:
            if y.op == "transpose":
                rank = y.rank
                return y["dimensions"] in (
                    _to_first(rank),
                    (rank - 1, *range(rank - 1)),
                )
            alike = (
                y.op in _POINTWISE
                and y.dims == x.dims
                or y.op == "reshape"
                and x.rank == 2
                and y.dims[-1] == x.dims[-1]
            )
            return alike and _only_turned(y, reads, done)

        done[x] = bool(reads[x]) and all(map(turned, reads[x]))
    return done[x]


def filtered_planes(x: Instruction) -> Instruction | None:
    """convolution(transpose(x), k) -> transpose(convolution(x, k)) of channels on their own"""
    turned, kernel = x.operands
    lhs, rhs, out = sides(x)
    digits = lhs[1:-1]
    if (
        turned.op != "transpose"
        or turned["dimensions"] != _to_last(turned.rank)
        or lhs != out
        or lhs != f"b{digits}f"
        or not digits
    ):
        return None
    oihw = h.transpose(kernel, [rhs.index(c) for c in f"oi{digits}"])
    dims = tuple(x.dims[d] for d in _to_first(x.rank))
    attrs = dict(x.attrs) | {"dim_labels": f"bf{digits}_oi{digits}->bf{digits}"}
    found = instr("convolution", (turned.operand, oihw), x.shape.with_dims(dims), **attrs)
    return h.transpose(found, _to_last(x.rank)) if is_planar(found) else None


def product_of_images(x: Instruction) -> Instruction | None:
    """dot(pixels, w) -> transpose(dot(w, image)), pixels being the transposed image; of several
    images, which are pixels of a transposed array, a batch of products with as many copies of w, if
    those are small"""
    pixels, w = x.operands
    if (
        x["lhs_batch_dims"]
        or x.rank != 2
        or w.rank != 2
        or not x.is_static
        or x.kind != "f"
        or not plain(x)
    ):
        return None
    (a,) = x["lhs_contracting_dims"]
    (b,) = x["rhs_contracting_dims"]
    if a == 0:
        return h.transpose(h.dot(w, pixels, (b,), (0,), dtype=x.dtype), (1, 0))
    image = pixels.operand if pixels.op == "reshape" else pixels
    if (
        image.op != "transpose"
        or image["dimensions"] != _to_last(image.rank)
        or image.rank < 3
        or pixels.dims[1] != image.dims[-1]
    ):
        return None
    features = w.dims[1 - b]
    channels = w.dims[b]
    count = image.dims[0]
    each = x.dims[0] // count
    if COPIED * features * channels > (features + channels) * each:
        return None
    rows = h.broadcast(w if b == 1 else h.transpose(w, (1, 0)), (count, features, channels), (1, 2))
    found = h.dot(
        rows,
        h.reshape(image.operand, (count, channels, each)),
        (2,),
        (1,),
        (0,),
        (0,),
        dtype=x.dtype,
    )
    return h.reshape(h.transpose(found, (0, 2, 1)), x.dims)


RULES = {"convolution": filtered_planes, "dot": product_of_images}


def _is_alone(
    x: Instruction,
    reads: Users,
    done: dict[Instruction, bool],
) -> bool:
    """Whether nothing but `x` reads the transposed operand, and the result is only read
    transposed."""
    lhs = x.operand
    own = all(
        len(set(reads[o])) == 1
        for o in (lhs, *lhs.operands[: lhs.op == "reshape"])
        if o.op in ("transpose", "reshape")
    )
    return own and _only_turned(x, reads, done)


def _planar(c: Computation) -> Computation:
    order = postorder((c.root,))
    if not any(x.op in RULES for x in order) or not any(x.op == "transpose" for x in order):
        return c
    reads = users((c.root,))
    done: dict[Instruction, bool] = {}
    found = {
        x: y
        for x in reads
        if x.op in RULES and _is_alone(x, reads, done) and (y := RULES[x.op](x)) is not None
    }
    if not found:
        return c
    return Computation(c.name, c.params, rewrite_bottom_up(c.root, lambda x: found.get(x, x)))


@hlo_pass
def conv_planar(module: Module) -> Module:
    """Layers alone keep their channels first."""
    new = over_computations(module, _planar)
    return module if new is module else _motion.run(new)


_motion = fixpoint(algebra, reshape_motion)
