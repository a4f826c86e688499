"""Where the time of compiled programs goes: a line per step with its time, and how near it is to
the machine's measured limits.

    with torch_hlo.profiler.profile() as p:   # compiles anew, with timestamps between steps
        for _ in range(5):
            train_step(); torch_hlo.mark_step()
    print(p.table(20))

TORCH_HLO_PROFILE=wall (or thread, CPU time of one thread, for busy machines) prints the table when
the process ends. From text: `python -m torch_hlo profile model.hlo`. "limit" is the time that the
step's bytes need at the measured memory rate, or its multiplications at the measured matrix rate,
whichever is longer, as a share of the time it took. It is at most 100 %: data in caches comes
faster than from memory, and on a busy machine the rates are measured too low."""

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from torch_hlo import config
from torch_hlo.compiler.codegen.profile import Step
from torch_hlo.device import runtime
from torch_hlo.device.programs import PROFILED, CompiledProgram
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Computation, Instruction, Module, Shape, build as b


@frozen
class Line:
    """One step of one program. Times in seconds: `total` of all calls, `best` of one. `limit`:
    share of the machine's limit, 0 to 1."""

    program: str
    step: Step
    calls: int
    total: float
    best: float
    limit: float


@frozen
class Limits:
    """Bytes per second of a large copy; operations per second of large f32 and bf16 products."""

    bandwidth: float
    f32: float
    bf16: float


class Report:
    """What was measured; filled when the `with` block ends."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def table(self, rows: int = 30) -> str:
        """The steps that took longest, a sum per kind of step, and the limits."""
        lines = sorted(self.lines, key=lambda line: -line.best * line.calls)
        outer = [line for line in lines if not line.step.depth]
        total = sum(line.best * line.calls for line in outer) or 1.0
        out = [f"{'ms':>9} {'share':>6} {'limit':>6} {'GB/s':>7} {'GF/s':>7}  calls  program step"]
        for line in lines[:rows]:
            out.append(
                f"{line.best * 1e3:9.3f} {line.best * line.calls / total:6.1%} {line.limit:6.0%}"
                f" {_rate(line.step.bytes, line.best):7.1f}"
                f" {_rate(line.step.matrix_flops or line.step.flops, line.best):7.1f}"
                f" {line.calls:6}  {line.program}"
                f" {'in a loop: ' * line.step.depth}{line.step.what[:150]}"
            )
        kinds: dict[str, list[float]] = {}
        for line in outer:
            spent = line.best * line.calls
            entry = kinds.setdefault(line.step.op, [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += spent
            entry[2] += spent * line.limit
        out.append("")
        out += [
            f"{spent * 1e3:9.3f} ms {spent / total:6.1%}  {op}: {n} steps, at the limit"
            f" {ideal * 1e3:.3f} ms"
            for op, (n, spent, ideal) in sorted(kinds.items(), key=lambda item: -item[1][1])
        ]
        limits = measured_limits(self.clock)
        out.append(
            f"{total * 1e3:9.3f} ms in all (best times); limits: {limits.bandwidth / 1e9:.1f} GB/s,"
            f" f32 {limits.f32 / 1e9:.0f} GF/s, bf16 {limits.bf16 / 1e9:.0f} GF/s"
        )
        return "\n".join(out)

    clock = "wall"


@contextmanager
def profile(clock: str = "wall") -> Iterator[Report]:
    """Time the steps of every program that runs in the block. `clock`: "wall", or "thread" for CPU
    time of the calling thread (meaningful with TORCH_HLO_THREADS=1 only). Programs are compiled for
    it, and forgotten afterwards."""
    report = Report()
    report.clock = clock
    with compiled_anew(clock) as report.lines:
        yield report


@contextmanager
def compiled_anew(clock: str) -> Iterator[list[Line]]:
    """Programs of the block are compiled for its profile, and forgotten afterwards. Gives a list
    that gets the lines of those that have run."""
    from torch_hlo.lazy.record import session  # recording needs torch, text programs do not

    def forget() -> None:
        PROFILED.programs.clear()
        session.engine().clear_cache()

    lines: list[Line] = []
    session.engine().synchronize()
    forget()
    try:
        with config.override(PROFILE=clock):
            yield lines
            session.engine().synchronize()
    finally:
        lines += collect(clock)
        forget()


def collect(clock: str) -> list[Line]:
    """Lines of the programs compiled under TORCH_HLO_PROFILE that have run."""
    found = [p for p in PROFILED.programs if any(calls for calls, _, _ in p.counts())]
    limits = measured_limits(clock)
    lines = []
    for program in found:
        assert program.profile is not None
        for step, (calls, total, best) in zip(program.profile.steps, program.counts(), strict=True):
            if calls:
                lines.append(
                    Line(
                        program.name,
                        step,
                        calls,
                        total / 1e9,
                        best / 1e9,
                        min(1.0, _ideal(step, limits) / max(best / 1e9, 1e-9)),
                    )
                )
    return lines


def _ideal(step: Step, limits: Limits) -> float:
    if not isinstance(step.bytes, int) or not isinstance(step.matrix_flops, int):
        return 0.0  # symbolic sizes
    peak = limits.bf16 if "bf16" in step.what else limits.f32
    return max(step.bytes / limits.bandwidth, step.matrix_flops / peak)


def _rate(amount: object, seconds: float) -> float:
    return amount / max(seconds, 1e-9) / 1e9 if isinstance(amount, int) else 0.0


@lru_cache
def measured_limits(clock: str = "wall") -> Limits:
    """Measure the device in use, with programs of our own: a copy of 128 MB and products of 1024 x
    1024 matrices (on GPUs of 512 MB, 8192 x 8192)."""
    count, rows = runtime.backend().saturating
    copy = _best(clock, (Shape("f32", (count,)),), lambda x: b.negate(x))
    rates = [_best(clock, (Shape(t, (rows, rows)),) * 2, _product) for t in ("f32", "bf16")]
    return Limits(8 * count / copy, *(2 * rows**3 / t for t in rates))


def _product(x: Instruction, y: Instruction) -> Instruction:
    return b.dot(x, y, (1,), (0,))


def _best(clock: str, shapes: tuple[Shape, ...], build: Callable[..., Instruction]) -> float:
    params = tuple(b.parameter(i, s) for i, s in enumerate(shapes))
    module = Module("limit", Computation("main", params, b.tuple_(build(*params))))
    kept = [*PROFILED.programs]
    with config.override(PROFILE=clock):
        program = runtime.compile_program(module)
    assert isinstance(program, CompiledProgram)
    PROFILED.programs[:] = kept
    inputs = [runtime.allocate(s) for s in shapes]
    for x in inputs:
        x.bytes[:] = 0
    outputs = [runtime.allocate(module.entry.root.operand.shape)]
    for _ in range(12):
        program.run(inputs, outputs)
    return sum(best for _, _, best in program.counts()) / 1e9


def report_at_exit() -> None:
    """Print the table when the process ends; what TORCH_HLO_PROFILE asks for."""
    atexit.register(_print_report)


def _print_report() -> None:
    if PROFILED.programs:  # empty when `profile` has shown them
        report = Report()
        report.clock = config.get("PROFILE")
        report.lines = collect(report.clock)
        print(report.table(), file=sys.stderr)
