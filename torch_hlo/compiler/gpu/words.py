"""Arithmetic on 32-bit integers for kernels: thread numbers, addresses of shared memory. Two Python
ints are computed in Python."""

import operator

from ..llvm import Function, Int, Integers


class Words(Integers):
    """i32 operations that append to `f`; all numbers are seen as non-negative but in `sub` and
    comparisons."""

    word = "i32"

    def __init__(self, f: Function) -> None:
        self.f = f
        self.op = f.op

    def div(self, a: Int, b: Int) -> Int:
        if isinstance(b, int) and b & (b - 1) == 0:
            return a if b == 1 else self._arith("lshr", operator.rshift, a, b.bit_length() - 1)
        return self._arith("udiv", operator.floordiv, a, b)

    def rem(self, a: Int, b: Int) -> Int:
        if isinstance(b, int) and b & (b - 1) == 0:
            return 0 if b == 1 else self.mask(a, b - 1)
        return self._arith("urem", operator.mod, a, b)

    def mask(self, a: Int, b: Int) -> Int:
        return self._arith("and", operator.and_, a, b)

    def xor(self, a: Int, b: Int) -> Int:
        return a if b == 0 else b if a == 0 else self._arith("xor", operator.xor, a, b)

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
        return a if isinstance(a, int) else self.op(f"trunc i64 {a} to i32")

    def wide(self, a: Int) -> Int:
        """The i64 of a non-negative number."""
        return a if isinstance(a, int) else self.op(f"zext i32 {a} to i64")

    def saturate(self, a: Int, high: int) -> Int:
        """An i64 clamped to a small range from 0, as an i32."""
        return self.narrow(self.f.max(self.f.min(a, high), 0))
