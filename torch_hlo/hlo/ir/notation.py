"""Arithmetic notation: `x * 0.5 + 1` builds instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from . import build
from .instruction import Instruction
from .intern import instr


class Terms:
    """An instruction with operators; Python numbers take its type and sizes. `==` is not
    overloaded: use eq() and ne()."""

    __slots__ = ("x",)

    def __init__(self, x: Instruction) -> None:
        self.x = x

    def pair(self, other: Any) -> tuple[Instruction, Instruction]:
        """This and `other`, of equal type and sizes."""
        return self.x, other.x if isinstance(other, Terms) else build.full_like(self.x, other)

    def op(self, name: str) -> Self:
        return type(self)(instr(name, (self.x,)))

    def binary(self, name: str, other: Any, **attrs: Any) -> Self:
        return type(self)(instr(name, self.pair(other), **attrs))

    def compare(self, direction: str, other: Any) -> Self:
        return self.binary("compare", other, direction=direction)

    def __add__(self, other: Any) -> Self:
        return self.binary("add", other)

    def __sub__(self, other: Any) -> Self:
        return self.binary("subtract", other)

    def __mul__(self, other: Any) -> Self:
        return self.binary("multiply", other)

    def __truediv__(self, other: Any) -> Self:
        return self.binary("divide", other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Any) -> Self:
        return type(self)(instr("subtract", self.pair(other)[::-1]))

    def __rtruediv__(self, other: Any) -> Self:
        return type(self)(instr("divide", self.pair(other)[::-1]))

    def __and__(self, other: Any) -> Self:
        return self.binary("and", other)

    def __or__(self, other: Any) -> Self:
        return self.binary("or", other)

    def __xor__(self, other: Any) -> Self:
        return self.binary("xor", other)

    def __lshift__(self, other: Any) -> Self:
        return self.binary("shift-left", other)

    def __rshift__(self, other: Any) -> Self:
        """Zeros come in."""
        return self.binary("shift-right-logical", other)

    def __invert__(self) -> Self:
        return self.op("not")

    def __neg__(self) -> Self:
        return self.op("negate")

    def __lt__(self, other: Any) -> Self:
        return self.compare("LT", other)

    def __le__(self, other: Any) -> Self:
        return self.compare("LE", other)

    def __gt__(self, other: Any) -> Self:
        return self.compare("GT", other)

    def __ge__(self, other: Any) -> Self:
        return self.compare("GE", other)

    def eq(self, other: Any) -> Self:
        return self.compare("EQ", other)

    def ne(self, other: Any) -> Self:
        return self.compare("NE", other)

    def where(self, pred: Terms, other: Any) -> Self:
        """This where `pred`, else `other`."""
        return type(self)(build.select(pred.x, *self.pair(other)))

    def filled(self, value: float) -> Self:
        return type(self)(self.pair(value)[1])

    def polynomial(self, coefficients: Sequence[float]) -> Self:
        """Horner's rule, highest power first."""
        total = self.filled(coefficients[0])
        for c in coefficients[1:]:
            total = total * self + c
        return total
