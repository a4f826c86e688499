"""Threads that work together: barriers, shuffles, votes (PTX ISA, sections 9.7.9.6 and 9.7.13).

`.sync` instructions wait for the lanes of their mask; a barrier waits for the threads of a group.
An exited thread that somebody waits for is an error."""

from __future__ import annotations

import numpy as np

from test.ptx.memory import Fault
from test.ptx.syntax import Imm, Instruction
from test.ptx.table import RENDEZVOUS, Code, Run, instruction

U32 = np.uint32


def warps(frame) -> np.ndarray:
    """The number of every thread's warp within the run; groups begin new warps."""
    return frame.group * -(-frame.run.threads // 32) + (frame.tid >> U32(5)).astype(np.int64)


def lanes(frame) -> np.ndarray:
    return (frame.tid & U32(31)).astype(np.int64)


def together(mask_operand: int | None, unit: int = 32):
    """A rendezvous of whole warps (or warpgroups of `unit` threads), or of the lanes of the mask
    that operand number `mask_operand` is."""

    def prepare(code: Code, x: Instruction):
        read = code.read(x, mask_operand, "u32") if mask_operand is not None else None

        def wait(execution, pc, frame):
            n = frame.run.threads
            if len(frame) == n * frame.run.groups_here and (
                read is None or np.all(read(frame) == U32(0xFFFFFFFF))
            ):
                return True
            per = -(-n // unit)
            number = frame.group * per + frame.tid.astype(np.int64) // unit
            present = np.bincount(number, minlength=frame.run.groups_here * per)
            index = np.arange(len(present)) % per
            size = np.minimum(unit, n - index * unit)  # the last warp of a group may be smaller
            if read is None:
                return (present == size)[number]
            mask = frame.spread(read(frame))
            here = np.zeros(len(present), np.uint64)
            np.bitwise_or.at(here, number, np.uint64(1) << lanes(frame).astype(np.uint64))
            exist = (np.uint64(1) << size.astype(np.uint64)) - np.uint64(1)
            wanted = mask.astype(np.uint64) & exist[number]
            own = wanted >> lanes(frame).astype(np.uint64) & np.uint64(1)
            if not own.all():
                raise Fault(
                    "a thread is not in the mask of lanes that it gives",
                    np.flatnonzero(own == 0),
                )
            return (here[number] & wanted) == wanted

        return wait

    return prepare


for _opcode, _mask in (("shfl", 4), ("vote", 2), ("match", 2), ("redux", 2)):
    RENDEZVOUS[_opcode] = together(_mask)


def per_lane(frame, value) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values as [warp, 32], which lanes are here, row of each thread) of the warps in the
    frame."""
    number = warps(frame)
    _, row = np.unique(number, return_inverse=True)
    count = int(row.max()) + 1
    table = np.zeros((count, 32), np.asarray(value).dtype)
    here = np.zeros((count, 32), bool)
    table[row, lanes(frame)] = value
    here[row, lanes(frame)] = True
    return table, here, row


# -- shuffles
# ---------------------------------------------------------------------------------------------------------------
@instruction("shfl")
def shuffle(code: Code, x: Instruction) -> Run:
    """Section 9.7.9.6: d|p = a of lane j, if j is within the segment."""
    _, mode, _ = code.modifiers(x, "sync", ("up", "down", "bfly", "idx"), "b32")
    target, *second = code.items(x, 0)
    write, found = (
        code.write(x, target, "b32"),
        code.write(x, second[0], "pred") if second else None,
    )
    value, by, clamp = (
        code.read(x, 1, "b32"),
        code.read(x, 2, "b32"),
        code.read(x, 3, "b32"),
    )

    def run(frame):
        lane = lanes(frame)
        b, c = (frame.spread(v(frame)).astype(np.int64) for v in (by, clamp))
        b, limit, segment = b & 31, c & 31, c >> 8 & 31
        top, low = (lane & segment) | (limit & ~segment), lane & segment
        j = {
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
            "idx": low | (b & ~segment),
        }[mode]
        inside = j >= top if mode == "up" else j <= top
        j = np.where(inside, j, lane)
        mine = frame.spread(value(frame))
        if (
            len(frame) % 32 == 0
            and frame.run.threads % 32 == 0
            and lane[0] == 0
            and len(frame) == len(frame.run_of_warps())
        ):
            result = mine.reshape(-1, 32)[np.arange(len(frame)) >> 5, j]
        else:
            table, here, row = per_lane(frame, mine)
            missing = ~here[row, j]
            if missing.any():
                raise Fault(
                    "a shuffle reads a lane that does not take part",
                    np.flatnonzero(missing),
                )
            result = table[row, j]
        write(frame, result)
        if found is not None:
            found(frame, inside)

    return run


@instruction("vote", "activemask")
def vote(code: Code, x: Instruction) -> Run:
    if x.opcode == "activemask":
        write = code.write(x, 0, "b32")

        def active(frame):
            _, here, row = per_lane(frame, U32(0))
            write(frame, _mask(here)[row])

        return active
    _, mode, kind = code.modifiers(x, "sync", ("all", "any", "uni", "ballot"), ("pred", "b32"))
    write, condition = code.write(x, 0, kind), code.read(x, 1, "pred")

    def run(frame):
        table, here, row = per_lane(frame, frame.spread(condition(frame)))
        result = {
            "all": (table | ~here).all(1),
            "any": (table & here).any(1),
            "uni": (table | ~here).all(1) | ~(table & here).any(1),
            "ballot": _mask(table & here),
        }[mode]
        write(frame, result[row])

    return run


def _mask(table: np.ndarray) -> np.ndarray:
    return (table.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)


@instruction("match")
def match(code: Code, x: Instruction) -> Run:
    mode, _, kind = code.modifiers(x, ("any", "all"), "sync", ("b32", "b64"))
    target, *second = code.items(x, 0)
    write, found, value = (
        code.write(x, target, "b32"),
        code.write(x, second[0], "pred") if second else None,
        code.read(x, 1, kind),
    )

    def run(frame):
        mine = frame.spread(value(frame))
        table, here, row = per_lane(frame, mine)
        equal = (table[row] == mine[:, None]) & here[row]
        result = _mask(equal)
        if mode == "all":
            every = (equal == here[row]).all(1)
            result = np.where(every, result, U32(0))
            if found is not None:
                found(frame, every)
        write(frame, result)

    return run


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux")
def reduce(code: Code, x: Instruction) -> Run:
    _, operation, kind = code.modifiers(x, "sync", tuple(_REDUCE), ("u32", "s32", "b32"))
    write, value = code.write(x, 0, kind), code.read(x, 1, kind)

    def run(frame):
        table, here, row = per_lane(frame, frame.spread(value(frame)))
        neutral = {
            "min": np.iinfo(table.dtype).max,
            "max": np.iinfo(table.dtype).min,
            "and": -1,
        }.get(operation, 0)
        table[~here] = np.array(neutral).astype(table.dtype)
        write(frame, _REDUCE[operation].reduce(table, axis=1, dtype=table.dtype)[row])

    return run


@instruction("elect")
def elect(code: Code, x: Instruction) -> Run:
    """Section 9.7.13.15: one lane, here the first, gets true."""
    code.modifiers(x, "sync")
    target, predicate = code.items(x, 0)
    lane, chosen = code.write(x, target, "b32"), code.write(x, predicate, "pred")

    def run(frame):
        _, here, row = per_lane(frame, U32(0))
        first = here.argmax(1)[row]
        lane(frame, first.astype(np.uint32))
        chosen(frame, first == lanes(frame))

    return run


RENDEZVOUS["elect"] = together(1)


# -- barriers
# ---------------------------------------------------------------------------------------------------------------
class Barrier:
    """One of a group's 16 barriers, for all groups: who has arrived."""

    def __init__(self, grid) -> None:
        self.grid = grid
        self.count = np.zeros(grid.groups_here, np.int64)
        self.parked: list = []  # (block, frame, execution): they wait
        self.arrived: list = []  # frames that have gone on (bar.arrive)

    def complete(self, want: int) -> None:
        """Groups of which `want` threads are here go on. Raises Fault when there are more."""
        if (self.count > want).any():
            raise Fault(f"more than {want} threads of a group come to a barrier")
        complete = self.count == want
        if not complete.any():
            return
        released = [(at, f.select(complete[f.group]), e) for at, f, e in self.parked]
        left = [(at, f.select(~complete[f.group]), e) for at, f, e in self.parked]
        self.grid.synchronized(
            [f for _, f, _ in released] + [f.select(complete[f.group], ()) for f in self.arrived]
        )
        self.arrived = [p for f in self.arrived if len(p := f.select(~complete[f.group], ()))]
        self.parked = [p for p in left if len(p[1])]
        self.count[complete] = 0
        for at, f, execution in released:
            if len(f):
                execution.release(at, f)


@instruction("bar", "barrier")
def barrier(code: Code, x: Instruction) -> Run | None:
    """The waiting is `meet_at_barrier`'s; bar.red would have a value too."""
    if "red" in x.modifiers:
        raise code.fail(x, "bar.red is not evaluated")
    if x.modifiers[:1] == ("warp",):
        return lambda frame: frame.run.races.tick(*frame.warps())
    if "arrive" in x.modifiers:
        number, expected = code.read(x, 0, "u32"), code.read(x, 1, "u32")

        def arrive(frame):
            want = int(np.max(expected(frame)))
            barrier = _barrier(frame, number(frame))
            barrier.count += np.bincount(frame.group, minlength=frame.run.groups_here)
            barrier.arrived.append(frame)
            frame.run.events += 1
            barrier.complete(want)

        return arrive
    return None


def _barrier(frame, number) -> Barrier:
    values = np.unique(number)
    if len(values) > 1:
        raise Fault("threads that run together give different barriers")
    if int(values[0]) > 15:
        raise Fault(f"there is no barrier {int(values[0])}")
    return frame.run.barriers.setdefault(int(values[0]), Barrier(frame.run))


def meet_at_barrier(code: Code, x: Instruction):
    if x.modifiers[:1] == ("warp",):
        return together(0)(code, x)  # `barrier` does the rest
    if "cluster" in x.modifiers or "arrive" in x.modifiers:
        return None  # clusters have one group
    number = code.read(x, 0, "u32")
    expected = code.read(x, 1, "u32") if len(x.operands) > 1 else None
    if expected is not None and isinstance(x.operands[1], Imm) and x.operands[1].value % 32:
        raise code.fail(x, "the number of threads at a barrier is a multiple of 32")

    def wait(execution, pc, frame):
        grid = frame.run
        barrier = _barrier(frame, number(frame))
        everybody = expected is None
        if everybody and len(frame) == grid.threads * grid.groups_here and not barrier.count.any():
            grid.synchronized(None)
            return True
        want = grid.threads if everybody else int(np.max(expected(frame)))
        barrier.count += np.bincount(frame.group, minlength=grid.groups_here)
        barrier.parked.append((pc, frame, execution))
        barrier.complete(want)
        return None

    return wait


RENDEZVOUS["bar"] = RENDEZVOUS["barrier"] = meet_at_barrier
