"""Arithmetic notation for lowerings: `(x * 0.5 * (1 + erf(x * M_SQRT1_2)))` builds instructions.

An `Expr` holds one Instruction. The other side of an operator may be an Expr of equal dims and
dtype, or a number (of Python, or Weak), which takes the dtype and dims of the Expr. A rank-0 Expr
is broadcast.
Nothing here promotes: see promote.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeGuard

from torch_hlo.hlo.ir import Dim, Dims, Instruction, Size, build, instr
from torch_hlo.hlo.ir.notation import Terms

from . import promote, shaping
from .registry import Weak

Term: TypeAlias = "Expr | promote.Scalar"


class Expr(Terms):
    __slots__ = ()

    @property
    def dtype(self) -> str:
        return self.x.dtype

    @property
    def kind(self) -> str:
        return self.x.kind

    @property
    def dims(self) -> Dims:
        return self.x.dims

    @property
    def rank(self) -> int:
        return self.x.rank

    def like(self, value: Expr | promote.Operand) -> Expr:
        """`value` as an Expr of the dtype and dims of this one (an Expr keeps its dtype)."""
        if isinstance(value, Expr):
            return value.broadcast(self.dims)
        return Expr(promote.operand(value, self.dtype, self.dims))

    def broadcast(self, dims: Sequence[Size]) -> Expr:
        """Repeated over `dims`, which end with these ones."""
        return Expr(promote.broadcast_to(self.x, dims))

    def spread(self, dims: Sequence[Size]) -> Expr:
        """Repeated over `dims`, which begin with these ones."""
        return Expr(build.broadcast(self.x, dims, range(self.rank)))

    def reshape(self, dims: Sequence[Size]) -> Expr:
        return Expr(promote.reshape(self.x, dims))

    def add_dim(self, dim: int) -> Expr:
        return Expr(shaping.add_dim(self.x, dim))

    def pair(self, other: Term) -> tuple[Instruction, Instruction]:
        a, b = _pair(self, other)
        return a.x, b.x

    def cast(self, dtype: str) -> Expr:
        return Expr(promote.cast(self.x, dtype))

    def __repr__(self) -> str:
        return f"Expr({self.x.op} {self.x.shape})"


def _pair(a: Term, b: Term) -> tuple[Expr, Expr]:
    if isinstance(a, Expr):
        if not isinstance(b, Expr):
            return a, a.like(b)
        if a.dims == b.dims:
            return a, b
        return (a, a.like(b)) if a.dims else (b.like(a), b)
    if not isinstance(b, Expr):
        raise TypeError("one side must be an Expr")
    return b.like(a), b


def bare(x: Expr | Instruction) -> Instruction:
    return x.x if isinstance(x, Expr) else x


def scalar(value: promote.Operand, dtype: str) -> Expr:
    """A number, or an array of one element, as a rank-0 Expr of `dtype`."""
    return Expr(promote.scalar(value, dtype))


def binary(op: str, a: Term, b: Term, **attrs: str) -> Expr:
    a, b = _pair(a, b)
    return Expr(instr(op, (a.x, b.x), **attrs))


def compare(direction: str, a: Term, b: Term) -> Expr:
    return binary("compare", a, b, direction=direction)


def where(condition: Expr, a: Term, b: Term) -> Expr:
    """Select by a pred; at least one of `a`, `b` is an Expr."""
    a, b = _pair(a, b)
    if not a.dims and condition.dims:
        a = condition.like(a)
        b = condition.like(b)
    return Expr(
        instr(
            "select",
            (
                condition.x if condition.dims == a.dims else a.like(condition).x,
                a.x,
                b.x,
            ),
        )
    )


maximum = partial(binary, "maximum")  # nan if either is nan
minimum = partial(binary, "minimum")
power = partial(binary, "power")
atan2 = partial(binary, "atan2")


def _named(op: str) -> Callable[[Expr], Expr]:
    def function(x: Expr) -> Expr:
        return x.op(op)

    function.__name__ = op.replace("-", "_")
    return function


exp = _named("exponential")
expm1 = _named("exponential-minus-one")
log = _named("log")
log1p = _named("log-plus-one")
sqrt = _named("sqrt")
rsqrt = _named("rsqrt")
sin = _named("sine")
cos = _named("cosine")
tan = _named("tan")
tanh = _named("tanh")
logistic = _named("logistic")
erf = _named("erf")
erf_inv = _named("erf-inv")
erfc = _named("erfc")
floor = _named("floor")
ceil = _named("ceil")
round_even = _named("round-nearest-even")
absolute = _named("abs")
is_finite = _named("is-finite")
real = _named("real")
imag = _named("imag")


def is_nan(x: Expr) -> Expr:
    return x.ne(x)


def square(x: Expr) -> Expr:
    return x * x


def trunc(x: Expr) -> Expr:
    return where(x < 0, ceil(x), floor(x))


def wrap(x: object) -> object:
    """Instructions and Weaks become Expr, everything else stays."""
    if isinstance(x, Instruction):
        return Expr(x)
    if isinstance(x, Weak):
        return Expr(x.value)
    return x


def iota(dims: Sequence[Size], dim: int, dtype: str = "s64") -> Expr:
    """Index along `dim`."""
    return Expr(shaping.iota(dims, dim, dtype))


def is_number(x: object) -> TypeGuard[bool | int | float | complex | Dim]:
    return isinstance(x, (bool, int, float, complex, Dim))


def bitcast(x: Expr, dtype: str) -> Expr:
    """The same bits as another type of the same width."""
    return Expr(instr("bitcast-convert", (x.x,), x.x.shape.with_dtype(dtype)))
