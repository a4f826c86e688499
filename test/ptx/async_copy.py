"""Asynchronous copies (PTX ISA, sections 9.7.9.25 and 9.7.13.16): cp.async and its groups, mbarrier
objects, cp.async.bulk with and without tensor maps.

A copy is made when it is issued, but until somebody has waited for it the memory counts as being
written (races.py), so a missing wait is found."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from test.ptx.memory import STORAGE, Fault
from test.ptx.movement import locate
from test.ptx.races import COPY, IN_FLIGHT
from test.ptx.syntax import Imm, Instruction, Mem
from test.ptx.table import RENDEZVOUS, Code, Run, instruction
from test.ptx.tensor_map import TensorMap


# -- groups of copies
# ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Copies:
    """What one instruction started: `group[i]`: the number of thread i's group; `place`: where it
    writes in shared memory."""

    frame: object
    group: np.ndarray
    place: np.ndarray
    nbytes: int
    data: np.ndarray | None


@dataclass(slots=True)
class Queue:
    """The copies of a run that nobody has waited for; `committed`: of every thread, how many groups
    it has closed."""

    committed: np.ndarray
    pending: list[Copies] = field(default_factory=list)


def queue_of(frame, kind: str) -> Queue:
    return frame.run.queues.setdefault(
        kind, Queue(np.zeros(frame.run.groups_here * frame.run.threads, np.int64))
    )


def complete(frame, queue: Queue, before: np.ndarray, finish) -> None:
    """Completes the copies of the frame's threads in groups below `before` (one number per thread
    of the run; 0: none)."""
    left = []
    for c in queue.pending:
        done = c.group < before[c.frame.threads]
        if done.any():
            finish(c.frame if done.all() else c.frame.select(done, ()), c, done)
        if not done.all():
            left.append(
                c
                if not done.any()
                else Copies(
                    c.frame.select(~done, ()),
                    c.group[~done],
                    c.place[~done],
                    c.nbytes,
                    None if c.data is None else c.data[~done],
                )
            )
    queue.pending = left


def _land(frame, copies: Copies, done) -> None:
    """The bytes of a cp.async arrive."""
    shared = frame.run.shared
    shared.bytes.views[copies.nbytes][copies.place[done] // copies.nbytes] = copies.data[done]
    shared.races.finish_write(frame, copies.place[done], copies.nbytes)


@instruction("cp")
def copy(code: Code, x: Instruction) -> Run | None:
    rest = [m for m in x.modifiers if not m.startswith("L2::")]
    if rest[:2] == ["async", "bulk"] or rest[:3] == ["reduce", "async", "bulk"]:
        return bulk(code, x, rest)
    if rest[:2] == ["async", "commit_group"]:

        def commit(frame):
            queue_of(frame, "cp.async").committed[frame.threads] += 1

        return commit
    if rest[:2] in (["async", "wait_group"], ["async", "wait_all"]):
        keep = x.operands[0].value if rest[1] == "wait_group" else 0

        def wait(frame):
            queue = queue_of(frame, "cp.async")
            if rest[1] == "wait_all":
                queue.committed[frame.threads] += 1
            before = np.zeros(len(queue.committed), np.int64)
            before[frame.threads] = queue.committed[frame.threads] - keep
            complete(frame, queue, before, _land)

        return wait
    if rest[:2] == ["async", "mbarrier"]:
        return _arrive_after_copies(code, x)
    if (
        rest[0] != "async"
        or rest[1] not in ("ca", "cg")
        or rest[2] not in ("shared", "shared::cta")
        or rest[3:] != ["global"]
    ):
        raise code.fail(x, "this copy is not evaluated")
    target, source, size = code.address(x, 0), code.address(x, 1), x.operands[2].value
    if size not in (4, 8, 16) or rest[1] == "cg" and size != 16:
        raise code.fail(x, "4, 8 or 16 bytes are copied, by .cg 16")
    have = skip = None
    if len(x.operands) > 3:
        operand = x.operands[3]
        is_skip = not isinstance(operand, Imm) and code.kind(operand.name) == "pred"
        have, skip = (None, code.read(x, 3, "pred")) if is_skip else (code.read(x, 3, "u32"), None)

    def start(frame):
        run = frame.run
        place = run.shared.place(frame, frame.spread(target(frame)), size)
        where = frame.spread(source(frame))
        count = np.full(len(frame), size, np.uint32) if have is None else frame.spread(have(frame))
        if skip is not None:
            count = np.where(skip(frame), np.uint32(0), count)
        if (count > size).any():
            raise Fault(f"more than {size} bytes are to be read", np.flatnonzero(count > size))
        data = np.zeros(len(frame), STORAGE[size])
        raw = data.view(np.uint8).reshape(len(frame), size)
        for n in np.unique(count):
            which = count == n
            if n == size:
                data[which] = run.memory.load(frame, where[which], size, 1)[0]
            elif n:  # bytes one by one, so that nothing behind the end is touched
                run.memory.check(where[which], int(n))
                for i in range(int(n)):
                    raw[which, i] = run.memory.load(frame, where[which] + i, 1, 1)[0]
        run.races.start_write(frame, place, size)
        queue = queue_of(frame, "cp.async")
        queue.pending.append(Copies(frame, queue.committed[frame.threads], place, size, data))

    return start


# -- mbarrier
# ------------------------------------------------------------------------------------------------------------------
class Barrier:
    """mbarrier objects at one address, for all groups (section 9.7.13.16.2). A phase ends when no
    arrivals and no bytes are awaited."""

    def __init__(self, run) -> None:
        n = run.groups_here
        self.run = run
        self.there = np.zeros(n, bool)
        self.expected, self.pending, self.bytes, self.phase = (
            np.zeros(n, np.int64) for _ in range(4)
        )
        warps = -(-run.threads // 32)
        self.clock = np.zeros((n, warps), np.int32)  # what those who arrived knew
        self.released = np.zeros((n, warps), np.int32)  # what the last phase's end tells
        # (group, warp, units) of bulk copies of this phase
        self.landing: list[tuple[int, int, np.ndarray]] = []

    def arrive(self, frame, count) -> None:
        group = frame.group
        left = self.pending - np.bincount(
            group, weights=frame.spread(count), minlength=len(self.pending)
        ).astype(np.int64)
        if (left < 0).any():
            raise Fault(
                "more arrivals at an mbarrier than it expects in a phase",
                np.flatnonzero(left[group] < 0),
            )
        self.tell(frame)
        self.pending = left

    def tell(self, frame) -> None:
        races = self.run.races
        group, warp = frame.warps()
        np.maximum.at(self.clock, group, races.known[group, warp])
        races.tick(group, warp)

    def complete(self) -> None:
        """Ends phases that have everything."""
        over = self.there & (self.pending == 0) & (self.bytes == 0)
        if not over.any():
            return
        self.released[over] = self.clock[over]
        self.clock[over] = 0
        self.phase[over] += 1
        self.pending[over] = self.expected[over]
        left = []
        for group, warp, units in self.landing:
            if over[group]:
                mine = units[self.run.races.write_time[units] == IN_FLIGHT]
                self.run.races.write_time[mine] = self.run.races.known[group, warp, warp] - 1
            else:
                left.append((group, warp, units))
        self.landing = left
        self.run.events += 1


def barriers(frame, address, check: bool = True):
    """(barrier, frame of the threads that mean it) for every address. Raises Fault where there is
    none."""
    address = frame.spread(address)
    for a in np.unique(address):
        which = address == a
        part = frame if which.all() else frame.select(which)
        barrier = frame.run.mbarriers.get(int(a))
        if barrier is None:
            barrier = frame.run.mbarriers[int(a)] = Barrier(frame.run)
        if check:
            if not barrier.there[part.group].all():
                raise Fault(
                    "there is no mbarrier here: nobody has initialized it",
                    np.flatnonzero(which),
                )
            place = frame.run.shared.place(part, np.full(len(part), a), 8)
            races = frame.run.races
            units = races._units(place, 8)
            group, warp, lane = races._who(part, None)
            if not races._written_before(units, group, warp, lane).all():
                raise Fault(
                    "an mbarrier is used by a thread that does not know yet that it was"
                    " initialized: a barrier is missing",
                    np.flatnonzero(which),
                )
        yield barrier, part, which


@instruction("mbarrier")
def mbarrier(code: Code, x: Instruction) -> Run:
    what = x.modifiers[0]
    rest = set(x.modifiers[1:]) - {
        "release",
        "acquire",
        "relaxed",
        "cta",
        "cluster",
        "shared",
        "shared::cta",
        "shared::cluster",
        "b64",
        "parity",
        "expect_tx",
        "noComplete",
    }
    if rest:
        raise code.fail(x, f".{min(rest)} is not evaluated")
    generic = not any(m.startswith("shared") for m in x.modifiers)
    at = next(i for i, o in enumerate(x.operands) if isinstance(o, Mem))
    plain = code.address(x, at)

    def address(frame):
        value = frame.spread(plain(frame))
        return locate(frame, "", value)[1] if generic else value

    expects = "expect_tx" in x.modifiers
    amount = (
        code.read(x, at + 1, "u32")
        if len(x.operands) > at + 1 and what not in ("test_wait", "try_wait")
        else None
    )
    if what == "init":

        def init(frame):
            for barrier, part, which in barriers(frame, address(frame), check=False):
                frame.run.races.write(
                    part, frame.run.shared.place(part, address(frame)[which], 8), 8
                )
                g, count = (
                    part.group,
                    frame.spread(amount(frame))[which].astype(np.int64),
                )
                if (count < 1).any():
                    raise Fault(
                        "an mbarrier expects at least one arrival",
                        np.flatnonzero(which),
                    )
                (
                    barrier.there[g],
                    barrier.expected[g],
                    barrier.pending[g],
                    barrier.bytes[g],
                    barrier.phase[g],
                ) = (
                    True,
                    count,
                    count,
                    0,
                    0,
                )

        return init
    if what == "inval":

        def invalidate(frame):
            for barrier, part, _ in barriers(frame, address(frame)):
                barrier.there[part.group] = False

        return invalidate
    if what in ("expect_tx", "complete_tx"):

        def transact(frame):
            for barrier, part, which in barriers(frame, address(frame)):
                np.add.at(
                    barrier.bytes,
                    part.group,
                    (1 if what == "expect_tx" else -1)
                    * frame.spread(amount(frame))[which].astype(np.int64),
                )
                barrier.complete()

        return transact
    if what in ("arrive", "arrive_drop"):
        write = code.write(x, 0, "b64") if at else None

        def arrive(frame):
            state = np.zeros(len(frame), np.uint64)
            for barrier, part, which in barriers(frame, address(frame)):
                state[which] = barrier.phase[part.group]
                number = (
                    np.uint32(1)
                    if amount is None or expects
                    else frame.spread(amount(frame))[which]
                )
                if expects:
                    np.add.at(
                        barrier.bytes,
                        part.group,
                        frame.spread(amount(frame))[which].astype(np.int64),
                    )
                if what == "arrive_drop":
                    np.subtract.at(barrier.expected, part.group, np.int64(1))
                barrier.arrive(part, number)
                barrier.complete()
            if write is not None:
                write(frame, state)

        return arrive
    if what in (
        "test_wait",
        "try_wait",
    ):  # see wait_for_phase: who is here has nothing to wait for
        write = code.write(x, 0, "pred")

        def passed(frame):
            for barrier, part, _ in barriers(frame, address(frame)):
                races = frame.run.races
                group, warp = part.warps()
                races.known[group, warp] = np.maximum(
                    races.known[group, warp], barrier.released[group]
                )
            write(frame, np.bool_(True))

        return passed
    if what == "pending_count":
        raise code.fail(x, "mbarrier.pending_count is not evaluated")
    raise code.fail(x, f"mbarrier.{what} is not known")


def wait_for_phase(code: Code, x: Instruction):
    """Threads wait until the phase is over; polling would only burn time."""
    if x.modifiers[0] not in ("test_wait", "try_wait"):
        return None
    generic = not any(m.startswith("shared") for m in x.modifiers)
    parity = "parity" in x.modifiers
    plain, state = code.address(x, 1), code.read(x, 2, "u32" if parity else "b64")

    def wait(execution, pc, frame):
        value = frame.spread(plain(frame))
        value = locate(frame, "", value)[1] if generic else value
        ready = np.zeros(len(frame), bool)
        for barrier, part, which in barriers(frame, value):
            wanted = frame.spread(state(frame))[which].astype(np.int64)
            ready[which] = (
                (barrier.phase[part.group] & 1) != (wanted & 1)
                if parity
                else barrier.phase[part.group] > wanted
            )
        return ready

    return wait


RENDEZVOUS["mbarrier"] = wait_for_phase


def _arrive_after_copies(code: Code, x: Instruction) -> Run:
    """cp.async.mbarrier.arrive: the thread arrives when its copies are there."""
    address, extra = code.address(x, 0), "noinc" not in x.modifiers

    def run(frame):
        queue = queue_of(frame, "cp.async")
        before = np.zeros(len(queue.committed), np.int64)
        before[frame.threads] = np.iinfo(np.int64).max
        complete(frame, queue, before, _land)
        for barrier, part, _ in barriers(frame, address(frame)):
            if extra:
                np.add.at(barrier.pending, part.group, 1)
            barrier.arrive(part, np.uint32(1))
            barrier.complete()

    return run


# -- bulk copies
# ------------------------------------------------------------------------------------------------------------------
def bulk(code: Code, x: Instruction, rest: list[str]) -> Run | None:
    if rest[2:3] == ["commit_group"]:

        def commit(frame):
            queue_of(frame, "bulk").committed[frame.threads] += 1

        return commit
    if rest[2:3] == ["wait_group"]:
        keep = x.operands[0].value

        def finish(part, copies, done):
            for frame_group, tid, place in zip(
                part.group, part.tid, copies.place[done], strict=True
            ):
                part.run.races.finish_read(int(frame_group), int(tid) >> 5, place)

        def wait(frame):
            queue = queue_of(frame, "bulk")
            before = np.zeros(len(queue.committed), np.int64)
            before[frame.threads] = queue.committed[frame.threads] - keep
            complete(frame, queue, before, finish)

        return wait
    if rest[2:3] == ["prefetch"]:
        return None
    if "reduce" in rest or any(
        m.startswith("multicast") or "im2col" in m or "tile::" in m or m == "cp_mask" for m in rest
    ):
        raise code.fail(x, "this form of bulk copy is not evaluated")
    tensor = "tensor" in rest
    spaces = [m for m in rest if m.split("::")[0] in ("shared", "global")]
    if spaces not in (
        ["shared::cluster", "global"],
        ["shared::cta", "global"],
        ["global", "shared::cta"],
    ):
        raise code.fail(x, "this direction of a bulk copy is not evaluated")
    if spaces[0] == "global":
        return _bulk_store(code, x, tensor)
    return _bulk_load(code, x, tensor)


def _boxes(code: Code, x: Instruction, number: int):
    """The tensor map and coordinates of `[map, {c0, …}]`: a function of the frame that gives (map,
    coordinates) per thread."""
    operand = x.operands[number]
    if operand.index is None:
        raise code.fail(x, "coordinates were expected")
    base, where = (
        code.address(x, number),
        [code.read(x, c, "s32") for c in operand.index.items],
    )

    def read(frame):
        address = frame.spread(base(frame))
        coordinates = np.stack([frame.spread(c(frame)) for c in where], axis=-1).astype(np.int64)
        return [
            (TensorMap.at(frame.run, int(a)), c) for a, c in zip(address, coordinates, strict=True)
        ]

    return read


def _one(frame, i: int):
    which = np.zeros(len(frame), bool)
    which[i] = True
    return frame.select(which, ())


def _bulk_load(code: Code, x: Instruction, tensor: bool) -> Run:
    target = code.address(x, 0)
    if tensor:
        boxes, barrier_at = _boxes(code, x, 1), code.address(x, 2)
    else:
        source, size, barrier_at = (
            code.address(x, 1),
            code.read(x, 2, "u32"),
            code.address(x, 3),
        )

    def load(frame):
        run = frame.run
        to = frame.spread(target(frame))
        maps = boxes(frame) if tensor else None
        for barrier, part, which in barriers(frame, barrier_at(frame)):
            for i in np.flatnonzero(which):
                one = _one(frame, i)
                if tensor:
                    data, offsets = maps[i][0].load(run, maps[i][1], int(to[i]))
                else:
                    n, start = (
                        int(frame.spread(size(frame))[i]),
                        int(frame.spread(source(frame))[i]),
                    )
                    if n % 16 or start % 16 or int(to[i]) % 16:
                        raise Fault(
                            "bulk copies move multiples of 16 bytes between addresses that are"
                            " multiples of 16",
                            np.array([i]),
                        )
                    data, offsets = read_global(run, start, n), np.arange(n)
                base = int(run.shared.place(one, np.array([to[i]]), 16)[0])
                if len(offsets):
                    run.shared.place(one, np.array([int(to[i]) + int(offsets.max()) & ~15]), 16)
                place = base + offsets
                run.shared.raw[place] = data
                units = np.unique(place // run.races.unit)
                _begin_write(run, one, units)
                barrier.landing.append((int(one.group[0]), int(one.tid[0]) >> 5, units))
                barrier.bytes[one.group] -= len(data)
            barrier.tell(part)
            barrier.complete()

    return load


def _begin_write(run, one, units) -> None:
    races = run.races
    group, warp, _ = races._who(one, None)
    races._check_write(one, units[None], group, warp, np.array([COPY]))
    races._set(units[None], warp, np.array([COPY]), np.array([IN_FLIGHT]))


def read_global(run, start: int, nbytes: int) -> np.ndarray:
    if not nbytes:
        return np.zeros(0, np.uint8)
    run.memory.check(np.array([start]), nbytes)
    return run.memory.load(None, np.arange(start, start + nbytes), 1, 1)[0]


def write_global(run, addresses: np.ndarray, data: np.ndarray) -> None:
    if len(data):
        run.memory.store(None, addresses, [data], 1)


def _bulk_store(code: Code, x: Instruction, tensor: bool) -> Run:
    source = code.address(x, 1)
    if tensor:
        boxes = _boxes(code, x, 0)
    else:
        target, size = code.address(x, 0), code.read(x, 2, "u32")

    def store(frame):
        run, queue = frame.run, queue_of(frame, "bulk")
        start = frame.spread(source(frame))
        maps = boxes(frame) if tensor else None
        for i in range(len(frame)):
            one = _one(frame, i)
            base = int(run.shared.place(one, np.array([start[i]]), 16)[0])
            if tensor:
                addresses, offsets = maps[i][0].store(run, maps[i][1], int(start[i]))
            else:
                n = int(frame.spread(size(frame))[i])
                if n % 16 or int(frame.spread(target(frame))[i]) % 16:
                    raise Fault(
                        "bulk copies move multiples of 16 bytes between addresses that are"
                        " multiples of 16",
                        np.array([i]),
                    )
                addresses, offsets = (
                    int(frame.spread(target(frame))[i]) + np.arange(n),
                    np.arange(n),
                )
            if len(offsets):
                run.shared.place(one, np.array([int(start[i]) + int(offsets.max()) & ~15]), 16)
            units = np.unique((base + offsets) // run.races.unit)
            run.races.start_read(one, units[None])
            write_global(run, addresses, run.shared.raw[base + offsets])
            place = np.empty(1, object)
            place[0] = units
            queue.pending.append(Copies(one, queue.committed[one.threads], place, 0, None))

    return store
