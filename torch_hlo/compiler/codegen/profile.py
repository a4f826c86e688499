"""Timestamps between the steps of a compiled program, and what each step has to do at least.

    profile = Profile()
    executable = compile_module(module, profile=profile)     # code that counts; never kept on disk
    profile.steps                                            # [Step(name, op, what, bytes, flops,
                                                             # matrix_flops)]
    profile.read(bytes of the loaded constants)              # [(calls, total ns, least ns)] per
                                                             # step
    profile.times(bytes of the loaded constants)             # [[(when a call began, ns)]]

The counters live behind the program's constants. On the CPU the steps of loops and branches are
timed as well; a loop's own time includes theirs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Size, Users, called, fixed

from ..llvm import system
from .program import Program

CLOCKS = {"wall": 1, "thread": 3}  # CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID
KEPT = 32  # calls of a step whose times are kept
_WORDS = 3 + 2 * KEPT
_MARK = b"torch_hlo profile counters"
_NO_ARITHMETIC = {
    "parameter",
    "constant",
    "iota",
    "broadcast",
    "reshape",
    "bitcast",
    "transpose",
    "slice",
    "tuple",
    "get-tuple-element",
    "copy",
}
_PICKS = {"slice", "dynamic-slice", "gather"}


@frozen
class Step:
    """One step: bytes read and written at least once, operations per run; `matrix_flops` are those
    of dots and convolutions. `depth`: how many steps it is inside of. `sources`: Python lines
    of what it computes, its result's first."""

    name: str
    op: str
    what: str
    bytes: Size
    flops: Size
    matrix_flops: Size
    depth: int = 0
    sources: tuple[str, ...] = ()


class Profile:
    """Filled by the compiler, read by who runs the program. `clock`: "wall", or "thread" for the
    time the calling thread really ran."""

    nested = True  # also times the steps of called computations

    def __init__(self, clock: str = "wall") -> None:
        self.clock = CLOCKS[clock]
        self.steps: list[Step] = []
        self.offset = self.depth = 0

    # -- while compiling
    def start(self, program: Program, order: Sequence[Instruction]) -> None:
        """Reserve counters for these steps, and those inside of them."""
        count = sum(map(_steps, order))
        mark = _MARK.ljust(64, b"\0")
        self.offset = fixed(program.constant(mark + bytes(8 * _WORDS * count)).offset) + len(mark)
        self.program = program

    @contextmanager
    def step(self, x: Instruction) -> Iterator[None]:
        """Around the emission of one step."""
        program = self.program
        now = program.function("clock_now", system.NOW)
        program.symbol("clock_gettime", system.CLOCK)
        before = program.call(now, [f"i32 {self.clock}"], "i64")
        number = len(self.steps)
        self.steps.append(describe(x, number, self.depth))
        self.depth += 1
        yield
        self.depth -= 1
        base = program._base(1)
        counter = program.code.op(
            f"getelementptr inbounds i8, ptr {base}, i64 {self.offset + 8 * _WORDS * number}"
        )
        program.call(
            program.function("profile_count", _COUNT),
            [f"i32 {self.clock}", f"i64 {before}", f"ptr {counter}"],
        )

    # -- afterwards
    def read(self, constants: np.ndarray) -> list[tuple[int, int, int]]:
        """(calls, total ns, least ns) of every step; `constants`: the bytes of the loaded program's
        constants."""
        return [
            (calls, total, least) for calls, total, least in self._words(constants)[:, :3].tolist()
        ]

    def times(self, constants: np.ndarray) -> list[list[tuple[int, int]]]:
        """(when it began, ns) of the last KEPT calls of every step, oldest first."""
        found = []
        for calls, _, _, *kept in self._words(constants).tolist():
            last = [i % KEPT for i in range(max(calls - KEPT, 0), calls)]
            found.append([(kept[2 * i], kept[2 * i + 1]) for i in last])
        return found

    def _words(self, constants: np.ndarray) -> np.ndarray:
        end = self.offset + 8 * _WORDS * len(self.steps)
        return constants[self.offset : end].view(np.int64).reshape(-1, _WORDS)


def _steps(x: Instruction) -> int:
    """How many steps `x` is at most, with those of the computations that it calls."""
    return 1 + sum(_steps(y) for c in called(x) for y in c.instructions() if x.op != "fusion")


def describe(x: Instruction, number: int = 0, depth: int = 0) -> Step:
    """What a step has to do at least."""
    flops: Size = 0
    matrix: Size = 0
    inside: Counter[str] = Counter()
    for i in _inner(x):
        if i.op in ("dot", "convolution"):
            matrix += matrix_flops(i)
        elif i.op not in _NO_ARITHMETIC:
            flops += _elements(i)
        inside[i.op] += 1
    metas = [y.meta for y in (x, *reversed(_inner(x)))]
    name = next((m.op_name for m in metas if m.op_name), f"step {number}")
    operands = ", ".join(dict.fromkeys(str(o.shape) for o in x.operands))
    return Step(
        name,
        x.op,
        f"{_content(x, inside)}({operands}) -> {x.shape}",
        traffic(x),
        flops,
        matrix,
        depth,
        tuple(dict.fromkeys(m.source for m in metas if m.source)),
    )


def _content(x: Instruction, inside: Counter[str]) -> str:
    if x.op != "fusion":
        return x.op
    shown = [
        op
        for op, _ in inside.most_common()
        if op not in ("parameter", "constant", "tuple", "get-tuple-element")
    ]
    return f"fusion[{' '.join(shown[:9])}{' …' if len(shown) > 9 else ''}]"


def _inner(x: Instruction) -> list[Instruction]:
    """The instructions whose arithmetic `x` does; of loops, one iteration."""
    if x.op in ("fusion", "while", "conditional", "call"):
        return [
            i
            for c in called(x)
            for y in c.instructions()
            for i in ([y] if y.op != "fusion" else _inner(y))
        ]
    return [x]


def _elements(x: Instruction) -> Size:
    if x.op in ("reduce", "reduce-window", "sort", "scatter"):
        return x.operands[0 if x.op != "scatter" else 2].size
    return 0 if x.is_tuple else x.size


def matrix_flops(x: Instruction) -> Size:
    """2 * multiplications of a dot or convolution, else 0. May be symbolic."""
    if x.op == "dot":
        depth: Size = 1
        for d in x["lhs_contracting_dims"]:
            depth *= x.operand.dims[d]
        return 2 * x.size * depth
    if x.op == "convolution":
        kernel = x.operands[1].shape
        at: int = x["dim_labels"].partition("_")[2].partition("->")[0].index("o")
        return 2 * x.size * (kernel.size // kernel.dims[at])
    return 0


def traffic(x: Instruction) -> Size:
    """Bytes read and written at least once."""
    if x.op in _PICKS:
        return 2 * x.nbytes
    if x.op == "dynamic-update-slice":
        return 2 * x.operands[1].nbytes
    if x.op == "fusion":
        body = called(x)[0]
        readers: Users = {}
        for i in body.instructions():
            for o in i.operands:
                readers.setdefault(o, []).append(i)
        total = sum((_read(p, readers.get(p, [])) for p in body.params), start=0)
        return total + sum((_written(r) for r in body.results), start=0)
    return (
        sum(
            (o.nbytes for o in dict.fromkeys(x.operands) if not o.is_tuple),
            start=0,
        )
        + x.nbytes
    )


def _read(p: Instruction, readers: list[Instruction]) -> Size:
    if readers and all(r.op in _PICKS and r.operand is p for r in readers):
        return sum((r.nbytes for r in readers), start=0)
    if readers and all(
        r.op in ("dynamic-update-slice", "scatter") and r.operand is p for r in readers
    ):
        return 0
    return p.nbytes


def _written(root: Instruction) -> Size:
    if root.op == "dynamic-update-slice":
        return 2 * root.operands[1].nbytes
    return root.nbytes


_COUNT = """define void @profile_count(i32 %clock, i64 %before, ptr %counter) #0 {
  %now = call i64 @clock_now(i32 %clock)
  %d = sub i64 %now, %before
  %n = load i64, ptr %counter
  %n1 = add i64 %n, 1
  store i64 %n1, ptr %counter
  %sp = getelementptr i64, ptr %counter, i64 1
  %s = load i64, ptr %sp
  %s1 = add i64 %s, %d
  store i64 %s1, ptr %sp
  %mp = getelementptr i64, ptr %counter, i64 2
  %m = load i64, ptr %mp
  %first = icmp eq i64 %n, 0
  %less = icmp slt i64 %d, %m
  %take = or i1 %first, %less
  %m1 = select i1 %take, i64 %d, i64 %m
  store i64 %m1, ptr %mp
  %slot = urem i64 %n, KEPT
  %word = mul i64 %slot, 2
  %bp = getelementptr i64, ptr %mp, i64 1
  %at = getelementptr i64, ptr %bp, i64 %word
  store i64 %before, ptr %at
  %dp = getelementptr i64, ptr %at, i64 1
  store i64 %d, ptr %dp
  ret void
}
""".replace("KEPT", str(KEPT))
