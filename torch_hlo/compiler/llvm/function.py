"""Text of one LLVM function with structured control flow: the writer that the non-elementwise
kernels use.

    f = Function("twice", "ptr x, i64 n")
    with f.loop(0, "%n") as i:
        p = f.gep("float", "%x", i)
        v = f.load("float", p)
        f.store("float", f.op(f"fadd float {v}, {v}"), p)
    text = f.text()

A value is its IR name (`%v12`) or a Python int; integer arithmetic on two Python ints is done in
Python, so the same kernel code serves static and symbolic sizes. No IR pass runs afterwards: what
is written here is what is compiled.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .emit import BITS, Emit, Typed, Unit

Int = int | str  # a Python int or the name of an integer value


def signature(text: str) -> list[tuple[str, str]]:
    """Parameters as (type, name), written as in LLVM: "ptr x, i64 n"."""
    words = (parameter.split() for parameter in text.split(", "))
    return [(kind, name) for kind, name in words]


def parameters(pointers: Iterable[str] = (), numbers: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Parameters of these names: addresses, then 64-bit integers."""
    return [*(("ptr", p) for p in pointers), *(("i64", n) for n in numbers)]


def item_parameters(
    pointers: Iterable[str] = (), numbers: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """The same of a function that is called for a range of items, see `Function.items`."""
    return [*signature("i64 lo, i64 hi"), *parameters(pointers, numbers)]


class Loop:
    """What `Function.loop` yields when it carries values: `index`, `vars`; the body must assign
    `next`."""

    __slots__ = ("index", "vars", "next", "label")

    def __init__(self, index: str, names: list[str], label: str) -> None:
        self.index = index
        self.vars = names
        self.label = label
        self.next: Sequence[Int] | None = None


class Integers:
    """Arithmetic on integers of the type `word`. Two Python ints are computed in Python."""

    word = "i64"
    op: Callable[[str], str]  # appends `%v = expression` and returns the name

    def _arith(self, name: str, fold: Callable[[int, int], int], a: Int, b: Int) -> Int:
        return (
            fold(a, b)
            if isinstance(a, int) and isinstance(b, int)
            else self.op(f"{name} {self.word} {a}, {b}")
        )

    def add(self, a: Int, *others: Int) -> Int:
        for b in others:
            a = b if a == 0 else a if b == 0 else self._arith("add", operator.add, a, b)
        return a

    def sub(self, a: Int, b: Int) -> Int:
        return a if b == 0 else self._arith("sub", operator.sub, a, b)

    def mul(self, a: Int, b: Int) -> Int:
        if a == 0 or b == 0:
            return 0
        return a if b == 1 else b if a == 1 else self._arith("mul", operator.mul, a, b)

    def muladd(self, a: Int, b: Int, c: Int) -> Int:
        """a * b + c"""
        return self.add(self.mul(a, b), c)

    def _extreme(self, name: str, fold: Callable[[int, int], int], a: Int, b: Int) -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return fold(a, b)
        word = self.word
        return self.op(f"call {word} @llvm.{name}.{word}({word} {a}, {word} {b})")

    def min(self, a: Int, b: Int) -> Int:
        return self._extreme("smin", min, a, b)

    def max(self, a: Int, b: Int) -> Int:
        return self._extreme("smax", max, a, b)


class Function(Integers):
    """An LLVM function under construction. `params` are (type, name) pairs, or their text as in
    `signature`, available as `%name`."""

    def __init__(
        self,
        name: str,
        params: Sequence[tuple[str, str]] | str = (),
        result: str = "void",
        attrs: str = "#0",
        linkage: str = "",
    ) -> None:
        self.name = name
        self.params = signature(params) if isinstance(params, str) else list(params)
        self.result = result
        self.attrs = attrs
        self.linkage = linkage
        self.lines: list[str] = []
        self.entry_allocas: list[str] = []
        self.endings: list[str] = []  # what a void function does before it returns
        self.block = "entry"
        self.unit = Unit()
        self._emits: dict[int, Emit] = {}

    # -- names, lines, blocks
    def fresh(self, hint: str = "v") -> str:
        self.unit.count += 1
        return f"%{hint}{self.unit.count}"

    def do(self, line: str) -> None:
        self.lines.append("  " + line)

    def op(self, expression: str) -> str:
        """Append `%v = expression` and return the name."""
        name = self.fresh()
        self.lines.append(f"  {name} = {expression}")
        return name

    def call(self, callee: str, *typed_args: str, result: str = "void") -> str:
        """Call `@callee`; each argument is "type value". Returns the result's name ("" for
        void)."""
        text = f"call {result} @{callee}({', '.join(typed_args)})"
        if result == "void":
            self.do(text)
            return ""
        return self.op(text)

    def label(self, hint: str) -> str:
        return f"{hint}.{self.unit.number()}"

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def jump(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch(self, condition: str, then: str, other: str) -> None:
        self.do(f"br i1 {condition}, label %{then}, label %{other}")

    # -- integers (i64 unless said otherwise)
    def mul(self, a: Int, b: Int) -> Int:
        if isinstance(a, int) and not isinstance(b, int):
            a, b = b, a
        if isinstance(b, int) and b > 1 and b & (b - 1) == 0 and not isinstance(a, int):
            return self.op(f"shl i64 {a}, {b.bit_length() - 1}")
        return super().mul(a, b)

    def part(self, number: Int, size: Int, end: Int) -> tuple[Int, Int]:
        """[first, last) of a part of `size` elements, of which the last one stops at `end`."""
        first = self.mul(number, size)
        return first, self.min(self.add(first, size), end)

    def div(self, a: Int, b: Int) -> Int:
        """Quotient of non-negative numbers."""
        if b == 1:
            return a
        if isinstance(b, int) and b & (b - 1) == 0 and not isinstance(a, int):
            return self.op(f"lshr i64 {a}, {b.bit_length() - 1}")
        return self._arith("udiv", operator.floordiv, a, b)

    def rem(self, a: Int, b: Int) -> Int:
        if b == 1:
            return 0
        if isinstance(b, int) and b & (b - 1) == 0 and not isinstance(a, int):
            return self.op(f"and i64 {a}, {b - 1}")
        return self._arith("urem", operator.mod, a, b)

    def divmod(self, a: Int, b: Int) -> tuple[Int, Int]:
        return self.div(a, b), self.rem(a, b)

    def ceildiv(self, a: Int, b: Int) -> Int:
        return a if b == 1 else self.div(self.add(a, self.sub(b, 1)), b)

    def round_up(self, a: Int, b: Int) -> Int:
        return self.mul(self.ceildiv(a, b), b)

    def icmp(self, predicate: str, a: Int, b: Int, kind: str = "i64") -> str:
        return self.op(f"icmp {predicate} {kind} {a}, {b}")

    def select(self, condition: str, kind: str, a: int | str, b: int | str) -> str:
        return self.op(f"select i1 {condition}, {kind} {a}, {kind} {b}")

    # -- memory
    def gep(self, element: str, pointer: str, index: Int) -> str:
        if index == 0:
            return pointer
        return self.op(f"getelementptr inbounds {element}, ptr {pointer}, i64 {index}")

    def load(self, kind: str, pointer: str, align: int = 0) -> str:
        """`align`: in bytes, where it is not that of an element."""
        return self.op(f"load {kind}, ptr {pointer}{_alignment(kind, align)}")

    def store(self, kind: str, value: int | str, pointer: str, align: int = 0) -> None:
        self.do(f"store {kind} {value}, ptr {pointer}{_alignment(kind, align)}")

    def load_at(self, kind: str, pointer: str, index: Int) -> str:
        return self.load(kind, self.gep(kind, pointer, index))

    def store_at(self, kind: str, value: int | str, pointer: str, index: Int) -> None:
        self.store(kind, value, self.gep(kind, pointer, index))

    def alloca(self, kind: str, count: int = 1, align: int = 0) -> str:
        """A stack slot, made once per call of the function."""
        name = self.fresh("s")
        self.entry_allocas.append(
            f"  {name} = alloca [{count} x {kind}]" + (f", align {align}" if align else "")
        )
        return name

    # -- vectors
    def emit(self, lanes: int = 1) -> Emit:
        """A straight-line writer that appends to this function."""
        if lanes not in self._emits:
            self._emits[lanes] = Emit(lanes, self.lines, self.unit)
        return self._emits[lanes]

    def typed(self, kind: str, lanes: int = 1) -> Typed:
        """The same for values of one LLVM type."""
        return self.emit(lanes).typed(kind)

    def splat(self, kind: str, lanes: int, value: Int | float) -> str:
        return self.emit(lanes).splat(kind, str(value))

    def lane_mask(self, lanes: int, first: Int, count: Int) -> str:
        """`<lanes x i1>`: lane i is on when first + i < count."""
        return self.op(
            f"call <{lanes} x i1> @llvm.get.active.lane.mask.v{lanes}i1.i64(i64 {first}, i64"
            f" {count})"
        )

    def masked_load(self, kind: str, lanes: int, pointer: str, mask: str | None) -> str:
        """The lanes that are on, or all where there is no mask."""
        return self.typed(kind, lanes).load(pointer, mask=mask)

    def masked_store(
        self, kind: str, lanes: int, value: str, pointer: str, mask: str | None
    ) -> None:
        """Store the lanes that are on, or all where there is no mask. Where such a store is slow
        (see Target.masks_stores), whole vectors are stored without."""
        v = self.typed(kind, lanes)
        if not mask or lanes >= 16 or lanes * BITS[kind] >= 512:
            return v.store(value, pointer, mask=mask)
        whole = self.op(f"call i1 @llvm.vector.reduce.and.v{lanes}i1(<{lanes} x i1> {mask})")
        self.choose(
            whole, lambda: v.store(value, pointer), lambda: v.store(value, pointer, mask=mask)
        )

    def vectors_of(self, lanes: int, first: Int, end: Int) -> Iterator[tuple[Int, str]]:
        """A loop over the vectors of the elements [first, end), as (index, mask); whole ones have
        no mask ("")."""
        count = self.sub(end, first)
        whole = self.sub(end, self.rem(count, lanes))
        with self.loop(first, whole, lanes) as i:
            yield i, ""
        with self.when(self.icmp("slt", whole, end)):
            yield whole, self.lane_mask(lanes, whole, end)

    # -- control flow
    def items(self) -> AbstractContextManager[str]:
        """A loop over the items that this call is for."""
        return self.loop("%lo", "%hi")

    @contextmanager
    def in_blocks(self, low: Int, high: Int, size: Int) -> Iterator[tuple[str, Int]]:
        """A loop over blocks of `size` elements, as [first, last); the last one stops at `high`."""
        with self.loop(low, high, size) as first:
            yield first, self.min(self.add(first, size), high)

    @contextmanager
    def loop(
        self,
        low: Int,
        high: Int,
        step: Int = 1,
        carry: Sequence[tuple[str, Int]] = (),
        known_nonempty: bool = False,
    ) -> Iterator[Any]:
        """`for index in range(low, high, step)`. Without `carry` yields the index; with it (a list
        of (type, initial value)) yields a Loop whose `next` the body must set, and whose `vars`
        hold the final values after the loop.

        `known_nonempty` tests at the bottom: one branch per iteration; `vars` after the loop are
        then the last `next`."""
        header, body, latch, end = (self.label(h) for h in ("loop", "body", "next", "end"))
        before = self.block
        index = self.fresh("i")
        step_name = self.fresh("i")
        state = Loop(index, [self.fresh("c") for _ in carry], header)
        self.jump(header)
        self.start(header)
        at = len(self.lines)
        if not known_nonempty:
            self.branch(self.icmp("slt", index, high), body, end)
            self.start(body)
        yield state if carry else index
        if carry and (state.next is None or len(state.next) != len(carry)):
            raise AssertionError(f"loop in {self.name} must set {len(carry)} next values")
        if not known_nonempty:
            self.jump(latch)
            self.start(latch)
        from_block = self.block
        self.do(f"{step_name} = add nuw nsw i64 {index}, {step}")
        if known_nonempty:
            self.branch(self.icmp("slt", step_name, high), header, end)
        else:
            self.jump(header)
        phis = [f"  {index} = phi i64 [{low}, %{before}], [{step_name}, %{from_block}]"]
        for (kind, initial), name, following in zip(
            carry, state.vars, state.next or (), strict=True
        ):
            phis.append(
                f"  {name} = phi {kind} [{initial}, %{before}], [{following}, %{from_block}]"
            )
        self.lines[at:at] = phis
        self.start(end)
        if known_nonempty and carry:
            state.vars = [str(v) for v in state.next or ()]

    @contextmanager
    def while_(self, carry: Sequence[tuple[str, Int]] = ()) -> Iterator[Loop]:
        """`while True:` with carried values; call `state.leave(condition)` (exit when true) at
        least once, first thing.

        Yields a Loop with an extra method through `break_if`. After the loop `vars` are the values
        at the exit test."""
        header = self.label("while")
        end = self.label("done")
        before = self.block
        state = Loop("", [self.fresh("c") for _ in carry], end)
        self.jump(header)
        self.start(header)
        at = len(self.lines)
        yield state
        phis = [
            f"  {name} = phi {kind} [{initial}, %{before}], [{following}, %{self.block}]"
            for (kind, initial), name, following in zip(
                carry, state.vars, state.next or (), strict=True
            )
        ]
        self.jump(header)
        self.lines[at:at] = phis
        self.start(end)

    def break_if(self, state: Loop, condition: str) -> None:
        """Leave a `while_` loop when `condition` holds. Use it only where the carried `vars` are
        what the exit needs."""
        go_on = self.label("go")
        self.branch(condition, state.label, go_on)
        self.start(go_on)

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """`if condition:` without a result."""
        then = self.label("then")
        end = self.label("fi")
        self.branch(condition, then, end)
        self.start(then)
        yield
        self.jump(end)
        self.start(end)

    def choose(
        self,
        condition: str,
        then: Callable[[], Sequence[Int] | None],
        other: Callable[[], Sequence[Int] | None],
        kinds: Sequence[str] = (),
    ) -> list[str]:
        """`if condition: then() else: other()`; each returns one value per type in `kinds` (a
        list), merged by phis."""
        yes = self.label("then")
        no = self.label("else")
        end = self.label("fi")
        self.branch(condition, yes, no)
        self.start(yes)
        a = then()
        from_yes = self.block
        self.jump(end)
        self.start(no)
        b = other()
        from_no = self.block
        self.jump(end)
        self.start(end)
        return [
            self.op(f"phi {kind} [{x}, %{from_yes}], [{y}, %{from_no}]")
            for kind, x, y in zip(kinds, a or (), b or (), strict=True)
        ]

    def ret(self, value: str = "void") -> None:
        self.do(f"ret {value}")

    def text(self) -> str:
        """The definition; a void function without a final `ret` gets one."""
        if not self.lines or not self.lines[-1].lstrip().startswith(("ret", "unreachable")):
            self.lines += self.endings
            self.ret()
        params = ", ".join(f"{kind} %{name}" for kind, name in self.params)
        linkage = f"{self.linkage} " if self.linkage else ""
        head = f"define {linkage}{self.result} @{self.name}({params}) {self.attrs} {{\nentry:\n"
        return head + "\n".join(self.entry_allocas + self.lines) + "\n}\n"


def _alignment(kind: str, align: int) -> str:
    """LLVM takes a vector without an alignment for aligned as a whole."""
    if not align and kind.startswith("<"):
        align = BITS[kind.split()[-1].removesuffix(">")] // 8
    return f", align {align}" if align else ""
