"""Runs PTX kernels with NumPy, many groups of threads at a time; a debugger's view of what a GPU
would do.

    memory = GlobalMemory(); memory.add(address, nbytes)
    Image(text).launch("kernel", groups=4, threads=128, words=[100, address], memory=memory,
        shared_bytes=0)

Threads with the same program counter are a *frame*: one NumPy operation does an instruction for all
of them. A branch splits a frame, frames that meet are merged, and the frame that is furthest behind
runs first, so threads meet again. Errors (PtxError) name the kernel, the instruction and the first
threads: accesses outside of arrays or of shared variables, misaligned vectors, threads that wait
for others that never come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from test.ptx import (  # noqa: F401 - the families of instructions fill TABLE
    accumulators,
    arithmetic,
    async_copy,
    convert,
    floats,
    matrix,
    movement,
    warp,
    wgmma,
)
from test.ptx.global_races import GlobalRaces
from test.ptx.memory import Fault, GlobalMemory, Local, Shared
from test.ptx.races import Races
from test.ptx.syntax import (
    SIZES,
    Function,
    Instruction,
    Module,
    PtxError,
    Sym,
    Variable,
    parse,
)
from test.ptx.table import RENDEZVOUS, TABLE, Code, Run, bits

THREADS_AT_ONCE = 1 << 14
SHARED_AT_ONCE = 32 << 20  # bytes of shared memory of the groups that run together
STEPS = 20_000_000  # blocks of instructions of one launch: more is a loop without end
_SHARED_START = 1024  # the first bytes belong to the system (sm_90), and a null address is an error


class Frame:
    """Threads at one place. `threads`: their numbers in the run, ascending; `registers`: name ->
    array of one value per thread, or a scalar."""

    __slots__ = ("run", "threads", "registers", "group", "tid", "ctaid")

    def __init__(self, run: GridRun, threads: np.ndarray, registers: dict) -> None:
        self.run, self.threads, self.registers = run, threads, registers
        self.group = threads // run.threads
        self.tid = (threads - self.group * run.threads).astype(np.uint32)
        self.ctaid = (self.group + run.first_group).astype(np.uint32)

    def __len__(self) -> int:
        return len(self.threads)

    def callee(self, parameters: dict) -> Frame:
        """The same threads in a function that they call."""
        return Frame(self.run, self.threads, parameters)

    def select(self, which: np.ndarray, names=None) -> Frame:
        """Some of the threads (a mask), with the registers `names`."""
        registers = self.registers
        kept = registers if names is None else [n for n in names if n in registers]
        part = Frame.__new__(Frame)
        part.run = self.run
        part.threads, part.group, part.tid, part.ctaid = (
            self.threads[which],
            self.group[which],
            self.tid[which],
            self.ctaid[which],
        )
        part.registers = {n: v[which] if np.ndim(v := registers[n]) else v for n in kept}
        return part

    def run_of_warps(self) -> np.ndarray | tuple:
        """The threads, if they are whole warps one after another; else nothing."""
        first = self.threads[::32]
        return (
            self.threads
            if len(self.threads) % 32 == 0
            and (self.threads[31::32] - first == 31).all()
            and not (first & 31).any()
            else ()
        )

    def warps(self) -> tuple[np.ndarray, np.ndarray]:
        """(group, warp) of every warp with a thread here, each once."""
        per = -(-self.run.threads // 32)
        return np.divmod(
            np.unique(self.group * per + (self.tid >> np.uint32(5)).astype(np.int64)),
            per,
        )

    def spread(self, value) -> np.ndarray:
        """A value as an array with an element per thread."""
        return value if np.ndim(value) else np.broadcast_to(value, len(self.threads))


def merge(frames: list[Frame], names) -> Frame:
    """Threads that have met, with the registers that matter from here on."""
    if len(frames) == 1:
        return frames[0]
    run = frames[0].run
    threads = np.concatenate([f.threads for f in frames])
    order = np.argsort(threads, kind="stable")
    registers = {}
    for name in names:
        values = [f.registers.get(name) for f in frames]
        known = [v for v in values if v is not None]
        if not known:
            continue
        values = [bits(known[0].dtype.type(0)) if v is None else bits(v) for v in values]
        if all(not v.ndim and v == values[0] for v in values):
            registers[name] = values[0]
        else:
            shape = (
                next(v.shape[1:] for v in values if v.ndim) if any(v.ndim for v in values) else ()
            )
            registers[name] = np.concatenate(
                [
                    v if v.ndim else np.full((len(f.threads), *shape), v)
                    for v, f in zip(values, frames, strict=True)
                ]
            )[order]
    return Frame(run, threads[order], registers)


@dataclass(slots=True)
class Block:
    """Instructions without a branch into or out of the middle. `after`: "next", "branch", "ret".
    `wait`: threads meet before it."""

    steps: list[tuple[Instruction, Run]] = field(default_factory=list)
    after: str = "next"
    target: int = 0
    condition: object = None
    live: frozenset[str] = frozenset()
    wait: object = None
    guard: object = None  # of the instruction that threads wait for
    last: Instruction | None = None
    skips: bool = False  # a branch over the next block only
    used: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)


class Routine:
    """A function decoded: blocks with their live registers."""

    def __init__(self, module: Module, function: Function) -> None:
        self.function = function
        self.code = code = Code(module, function)
        starts = {0, *function.labels.values()}
        for i, x in enumerate(function.body):
            if x.opcode in ("bra", "ret", "exit"):
                starts.add(i + 1)
            if x.opcode in ("bar", "barrier"):  # who meets there runs only this
                starts.add(i + 1)
            if x.opcode in RENDEZVOUS:
                starts.add(i)
        order = sorted(s for s in starts if s <= len(function.body))
        number = {s: n for n, s in enumerate(order)}
        self.blocks: list[Block] = []
        for start, end in zip(order, [*order[1:], len(function.body)], strict=True):
            block = Block()
            for x in function.body[start:end]:
                self._decode(code, block, x, number)
            self.blocks.append(block)
        if self.blocks[-1].after == "next":
            self.blocks[-1].after = "ret"
        for pc, b in enumerate(self.blocks[:-2]):
            skipped = self.blocks[pc + 1]
            b.skips = (
                b.after == "branch"
                and b.condition is not None
                and b.target == pc + 2
                and skipped.after == "next"
                and skipped.wait is None
            )
        self._find_live()
        ends = [*order[1:], len(function.body)]
        accumulators.check(
            code,
            [
                (start, end, self._successors(i))
                for i, (start, end) in enumerate(zip(order, ends, strict=True))
            ],
        )

    def _successors(self, pc: int) -> tuple[int, ...]:
        block = self.blocks[pc]
        target = (block.target,) if block.after == "branch" else ()
        following = (
            (pc + 1,)
            if (block.after == "next" or block.condition is not None) and pc + 1 < len(self.blocks)
            else ()
        )
        return target + following

    def _decode(self, code: Code, block: Block, x: Instruction, number: dict[int, int]) -> None:
        block.last = x
        block.used |= code.uses(x) - block.defined
        block.defined |= code.results(x)
        if x.opcode == "bra":
            label = x.operands[0]
            if not isinstance(label, Sym) or label.name not in self.function.labels:
                raise code.fail(x, "a branch to a label that is not there")
            block.after, block.target = (
                "branch",
                number[self.function.labels[label.name]],
            )
        elif x.opcode in ("ret", "exit"):
            block.after = "ret"
        else:
            if x.opcode not in TABLE and x.opcode not in RENDEZVOUS:
                raise code.fail(x, f"{x.opcode} is not evaluated")
            if x.opcode in RENDEZVOUS:
                block.wait = RENDEZVOUS[x.opcode](code, x)
                block.guard = (
                    code.read(x, x.guard, "pred")
                    if x.guard is not None and block.wait is not None
                    else None
                )
            if x.opcode in TABLE:
                run = TABLE[x.opcode](code, x)
                if run is not None:
                    block.steps.append((x, guarded(code, x, run)))
            return
        if x.guard is not None:
            block.condition = code.read(x, x.guard, "pred")

    def _find_live(self) -> None:
        """Backward data flow: which registers a block's successors may read. Parameters and
        variables are named there too, which does no harm."""
        numbers: dict[str, int] = {}
        # E731
        mask = lambda names: sum(1 << numbers.setdefault(n, len(numbers)) for n in names)
        used, defined, live = (
            [mask(b.used) for b in self.blocks],
            [mask(b.defined) for b in self.blocks],
            [0] * len(self.blocks),
        )
        results = mask(r.name for r in self.function.results)
        successors = [self._successors(i) for i in range(len(self.blocks))]
        changed = True
        while changed:
            changed = False
            for i in range(len(self.blocks) - 1, -1, -1):
                b = self.blocks[i]
                out = results if b.after == "ret" else 0
                for s in successors[i]:
                    out |= live[s]
                new = used[i] | (out & ~defined[i])
                if new != live[i]:
                    live[i], changed = new, True
        names = list(numbers)
        for b, m in zip(self.blocks, live, strict=True):
            b.live = frozenset(n for i, n in enumerate(names) if m >> i & 1)

    def execute(self, frame: Frame) -> Frame | None:
        """Runs until every thread has returned; the threads with what they return."""
        return _Execution(self, frame).run()


def absorb(frame: Frame, which: np.ndarray, part: Frame, before: dict) -> None:
    """Gives a frame the registers that some of its threads (a mask) have changed as `part`, whose
    registers were `before`."""
    for name, new in part.registers.items():
        if new is before.get(name):
            continue
        new, old = bits(new), frame.registers.get(name)
        if not new.ndim and old is not None and not old.ndim and bits(old) == new:
            continue
        whole = (
            np.zeros((len(frame), *new.shape[1:]), new.dtype)
            if old is None or not old.ndim
            else bits(old).copy()
        )
        if old is not None and not old.ndim:
            whole[...] = bits(old)
        whole[which] = new
        frame.registers[name] = whole


def guarded(code: Code, x: Instruction, run: Run) -> Run:
    """`@p instruction`: for the threads whose predicate is true."""
    if x.guard is None:
        return run
    condition = code.read(x, x.guard, "pred")
    names = code.uses(x)

    def some(frame: Frame) -> None:
        which = condition(frame)
        if which.all():
            run(frame)
        elif which.any():
            part = frame.select(which, names)
            before = dict(part.registers)
            try:
                run(part)
            except Fault as fault:
                raise Fault(
                    str(fault),
                    None if fault.threads is None else np.flatnonzero(which)[fault.threads],
                ) from None
            absorb(frame, which, part, before)

    return some


class _Execution:
    """One function for one frame: frames wait at their blocks."""

    def __init__(self, routine: Routine, frame: Frame) -> None:
        self.routine, self.blocks, self.grid = routine, routine.blocks, frame.run
        self.pending: dict[int, list[Frame]] = {0: [frame]}
        # block -> (threads, events) when nobody could go on
        self.stuck: dict[int, tuple[int, int]] = {}
        self.done: list[Frame] = []

    def run(self) -> Frame | None:
        while self.pending:
            pc = self._next()
            block = self.blocks[pc]
            frame = merge(self.pending.pop(pc), block.live)
            if block.wait is not None:
                frame = self._meet(pc, block, frame)
            while frame is not None:
                pc, frame = self._block(pc, frame)
                if frame is not None and (self.blocks[pc].wait is not None or self.pending):
                    self.pending.setdefault(pc, []).append(frame)
                    frame = None
        self._check_barriers()
        return (
            merge(self.done, [r.name for r in self.routine.function.results]) if self.done else None
        )

    def _next(self) -> int:
        for pc in sorted(self.pending):
            if self.blocks[pc].wait is None or self.stuck.get(pc) != (
                sum(map(len, self.pending[pc])),
                self.grid.events,
            ):
                return pc
        pc = min(self.pending)
        frame = self.pending[pc][0]
        rest = sum(map(len, self.done))
        raise self.error(
            self.blocks[pc].steps[0][0] if self.blocks[pc].steps else self.blocks[pc].last,
            frame,
            Fault(
                f"{sum(sum(map(len, f)) for f in self.pending.values())} threads wait here or"
                " elsewhere for others that never come" + (f" ({rest} have ended)" if rest else ""),
                np.arange(len(frame)),
            ),
        )

    def _meet(self, pc: int, block: Block, frame: Frame) -> Frame | None:
        if block.guard is not None:
            waits = frame.spread(block.guard(frame))
            if not waits.all():
                self.release(pc, frame.select(~waits))
                if not waits.any():
                    return None
                frame = frame.select(waits)
        try:
            ready = block.wait(self, pc, frame)
        except Fault as fault:
            raise self.error(block.last, frame, fault) from None
        if ready is None:
            return None
        if ready is True or ready.all():
            self.stuck.pop(pc, None)
            return frame
        rest = frame.select(~ready)
        self.pending[pc] = [rest]
        self.stuck[pc] = (len(rest), self.grid.events)
        return frame.select(ready) if ready.any() else None

    def _block(self, pc: int, frame: Frame) -> tuple[int, Frame | None]:
        block = self.blocks[pc]
        self.grid.steps += 1
        if self.grid.steps > STEPS:
            raise self.error(
                block.last,
                frame,
                Fault(f"still running after {STEPS} blocks of instructions"),
            )
        x, acting = block.last, frame
        try:
            for x, run in block.steps:  # noqa: B007 - x is what an error names
                run(frame)
            if block.after == "next":
                return pc + 1, frame
            if block.after == "branch":
                if block.condition is None:
                    return block.target, frame
                taken = block.condition(frame)
                if taken.all():
                    return block.target, frame
                if not taken.any():
                    return pc + 1, frame
                if block.skips:  # no reason to part: some of the threads do a little more
                    inner, others = self.blocks[pc + 1], ~taken
                    part = frame.select(others, inner.used)
                    before = dict(part.registers)
                    acting = part
                    for x, run in inner.steps:  # noqa: B007
                        run(part)
                    absorb(frame, others, part, before)
                    return pc + 2, frame
                self.pending.setdefault(pc + 1, []).append(
                    frame.select(~taken, self.blocks[pc + 1].live)
                )
                return block.target, frame.select(taken, self.blocks[block.target].live)
            if block.condition is not None:
                leaving = frame.spread(block.condition(frame))
                if not leaving.all():
                    self._end(frame.select(leaving))
                    return pc + 1, frame.select(~leaving, self.blocks[pc + 1].live)
            self._end(frame)
            return pc, None
        except Fault as fault:
            raise self.error(x, acting, fault) from None
        except PtxError:
            raise
        except Exception as error:
            raise self.error(x, acting, Fault(f"{type(error).__name__}: {error}")) from error

    def release(self, pc: int, frame: Frame) -> None:
        """Threads that waited before block `pc` go on; they have met, so they run it without asking
        again."""
        pc, rest = self._block(pc, frame)
        if rest is not None:
            self.pending.setdefault(pc, []).append(rest)

    def _end(self, frame: Frame) -> None:
        if len(frame):
            self.done.append(frame)

    def _check_barriers(self) -> None:
        for barrier in self.grid.barriers.values():
            if barrier.parked:
                pc, frame, _ = barrier.parked[0]
                raise self.error(
                    self.blocks[pc].last,
                    frame,
                    Fault(
                        f"{sum(len(f) for _, f, _ in barrier.parked)} threads wait at the barrier"
                        " for others that never come, because they have ended or wait elsewhere",
                        np.arange(len(frame)),
                    ),
                )

    def error(self, x: Instruction | None, frame: Frame, fault: Fault) -> PtxError:
        where = f"line {x.line}: `{x.text}`: " if x else ""
        who = ""
        if fault.threads is not None and len(np.atleast_1d(fault.threads)):
            some = np.atleast_1d(fault.threads)
            some = some if len(frame.threads) > 1 else np.zeros(1, int)
            first = int(some[0])
            who = (
                f" [{len(some)} of {len(frame)} threads; the first is thread"
                f" {int(frame.tid[first])} of group {int(frame.ctaid[first])}]"
            )
        return PtxError(
            "kernel"
            f" {self.grid.kernel}{'' if self.grid.kernel == self.routine.function.name else ' in ' + self.routine.function.name},"
            f" {where}{fault}{who}"
        )


class GridRun:
    """Some groups of a launch that run together: their memory, barriers and special registers."""

    def __init__(
        self,
        image: Image,
        routine: Routine,
        first_group: int,
        groups_here: int,
        groups: int,
        threads: int,
        words: dict[str, np.ndarray],
        memory: GlobalMemory,
        dynamic_bytes: int,
        global_races: GlobalRaces,
    ) -> None:
        self.image, self.kernel, self.memory, self.global_races = (
            image,
            routine.function.name,
            memory,
            global_races,
        )
        self.first_group, self.groups_here, self.groups, self.threads = (
            first_group,
            groups_here,
            groups,
            threads,
        )
        self.dynamic_bytes, self.parameters = dynamic_bytes, words
        self.steps = self.events = 0
        self.barriers: dict[int, object] = {}
        self.mbarriers: dict[int, object] = {}  # by address
        self.queues: dict[str, object] = {}  # of asynchronous copies
        self.addresses = image.addresses | {name: v.ctypes.data for name, v in words.items()}
        start = local = _SHARED_START
        dynamic = []  # all names of the memory that the launch gives
        variables = {
            **image.module.variables,
            **{k: v for r in image.called(routine) for k, v in r.function.variables.items()},
        }
        for v in variables.values():
            if v.space == "shared" and v.nbytes:
                start = _place(start, v.align)
                self.addresses[v.name] = start
                start += v.nbytes
            elif v.space == "shared":
                dynamic.append(v)
            elif v.space == "local":
                local = _place(local, v.align)
                self.addresses[v.name] = local
                local += v.nbytes
        if dynamic:
            start = _place(start, max(16, *(v.align for v in dynamic)))
            self.addresses.update((v.name, start) for v in dynamic)
            start += dynamic_bytes
        warps = -(-threads // 32)
        first = min(
            (
                a
                for n, a in self.addresses.items()
                if n in variables and variables[n].space == "shared"
            ),
            default=start,
        )
        self.shared = Shared(
            groups_here,
            first,
            start - first,
            lambda nbytes: Races(
                groups_here, warps, nbytes if start > first else 0, image.unit(routine)
            ),
        )
        self.races = self.shared.races
        self.local = Local(groups_here * threads, local)
        self.spaces: dict[str, object] = {
            "global": memory,
            "const": memory,
            "shared": self.shared,
            "local": self.local,
        }

    def synchronized(self, frames: list[Frame] | None) -> None:
        """A barrier was completed, by the threads of these frames or by all."""
        self.events += 1
        warps = -(-self.threads // 32)
        if frames is None:
            self.races.barrier(*np.divmod(np.arange(self.groups_here * warps), warps))
        else:
            met = np.unique(
                np.concatenate([f.group * warps + (f.tid >> np.uint32(5)) for f in frames]).astype(
                    np.int64
                )
            )
            self.races.barrier(*np.divmod(met, warps))


def _place(at: int, align: int) -> int:
    """The next address that is a multiple of `align` and, to find what counts on more, of nothing
    larger."""
    at = -(-at // align) * align
    return at if at // align % 2 or align < 16 else at + align


def _parameter(variable: Variable, value) -> np.ndarray:
    """The bytes of a kernel's parameter: a word's, or those given."""
    data = (
        bytes(value)
        if isinstance(value, (bytes, bytearray))
        else int(value & (1 << 64) - 1).to_bytes(8, "little")
    )
    if len(data) < variable.nbytes:
        raise PtxError(
            f"parameter {variable.name} has {variable.nbytes} bytes, {len(data)} are given"
        )
    raw = np.zeros(len(data) + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    raw[skip : skip + len(data)] = np.frombuffer(data, np.uint8)
    return raw[skip : skip + len(data)]


class Image:
    """PTX text, ready to launch. Raises PtxError for text with instructions that have no meaning
    here, when a function with them is first used."""

    def __init__(self, text: str | bytes) -> None:
        self.module = parse(text.decode() if isinstance(text, bytes) else text)
        self.routines: dict[str, Routine] = {}
        self.addresses: dict[str, int] = {}
        self._data: list[np.ndarray] = []
        self.blocks: list[tuple[int, int]] = []  # (address, bytes) of the module's variables
        for v in self.module.variables.values():
            if v.space in ("global", "const"):
                raw = np.zeros(v.nbytes + v.align, np.uint8)
                skip = -raw.ctypes.data % v.align
                raw[skip : skip + v.nbytes] = np.frombuffer(v.data, np.uint8)
                self._data.append(raw)
                self.addresses[v.name] = raw.ctypes.data + skip
                self.blocks.append((raw.ctypes.data + skip, v.nbytes))

    def routine(self, name: str) -> Routine:
        if name not in self.routines:
            if name not in self.module.functions:
                raise PtxError(f"there is no function {name}")
            self.routines[name] = Routine(self.module, self.module.functions[name])
        return self.routines[name]

    def called(self, routine: Routine) -> list[Routine]:
        """The routine and everything that it may call."""
        found, stack = {}, [routine]
        while stack:
            r = stack.pop()
            if r.function.name not in found:
                found[r.function.name] = r
                stack += [
                    self.routine(o.name)
                    for x in r.function.body
                    if x.opcode == "call"
                    for o in x.operands
                    if isinstance(o, Sym) and o.name in self.module.functions
                ]
        return list(found.values())

    def unit(self, routine: Routine) -> int:
        """Bytes of the smallest access to shared memory."""
        sizes = [16]
        for x in (x for r in self.called(routine) for x in r.function.body):
            if x.opcode in ("ld", "st", "atom", "red") and not {
                "global",
                "local",
                "param",
                "const",
            } & set(x.modifiers):
                count = next((int(m[1]) for m in x.modifiers if m in ("v2", "v4", "v8")), 1)
                sizes.append(count * next(SIZES[m] for m in x.modifiers if m in SIZES))
            elif x.opcode == "cp" and "bulk" not in x.modifiers and len(x.operands) > 2:
                sizes.append(x.operands[2].value)
            elif x.opcode == "mbarrier":
                sizes.append(8)
        return min(sizes)

    def launch(
        self,
        kernel: str,
        groups: int,
        threads: int,
        words,
        memory: GlobalMemory,
        shared_bytes: int = 0,
    ) -> None:
        """Runs a kernel to its end. `words`: one 64-bit word per parameter (or an array of bytes
        for one that is longer); `shared_bytes`: dynamic shared memory of a group. Raises
        PtxError."""
        routine = self.routine(kernel)
        function = routine.function
        if not function.entry:
            raise PtxError(f"{kernel} is no kernel")
        if len(words) != len(function.params):
            raise PtxError(
                f"kernel {kernel} has {len(function.params)} parameters, {len(words)} are given"
            )
        if threads > function.max_threads:
            raise PtxError(
                f"kernel {kernel} is launched with {threads} threads, and written for"
                f" {function.max_threads}"
            )
        parameters = {p.name: _parameter(p, w) for p, w in zip(function.params, words, strict=True)}
        blocks = self.blocks + [(v.ctypes.data, v.nbytes) for v in parameters.values()]
        for address, nbytes in blocks:
            memory.add(address, nbytes)
        try:
            static = sum(
                v.nbytes
                for v in (*self.module.variables.values(), *function.variables.values())
                if v.space == "shared"
            )
            at_once = max(
                1,
                min(
                    THREADS_AT_ONCE // threads,
                    SHARED_AT_ONCE // (static + shared_bytes + 1024),
                ),
            )
            races = GlobalRaces(memory)
            with np.errstate(all="ignore"):
                for first in range(0, groups, at_once):
                    here = min(at_once, groups - first)
                    run = GridRun(
                        self,
                        routine,
                        first,
                        here,
                        groups,
                        threads,
                        parameters,
                        memory,
                        shared_bytes,
                        races,
                    )
                    routine.execute(Frame(run, np.arange(here * threads), {}))
        finally:
            for address, _ in blocks:
                memory.remove(address)
