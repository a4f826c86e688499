"""Folding values in registers: identities, vector accumulators, and the final fold over the lanes
of one.

    r = Reducer(x)                       # x: a reduce instruction
    accs = r.identity(e)                 # one accumulator per operand (complex: two), as operands
                                         # of width e.lanes
    accs = r.combine(k, accs, values)
    scalars = r.fold_lanes(k, accs)      # over all lanes, in a fixed tree order

Sums and products of bf16, f16 and f8 are accumulated in f32 without rounding in between. The
reducer must be associative and commutative. Accumulators start from the operation's identity and
the initial value enters once at the end; for a reducer that is not one binary opcode the initial
value itself must be the identity.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch_hlo.hlo.ir import DTYPES, Computation, Instruction, fixed

from ..codegen import CodegenError, Kernel, Planner
from ..codegen.index import ZERO, Index, constant
from ..codegen.kernel_values import Level
from ..llvm import Emit, scalar
from ..llvm.scalar import STORAGE, Value

_INF = float("inf")
T = TypeVar("T")


def _lowest(dtype: str) -> float:
    row = DTYPES[dtype]
    return -_INF if row.kind == "f" else -(1 << row.bits - 1) if row.kind == "s" else 0


def _highest(dtype: str) -> float:
    row = DTYPES[dtype]
    return (
        _INF
        if row.kind == "f"
        else (
            1
            if row.kind == "p"
            else (1 << row.bits - 1) - 1
            if row.kind == "s"
            else (1 << row.bits) - 1
        )
    )


_IDENTITY: dict[str, Callable[[str], float]] = {
    "add": lambda dtype: 0,
    "multiply": lambda dtype: 1,
    "maximum": _lowest,
    "minimum": _highest,
    "and": lambda dtype: 1 if dtype == "pred" else -1,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
}


class Reducer:
    """How the operands of `x` (a reduce) are folded. `dtypes`: of the operands; `kinds`: register
    types of the flat accumulators."""

    def __init__(self, x: Instruction) -> None:
        self.x = x
        half = len(x.operands) // 2
        self.operands = x.operands[:half]
        self.initials = x.operands[half:]
        self.dtypes = tuple(o.dtype for o in self.operands)
        self.computation: Computation = x["to_apply"]
        self.op = self._single_opcode()
        self.kinds = [STORAGE[t].register for t in self.dtypes for _ in range(STORAGE[t].parts)]

    def _single_opcode(self) -> str | None:
        root = self.computation.root
        params = self.computation.params
        plain = len(params) == 2 and root.op in _IDENTITY and root.dtype == self.dtypes[0]
        if plain and {*root.operands} == {*params} and len(root.operands) == 2:
            if DTYPES[self.dtypes[0]].kind == "c" and root.op != "add":
                return None
            return root.op
        return None

    @property
    def is_float_sum(self) -> bool:
        return self.op in ("add", "multiply") and DTYPES[self.dtypes[0]].kind in "fc"

    def stored_dtypes(self) -> list[str]:
        """Element types in which partial results are kept: f32 where the operand's type is
        narrower."""
        if (
            self.op is not None
            and STORAGE[self.dtypes[0]].register == "float"
            and STORAGE[self.dtypes[0]].parts == 1
        ):
            return ["f32"]
        return list(self.dtypes)

    def fetched(self, k: Kernel, pointers: Sequence[str], at: Index) -> list[str]:
        """Accumulators that are kept in memory, an array for each stored type."""
        found: list[str] = []
        for pointer, dtype in zip(pointers, self.stored_dtypes()):
            v = k.load(pointer, dtype, at)
            found += list(v) if isinstance(v, tuple) else [v]
        return found

    def keep(self, k: Kernel, pointers: Sequence[str], at: Index, accs: Sequence[str]) -> None:
        """Write accumulators where `fetched` finds them."""
        for pointer, dtype, v in zip(pointers, self.stored_dtypes(), self.grouped(accs)):
            k.store(pointer, dtype, at, v)

    def widened(self, k: Kernel, accs: Sequence[str]) -> list[str]:
        """Scalar accumulators in all lanes of the current width."""
        return [k.widen(v, kind) for v, kind in zip(accs, self.kinds, strict=True)]

    def identity(self, k: Kernel) -> list[str]:
        """Initial accumulators: scalar operands."""
        if self.op is not None:
            value = _IDENTITY[self.op](self.dtypes[0])
            if self.op == "minimum" and self.dtypes[0] == "pred":
                value = 1
            return [Emit(1, [], k.unit).typed(kind).const(value) for kind in self.kinds]
        return [part for x in self.initials for part in self.initial(k, x)]

    def initial(self, k: Kernel, x: Instruction) -> list[str]:
        """Operands of an initial value, at the kernel's current width; computed at the function's
        start."""
        value = k.value(x, (ZERO,) * x.rank)
        return list(value) if isinstance(value, tuple) else [value]

    def needs_initial(self) -> bool:
        """False when the initial value is known to change nothing."""
        if self.op is None:
            return False
        x = self.initials[0]
        if x.op != "constant":
            return True
        found = x["literal"].numpy().reshape(-1)[0]
        return not found == _IDENTITY[self.op](self.dtypes[0]) and not (
            self.dtypes[0] == "pred" and bool(found) == bool(_IDENTITY[self.op]("pred"))
        )

    def finish(self, k: Kernel, accs: Sequence[str]) -> list[str]:
        """Accumulators of the current width with the initial value folded in, rounded to the
        result's type."""
        accs = list(accs)
        if self.needs_initial():
            first = self.widened(k, self.initial(k, self.initials[0]))
            accs = self.combine(k, first, accs)
        return self.finish_rounded(k, accs)

    def finish_rounded(self, k: Kernel, accs: Sequence[str]) -> list[str]:
        """Accumulators rounded to the result's type."""
        return (
            [scalar.round_to(k.e, self.dtypes[0], accs[0])]
            if self.op is not None and len(accs) == 1
            else list(accs)
        )

    def combine(self, k: Kernel, a: Sequence[str], b: Sequence[str]) -> list[str]:
        """Accumulators a and b (or values b) as one, at the kernel's current width."""
        if self.op is None:
            return self._apply(k, a, b)
        dtype = self.dtypes[0]
        kind = DTYPES[dtype].kind
        fn = scalar.TABLE[self.op, "f" if kind == "c" else kind]
        return [fn(k.e.typed(t), x, y) for t, x, y in zip(self.kinds, a, b, strict=True)]

    def _apply(self, k: Kernel, a: Sequence[str], b: Sequence[str]) -> list[str]:
        """The reducer's computation on values of the current width."""
        inner = Kernel(k.target, k.e.lanes, [], 0)
        inner.unit = k.unit
        level = Level(0, k.e.lines, k.level.label, k.e.lanes, k.unit)
        inner.levels = [level]
        inner.level = level
        inner.e = level.emit
        values = [*self.grouped(a), *self.grouped(b)]
        for p, v in zip(self.computation.params, values, strict=True):
            level.cache[p, ()] = v
        results = []
        for r in self.computation.results:
            v = inner.value(r, ())
            results += list(v) if isinstance(v, tuple) else [v]
        if level.label != k.level.label:
            raise CodegenError(
                f"reduce: the reducer {self.computation.root.op} needs control flow; write it with"
                " elementwise opcodes"
            )
        return results

    def grouped(self, flat: Sequence[str]) -> list[Value]:
        """Flat accumulators as one value per operand."""
        values: list[Value] = []
        at = 0
        for t in self.dtypes:
            n = STORAGE[t].parts
            values.append(flat[at] if n == 1 else (flat[at], flat[at + 1]))
            at += n
        return values

    def values(self, k: Kernel | Planner, index_of: Callable[..., Any]) -> list[str]:
        """The operands' elements; `index_of(instruction)` gives the index."""
        found: list[str] = []
        for o in self.operands:
            v = k.value(o, index_of(o))
            found += list(v) if isinstance(v, tuple) else [v]
        return found

    def keep_masked(self, k: Kernel, new: Sequence[str], old: Sequence[str]) -> list[str]:
        """`new` in the lanes of a partial vector that exist, `old` in the others."""
        tail = k.level.tail
        if tail is None or k.e.lanes == 1:
            return list(new)
        return [
            k.e.typed(t).select(tail, a, b) for t, a, b in zip(self.kinds, new, old, strict=True)
        ]

    def fold_copies(self, k: Kernel, copies: Sequence[list[str]]) -> list[str]:
        """Pairwise fold of several accumulators of the kernel's vector width, written at the
        current (scalar) level."""
        with _vectors(k):
            return fold_pairwise(lambda a, b: self.combine(k, a, b), copies)

    def fold_lanes(self, k: Kernel, accs: Sequence[str]) -> list[str]:
        """Fold the lanes of a vector accumulator, and the threads that share an item: scalar
        operands."""
        accs = list(accs)
        lanes = k.lanes
        while lanes > 1:
            lanes //= 2
            with _vectors(k, lanes):
                low, high = (
                    [_part(k.e, *x, at) for x in zip(self.kinds, accs)] for at in (0, lanes)
                )
                accs = self.combine(k, low, high)
        return k.fold_threads(self, accs)


def few(k: Kernel | Planner, x: Instruction, index: tuple[Index, ...]) -> Any:
    """One result of a reduce of few elements, all of which are folded here; one per operand where
    there are several."""
    reducer = Reducer(x)
    gone = sorted(x["dimensions"])
    values = []
    for inside in itertools.product(*(range(fixed(x.operand.dims[d])) for d in gone)):
        at = list(index)
        for d, i in zip(gone, inside, strict=True):
            at.insert(d, constant(i))
        values.append(reducer.values(k, lambda o, at=at: tuple(at)))
    if isinstance(k, Planner):
        for initial in reducer.initials:
            k.value(initial, ())
        k.cost += len(values)
        return "%0"
    found = joined(k, reducer, values)
    return found if x.is_tuple else found[0]


def one_of_few(k: Kernel | Planner, x: Instruction, index: tuple[Index, ...]) -> Value:
    """One result of a reduce of few elements of several operands."""
    if isinstance(k, Planner):
        return str(few(k, x.operand, index))
    return k.value(x.operand, index)[x["index"]]


def joined(k: Kernel, reducer: Reducer, values: Sequence[list[str]]) -> list[Value]:
    """Single elements folded, the initial value included."""
    if not values:
        return reducer.grouped([v for i in reducer.initials for v in reducer.initial(k, i)])
    first, *others = values
    total = first if reducer.op else reducer.combine(k, reducer.identity(k), first)
    for v in others:
        total = reducer.combine(k, total, v)
    return reducer.grouped(reducer.finish(k, total))


def _part(e: Emit, kind: str, vector: str, start: int) -> str:
    """Half of a vector: as many lanes as `e` has, from `start` on. LLVM 22 mistakes a shuffle that
    moves the upper half and keeps the other lanes for a broadcast (AVX-512)."""
    if e.lanes == 1:
        return e.op(f"extractelement <2 x {kind}> {vector}, i64 {start}")
    return e.shuffle(kind, vector, "poison", 2 * e.lanes, range(start, start + e.lanes))


def fold_pairwise(combine: Callable[[T, T], T], items: Sequence[T]) -> T:
    """Balanced tree: short dependence chains and small rounding errors."""
    items = list(items)
    while len(items) > 1:
        paired = [combine(a, b) for a, b in zip(items[::2], items[1::2])]
        items = paired + ([items[-1]] if len(items) % 2 else [])
    return items[0]


class _vectors:
    """Write at the kernel's vector width, or another, into the lines of its current level."""

    def __init__(self, k: Kernel, lanes: int = 0) -> None:
        self.k = k
        self.lanes = lanes or k.lanes

    def __enter__(self) -> None:
        self.saved = self.k.e
        self.k.e = Emit(self.lanes, self.k.level.lines, self.k.unit)

    def __exit__(self, *exc: object) -> None:
        self.k.e = self.saved
