"""Arithmetic on 32-bit integers for kernels: thread numbers, addresses of shared memory. Two Python
ints are computed in Python."""

import operator
from collections.abc import Callable

from ..llvm import Function, Int


class Words:
    """i32 operations that append to `f`; all numbers are seen as non-negative but in `minus` and
    comparisons."""

    def __init__(self, f: Function) -> None:
        self.f = f

    def _op(
        self,
        name: str,
        fold: Callable[[int, int], int],
        a: Int,
        b: Int,
    ) -> Int:
        return (
            fold(a, b)
            if isinstance(a, int) and isinstance(b, int)
            else self.f.op(f"{name} i32 {a}, {b}")
        )

    def add(self, a: Int, *others: Int) -> Int:
        for b in others:
            a = b if a == 0 else a if b == 0 else self._op("add", operator.add, a, b)
        return a

    def minus(self, a: Int, b: Int) -> Int:
        return a if b == 0 else self._op("sub", operator.sub, a, b)

    def mul(self, a: Int, b: Int) -> Int:
        if a == 0 or b == 0:
            return 0
        return a if b == 1 else b if a == 1 else self._op("mul", operator.mul, a, b)

    def muladd(self, a: Int, b: Int, c: Int) -> Int:
        return self.add(self.mul(a, b), c)

    def div(self, a: Int, b: Int) -> Int:
        if isinstance(b, int) and b & (b - 1) == 0:
            return a if b == 1 else self._op("lshr", operator.rshift, a, b.bit_length() - 1)
        return self._op("udiv", operator.floordiv, a, b)

    def rem(self, a: Int, b: Int) -> Int:
        if isinstance(b, int) and b & (b - 1) == 0:
            return 0 if b == 1 else self.mask(a, b - 1)
        return self._op("urem", operator.mod, a, b)

    def mask(self, a: Int, b: Int) -> Int:
        return self._op("and", operator.and_, a, b)

    def xor(self, a: Int, b: Int) -> Int:
        return a if b == 0 else b if a == 0 else self._op("xor", operator.xor, a, b)

    def clamp(self, a: Int, low: int, high: int) -> Int:
        if isinstance(a, int):
            return min(max(a, low), high)
        above = self.f.op(f"call i32 @llvm.smax.i32(i32 {a}, i32 {low})")
        return self.f.op(f"call i32 @llvm.smin.i32(i32 {above}, i32 {high})")

    def min(self, a: Int, b: Int) -> Int:
        return (
            min(a, b)
            if isinstance(a, int) and isinstance(b, int)
            else self.f.op(f"call i32 @llvm.smin.i32(i32 {a}, i32 {b})")
        )

    def where(self, condition: str, a: Int, b: Int) -> Int:
        return (
            a
            if condition == "true"
            else b
            if condition == "false"
            else self.f.select(condition, "i32", a, b)
        )

    def less(self, a: Int, b: Int) -> str:
        return (
            str(a < b).lower()
            if isinstance(a, int) and isinstance(b, int)
            else self.f.icmp("slt", a, b, "i32")
        )

    def narrow(self, a: Int) -> Int:
        """An i64 that is known to be small."""
        return a if isinstance(a, int) else self.f.op(f"trunc i64 {a} to i32")

    def wide(self, a: Int) -> Int:
        """The i64 of a non-negative number."""
        return a if isinstance(a, int) else self.f.op(f"zext i32 {a} to i64")

    def saturate(self, a: Int, low: int, high: int) -> Int:
        """An i64 clamped to a small range, as an i32."""
        f = self.f
        return (
            min(max(a, low), high)
            if isinstance(a, int)
            else self.narrow(f.max(f.min(a, high), low))
        )
