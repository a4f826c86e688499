"""Independent kernels that follow each other run as one: a table of their arguments, cut into
ranges that take about equally long.

    for group in groups(program, order, bound):      # neighbours in the order of the steps
        with batch(program, group): …emit the steps…  # what they hand to program.parallel becomes
                                                      # rows of one table

An optimizer's updates of many parameters are one parallel region instead of a region (or a call on
one thread, for the small ones) per parameter; so are the three transposes of attention's inputs.
The kernels themselves are the same code, called on ranges of the same grain: no bit changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch_hlo.hlo.ir import POINTWISE, Instruction, ceildiv, round_up

from ..llvm import Function
from ..thresholds import RANGE_PS
from .block import Places, Span
from .program import Program, Row

LARGEST = 512  # kernels of a table
RANGES = 64  # and there are about so many
_FIELDS = 4  # of a row before the arguments: first range, items of a range, items, which function
_ELEMENTWISE = frozenset(POINTWISE) | frozenset(
    "broadcast iota transpose slice reverse pad copy gather".split()
)


# -- which steps
def groups(
    program: Program,
    order: Sequence[Instruction],
    bound: Mapping[Instruction, Places],
) -> list[list[Instruction]]:
    """`order` cut into runs of steps of which none reads or writes what another one writes.
    `bound[x]`: where x lives."""
    # a profile times every step on its own
    if not program.target.threads or program.is_apart or program.profile is not None:
        return [[x] for x in order]
    found: list[list[Instruction]] = []
    reads: dict[int, list[Span]] = {}  # by word
    writes: dict[int, list[Span]] = {}
    growing = False
    for x in order:
        loops = (
            x.op in _ELEMENTWISE or x.op == "fusion" and x.get("kind") == "loop" and not _updates(x)
        )
        sources = [s for o in x.operands for s in program.spans(bound[o])] if loops else []
        targets = [*program.spans(bound[x])] if loops else []
        if (
            not (loops and growing and len(found[-1]) < LARGEST)
            or _meet(writes, [*sources, *targets])
            or _meet(reads, targets)
        ):
            found.append([])
            reads = {}
            writes = {}
        found[-1].append(x)
        for known, spans in ((reads, sources), (writes, targets)):
            for s in spans:
                known.setdefault(s.word, []).append(s)
        growing = loops
    return found


def _updates(x: Instruction) -> bool:
    """Whether a fusion overwrites slices of arrays, which may have to be copied first."""
    return any(r.op == "dynamic-update-slice" for r in (x["calls"].root, *x["calls"].root.operands))


def _meet(known: dict[int, list[Span]], spans: Sequence[Span]) -> bool:
    return any(s.overlaps(other) for s in spans for other in known.get(s.word, ()))


# -- how they run
@contextmanager
def batch(program: Program, steps: Sequence[Instruction]) -> Iterator[None]:
    """The parallel calls of these steps become one."""
    if len(steps) < 2:
        yield
        return
    program.rows = []
    try:
        yield
    finally:
        rows, program.rows = program.rows, None
    total = sum(r.items * r.picoseconds for r in rows)
    if len(rows) < 2 or total < program.target.parallel_threshold_ps:
        for r in rows:
            program.parallel(r.function, r.arguments, r.items, r.grain, r.picoseconds / 1000)
        return
    _call(program, rows, total)


def _call(program: Program, rows: Sequence[Row], total: int) -> None:
    functions = list(dict.fromkeys((r.function, r.kinds) for r in rows))
    stride = _FIELDS + max(len(r.arguments) for r in rows)
    f = program.code
    table = f.fresh("table")
    f.entry_allocas.append(f"  {table} = alloca [{stride * (len(rows) + 1)} x i64], align 16")
    wanted = max(RANGE_PS, total // RANGES)
    first = 0
    for number, r in enumerate(rows):
        step = round_up(max(wanted // r.picoseconds, 1), r.grain)
        _store(
            f,
            table,
            number * stride,
            [
                f"i64 {first}",
                f"i64 {step}",
                f"i64 {r.items}",
                f"i64 {functions.index((r.function, r.kinds))}",
                *r.arguments,
            ],
        )
        first += ceildiv(r.items, step)
    # nothing comes after the last row
    _store(f, table, len(rows) * stride, [f"i64 {(1 << 63) - 1}"])
    name = program.function("batch", _text(functions, stride))
    program.parallel(name, [f"ptr {table}"], first, 1, total / first / 1000)


def _store(f: Function, table: str, at: int, values: Sequence[str]) -> None:
    for i, value in enumerate(values, at):
        f.do(f"store {value}, ptr {f.op(f'getelementptr i64, ptr {table}, i64 {i}')}")


def _text(functions: Sequence[tuple[str, tuple[str, ...]]], stride: int) -> str:
    """`void batch(i64 lo, i64 hi, ptr table)`: run ranges lo to hi of all rows' ranges, counted
    through."""
    cases = " ".join(f"i64 {i}, label %call{i}" for i in range(len(functions)))
    lines = f"""define void @batch(i64 %lo, i64 %hi, ptr %table) #0 {{
entry:
  br label %range
range:
  %r = phi i64 [%lo, %entry], [%r1, %next]
  %k0 = phi i64 [0, %entry], [%k, %next]
  br label %search
search:
  %k = phi i64 [%k0, %range], [%k1, %search]
  %k1 = add i64 %k, 1
  %after = mul i64 %k1, {stride}
  %p = getelementptr i64, ptr %table, i64 %after
  %limit = load i64, ptr %p
  %further = icmp sge i64 %r, %limit
  br i1 %further, label %search, label %found
found:
  %at = mul i64 %k, {stride}
  %row = getelementptr i64, ptr %table, i64 %at
  %first = load i64, ptr %row
  %p1 = getelementptr i64, ptr %row, i64 1
  %step = load i64, ptr %p1
  %p2 = getelementptr i64, ptr %row, i64 2
  %items = load i64, ptr %p2
  %p3 = getelementptr i64, ptr %row, i64 3
  %which = load i64, ptr %p3
  %turn = sub i64 %r, %first
  %low = mul i64 %turn, %step
  %end = add i64 %low, %step
  %high = call i64 @llvm.smin.i64(i64 %end, i64 %items)
  switch i64 %which, label %next [ {cases} ]""".split("\n")
    for i, (name, kinds) in enumerate(functions):
        lines.append(f"call{i}:")
        for j, kind in enumerate(kinds):
            lines += [
                f"  %q{i}.{j} = getelementptr i64, ptr %row, i64 {_FIELDS + j}",
                f"  %v{i}.{j} = load {kind}, ptr %q{i}.{j}",
            ]
        values = "".join(f", {kind} %v{i}.{j}" for j, kind in enumerate(kinds))
        lines += [
            f"  call void @{name}(i64 %low, i64 %high{values})",
            "  br label %next",
        ]
    lines += [
        "next:",
        "  %r1 = add i64 %r, 1",
        "  %more = icmp slt i64 %r1, %hi",
        "  br i1 %more, label %range, label %out",
        "out:",
        "  ret void",
        "}",
        "",
    ]
    return "\n".join(lines)
