"""Rules of CHLO, the client dialect that JAX emits for functions StableHLO lacks: implicit
broadcasting and special functions."""

import math
from collections.abc import Callable
from functools import partial

from ..ir import OPCODES, Instruction, Size, build as b, instr
from . import special
from .attributes import Dense, dense_literal
from .converter import RULES, Context, Made, rule
from .ops import broadcast_in_dim, compared, dimension_numbers

_SPECIAL: dict[str, Callable[..., Instruction]] = {
    "chlo.lgamma": special.lgamma,
    "chlo.digamma": special.digamma,
    "chlo.bessel_i1e": special.bessel_i1e,
    "chlo.zeta": special.zeta,
    "chlo.polygamma": special.polygamma,
    "chlo.mulhi": special.mulhi,
    "chlo.atan": lambda x: b.atan2(x, b.full_like(x, 1)),
    "chlo.square": lambda x: b.multiply(x, x),
    "chlo.conj": lambda x: b.complex_(b.real(x), b.negate(b.imag(x))) if x.kind == "c" else x,
    "chlo.is_inf": lambda x: b.compare(b.abs_(x), b.full_like(x, math.inf), "EQ"),
    "chlo.is_pos_inf": lambda x: b.compare(x, b.full_like(x, math.inf), "EQ"),
    "chlo.is_neg_inf": lambda x: b.compare(x, b.full_like(x, -math.inf), "EQ"),
}
for _name, _fn in _SPECIAL.items():
    RULES[_name] = partial(lambda fn, c: fn(*c.x), _fn)


RULES["chlo.constant"] = RULES["constant"]


@rule("chlo.constant_like")
def _constant_like(c: Context) -> Made:
    value = c.attr("value")
    if isinstance(value, Dense):
        value = dense_literal(c.converter.s, value)[0].numpy().item()
    return b.full_like(c.x[0], value)


@rule("chlo.top_k", "topk", "chlo.topk")
def _top_k(c: Context) -> Made:
    x = b.topk(c.x[0], c.integer("k"), bool(c.attr("largest", default=True)))
    return [b.get_tuple_element(x, 0), b.get_tuple_element(x, 1)]


def _broadcast_pair(c: Context, x: Instruction, y: Instruction) -> tuple[Instruction, Instruction]:
    """Equal sizes by NumPy's rule; `broadcast_dimensions` places the smaller operand."""
    small, large = (x, y) if x.rank <= y.rank else (y, x)
    rank = large.rank
    places = c.ints("broadcast_dimensions", default=range(rank - small.rank, rank))
    aligned: list[Size] = [1] * rank
    for d, n in zip(places, small.dims, strict=True):
        aligned[d] = n
    dims = [n if m == 1 else m for n, m in zip(aligned, large.dims)]
    grown = (
        broadcast_in_dim(small, dims, places),
        broadcast_in_dim(large, dims, range(rank)),
    )
    return grown if small is x and x.rank <= y.rank else grown[::-1]


def _broadcasting(name: str, c: Context) -> Instruction:
    x, y = _broadcast_pair(c, *c.x)
    if name == "compare":
        return compared(c, x, y)
    opcode = name.replace("_", "-")
    return instr(opcode, (x, y)) if opcode in OPCODES else _SPECIAL["chlo." + name](x, y)


_PAIRS = [
    name.replace("-", "_") for name, row in OPCODES.items() if row.spelling and row.arity == 2
]
for _name in (*_PAIRS, "zeta", "polygamma"):
    RULES["chlo.broadcast_" + _name] = partial(_broadcasting, _name)


@rule("chlo.broadcast_select")
def _broadcast_select(c: Context) -> Made:
    pred, x, y = c.x
    x, y = _broadcast_pair(c, x, y)
    pred, x = _broadcast_pair(c, pred, x)
    return b.select(pred, x, _broadcast_pair(c, y, x)[0])


@rule("chlo.ragged_dot")
def _ragged_dot(c: Context) -> Made:
    n = dimension_numbers(c, "ragged_dot_dimension_numbers")
    dims = {name.removesuffix("ing"): n.get(f"{name}_dimensions", ()) for name in RAGGED}
    return b.ragged_dot(*c.x, dtype=c.dtype, **dims)


RAGGED = "lhs_contracting rhs_contracting lhs_batching rhs_batching lhs_ragged rhs_group".split()
