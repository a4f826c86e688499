"""One process per device: the collectives of compiled programs over torch.distributed's process groups.

    link().exchange(c, inputs, outputs)

A collective is made of messages between the members of its group: everybody's block to everybody (all_gather), a block for each (all_to_all), or from
one to one. Sums are formed here and not in the transport, in the order of ranks, so that the results are those of virtual devices, bit by bit,
and every element type works; an all-reduce moves 2(n-1)/n of its bytes as the best algorithms do. Every message starts with a line that says which
collective it belongs to, so that two ranks that do not run the same one find out.

The groups are the program's own (one per list of ranks, made when first used): what the user does with other groups at the same time does not
interfere. All communication runs on one thread, in the order in which it was started; the program waits for it, or overlaps it.

Failures: ranks publish where they are in torch.distributed's store, once a second (`_Board`). When a message fails, does not come in time, or another
rank reports a failure, the ranks that are gone, silent or elsewhere are named. A process whose link has failed has to be started anew.
"""
from __future__ import annotations

import atexit
import datetime
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist

from torch_hlo import config
from torch_hlo.hlo import collective
from torch_hlo.hlo.collective import Collective, CollectiveError, ProgramInfo

_HEADER = 192  # bytes of a message's first line
_SMALL = 1 << 16  # bytes received up to which an all-reduce is one round of everything to everybody
_BEAT = 1.0  # seconds between two signs of life
_SILENT = 3.5  # seconds without one after which a rank counts as gone
Arrays = Sequence[np.ndarray]
_Layout = Sequence[tuple[tuple[int, ...], np.dtype]]  # shapes and types of the arrays of a message


def link() -> ProcessLink:
    """The link of this process in torch.distributed's default group; made when first asked for."""
    global _link
    world = dist.group.WORLD
    with _lock:
        if _link is None or _link.world is not world:
            _link = ProcessLink(world)
        return _link


_link: ProcessLink | None = None
_lock = threading.Lock()


def _forget() -> None:
    global _link, _lock
    _link, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


class _Job:
    """Something that the communication thread does."""

    def __init__(self, do: Callable[[], None], what: str) -> None:
        self.do, self.what, self.error, self.done = do, what, None, threading.Event()


class ProcessLink:
    """The Communicator of a process; see the module's docstring."""

    replicas = 1

    def __init__(self, world) -> None:
        self.world = world
        self.device, self.partitions = dist.get_rank(), dist.get_world_size()
        self.timeout = config.get("COLLECTIVE_TIMEOUT") or 365 * 86400.0
        self.groups: dict[tuple[int, ...], object] = {}
        self.counts: dict[tuple[int, ...], int] = {}
        self.program = "a program"
        self.failure: CollectiveError | None = None
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.board = _Board(self.device, self.partitions, self._told)
        self.waiting: _Job | None = None
        threading.Thread(target=self._communicate, daemon=True, name="torch_hlo communication").start()

    # -- programs

    def begin(self, program: ProgramInfo) -> None:
        """A program with collectives starts: if it is one for all devices, the ranks make sure that it is the same one."""
        self.program = collective.program_name(program.name)
        if program.devices > 1:
            if program.devices != self.partitions:
                raise CollectiveError(f"{self.program} is for {program.devices} devices, torch.distributed runs {self.partitions} processes")
            self._wait(self._start(lambda: self._agree(program), f"the comparison of programs before {program.first} of {self.program}"))

    def _agree(self, program: ProgramInfo) -> None:
        everybody = tuple(range(self.partitions))
        mine = np.frombuffer(program.fingerprint, np.uint8)
        prints = [p.tobytes() for (p,) in self._all_gather(everybody, "program", [mine], [((len(mine),), mine.dtype)])]
        if len(set(prints)) == 1:
            return
        text = np.frombuffer(program.text().encode(), np.uint8)
        length = np.array([len(text)])
        lengths = [int(n[0]) for (n,) in self._all_gather(everybody, "length", [length], [((1,), length.dtype)])]
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(text)] = text
        found = self._all_gather(everybody, "text", [padded], [(padded.shape, padded.dtype)])
        raise CollectiveError(difference(self.program, prints, [t.tobytes()[:n].decode() for (t,), n in zip(found, lengths, strict=True)]))

    # -- collectives

    def exchange(self, c: Collective, inputs: Arrays, outputs: Arrays) -> None:
        self.start(c, inputs, outputs)()

    def start(self, c: Collective, inputs: Arrays, outputs: Arrays) -> Callable[[], None]:
        if collective.solo(c, self, inputs, outputs):
            return collective.nothing
        group = c.group(self.device, self.replicas, self.partitions)
        number = self.counts[group] = self.counts.get(group, 0) + 1
        sizes = ", ".join(str(list(a.shape)) for a in inputs)
        what = f"{c.op}({', '.join(c.dtypes)}) of sizes {sizes}, the {number}. of ranks {','.join(map(str, group))}"
        tag = f"{number} {c.op} {','.join(c.dtypes)} {sizes} {c.dimension} {c.reduction if c.reduction in collective.UFUNCS else ''}"
        job = self._start(lambda: _RUN[c.op](self, c, group, tag, inputs, outputs), f"{what}, in {self.program}")
        return lambda: self._wait(job)

    def _start(self, do: Callable[[], None], what: str) -> _Job:
        if self.failure is not None:
            raise CollectiveError(f"{what}: this process must be started anew, since {self.failure}") from self.failure
        job = _Job(do, what)
        self.jobs.put(job)
        return job

    def _wait(self, job: _Job) -> None:
        while not job.done.wait(timeout=0.2):
            if self.failure is not None:
                raise CollectiveError(f"{job.what}: {self.failure}") from self.failure
        if job.error is not None:
            raise job.error

    def _communicate(self) -> None:
        while True:
            job = self.jobs.get()
            self.board.at(job.what)
            try:
                if self.failure is None:
                    job.do()
                else:
                    job.error = CollectiveError(f"{job.what}: {self.failure}")
            except CollectiveError as error:  # the ranks disagree: everybody finds out by itself
                job.error = error
                self.board.fail(str(error), soon=False)
                self.failure = error
            except Exception as error:
                why = self.board.culprits(job.what, error)
                self.failure = CollectiveError(why)
                job.error = CollectiveError(f"{job.what}: {why}")
                job.error.__cause__ = error
                self.board.fail(why)
            else:
                self.board.at("")
            job.done.set()

    def _told(self, why: str) -> None:
        """Another rank has reported a failure: do not wait for the transport to find out."""
        if self.failure is None:
            self.failure = CollectiveError(why)

    # -- messages. Ranks are positions in `group`; torch numbers the members of a group in ascending order.

    def _torch_group(self, group: tuple[int, ...]):
        members = tuple(sorted(group))
        found = self.groups.get(members)
        if found is None:
            limit = datetime.timedelta(seconds=self.timeout)
            found = self.groups[members] = dist.new_group(list(members), limit, "gloo", use_local_synchronization=True, group_desc="torch_hlo")
        return found, [members.index(d) for d in group]

    def _all_gather(self, group: tuple[int, ...], tag: str, arrays: Arrays, layout: _Layout) -> list[list[np.ndarray]]:
        """Everybody's arrays, by rank; all have the same layout."""
        found, place = self._torch_group(group)
        mine = torch.from_numpy(_packed(tag, [arrays]))
        rows = [torch.empty_like(mine) for _ in group]
        dist.all_gather(rows, mine, group=found)
        return [self._unpacked(group[rank], tag, rows[p].numpy(), layout) for rank, p in enumerate(place)]

    def _all_to_all(self, group: tuple[int, ...], tag: str, arrays: Sequence[Arrays], layout: _Layout) -> list[list[np.ndarray]]:
        """`arrays[rank]` goes to that rank; what the ranks sent here, which is of `layout`."""
        found, place = self._torch_group(group)
        order = sorted(range(len(group)), key=place.__getitem__)
        out = [_HEADER + sum(a.nbytes for a in arrays[rank]) for rank in order]
        size = _HEADER + _nbytes(layout)
        received = torch.empty(size * len(group), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.from_numpy(_packed(tag, [arrays[rank] for rank in order])), [size] * len(group), out, group=found)
        return [self._unpacked(group[rank], tag, received.numpy()[p * size:(p + 1) * size], layout) for rank, p in enumerate(place)]

    def _one_to_one(self, group: tuple[int, ...], tag: str, targets: Sequence[int], source: int | None, arrays: Arrays, layout: _Layout):
        """Send to these devices and receive from `source` (devices of the whole job)."""
        found, _ = self._torch_group(group)
        message = torch.from_numpy(_packed(tag, [arrays]))
        received = torch.empty(_HEADER + _nbytes(layout), dtype=torch.uint8)
        works = [dist.isend(message, target, group=found) for target in targets]
        if source is not None:
            works.append(dist.irecv(received, source, group=found))
        for work in works:
            work.wait()
        return None if source is None else self._unpacked(source, tag, received.numpy(), layout)

    def _unpacked(self, sender: int, tag: str, message: np.ndarray, layout: _Layout) -> list[np.ndarray]:
        header = message[:_HEADER].tobytes()
        if header != _header(tag):
            raise CollectiveError(f"{self.program}: the ranks do not run the same collectives: rank {self.device} is in its number {tag}; "
                                  f"rank {sender} in its number {header.rstrip(bytes(1)).decode(errors='replace')}")
        arrays = []
        at = _HEADER
        for dims, dtype in layout:
            n = int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
            arrays.append(np.frombuffer(message[at:at + n].tobytes() if at % dtype.itemsize else message[at:at + n], dtype).reshape(dims))
            at += n
        return arrays


def _header(tag: str) -> bytes:
    data = tag.encode()
    if len(data) > _HEADER:
        data = data[: _HEADER - 16] + hashlib.blake2b(data, digest_size=8).hexdigest().encode()
    return data.ljust(_HEADER, b"\0")


def _packed(tag: str, messages: Sequence[Arrays]) -> np.ndarray:
    """Messages, each with its header, one after the other."""
    result = np.empty(sum(_HEADER + sum(a.nbytes for a in arrays) for arrays in messages), np.uint8)
    header = np.frombuffer(_header(tag), np.uint8)
    at = 0
    for arrays in messages:
        for part in (header, *arrays):
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            result[at:at + flat.size] = flat
            at += flat.size
    return result


def _nbytes(layout: _Layout) -> int:
    return sum(int(np.prod(dims, dtype=np.int64)) * dtype.itemsize for dims, dtype in layout)


def _layout(arrays: Arrays) -> _Layout:
    return [(a.shape, a.dtype) for a in arrays]


# -- the collectives: (link, collective, group, tag, inputs, outputs)


def _whole_inputs(link: ProcessLink, c: Collective, group, tag: str, inputs: Arrays, outputs: Arrays) -> None:
    """Everybody gets everything, and does its own part of the work."""
    rows = link._all_gather(group, tag, inputs, _layout(inputs))
    rank = group.index(link.device)
    everybody = [outputs if r == rank else [np.empty_like(o) for o in outputs] for r in range(len(group))]
    for task in c.tasks(group, rows, everybody):
        task()


def _all_reduce(link: ProcessLink, c: Collective, group, tag: str, inputs: Arrays, outputs: Arrays) -> None:
    n, rank = len(group), group.index(link.device)
    if n * sum(i.nbytes for i in inputs) <= _SMALL:
        for k, values in enumerate(zip(*link._all_gather(group, tag, inputs, _layout(inputs)), strict=True)):
            collective.fold(c.reduction, c.dtypes[k], values, outputs[k])
        return
    sizes = [-(-i.size // n) for i in inputs]  # each rank sums a part of each operand; the last parts are shorter
    flats = [i.reshape(-1) for i in inputs]
    parts = [[f[r * s:(r + 1) * s] for f, s in zip(flats, sizes, strict=True)] for r in range(n)]
    received = link._all_to_all(group, tag, parts, _layout(parts[rank]))
    sums = [np.zeros(s, i.dtype) for s, i in zip(sizes, inputs, strict=True)]
    for k, values in enumerate(zip(*received, strict=True)):
        collective.fold(c.reduction, c.dtypes[k], values, sums[k][: values[0].size])
    for r, row in enumerate(link._all_gather(group, tag, sums, _layout(sums))):
        for part, o, s in zip(row, outputs, sizes, strict=True):
            target = o.reshape(-1)[r * s:(r + 1) * s]
            target[...] = part[: target.size]


def _reduce_scatter(link: ProcessLink, c: Collective, group, tag: str, inputs: Arrays, outputs: Arrays) -> None:
    blocks = [[collective.block(i, c.dimension, r, len(group)) for i in inputs] for r in range(len(group))]
    for k, values in enumerate(zip(*link._all_to_all(group, tag, blocks, _layout(outputs)), strict=True)):
        collective.fold(c.reduction, c.dtypes[k], values, outputs[k])


def _all_gather(link: ProcessLink, c: Collective, group, tag: str, inputs: Arrays, outputs: Arrays) -> None:
    for r, row in enumerate(link._all_gather(group, tag, inputs, _layout(inputs))):
        for value, o in zip(row, outputs, strict=True):
            collective.block(o, c.dimension, r, len(group))[...] = value


def _all_to_all(link: ProcessLink, c: Collective, group, tag: str, inputs: Arrays, outputs: Arrays) -> None:
    n = len(group)
    send = [[collective.block(inputs[0], c.dimension, r, n)] if c.dimension is not None else [inputs[r]] for r in range(n)]
    targets = [collective.block(outputs[0], c.dimension, r, n) if c.dimension is not None else outputs[r] for r in range(n)]
    for target, (value,) in zip(targets, link._all_to_all(group, tag, send, _layout(targets[:1])), strict=True):
        target[...] = value


def _collective_permute(link: ProcessLink, c: Collective, group, tag: str, inputs: Arrays, outputs: Arrays) -> None:
    pairs = c.pairs(link.replicas, link.partitions)
    source = next((s for s, t in pairs if t == link.device), None)
    targets = [t for s, t in pairs if s == link.device and t != link.device]
    received = link._one_to_one(group, tag, targets, None if source == link.device else source, inputs, _layout(outputs))
    for k, o in enumerate(outputs):
        o[...] = 0 if source is None else inputs[k] if received is None else received[k]


def _collective_broadcast(link: ProcessLink, c: Collective, group, tag: str, inputs: Arrays, outputs: Arrays) -> None:
    first = group[0] == link.device
    received = link._one_to_one(group, tag, group[1:] if first else (), None if first else group[0], inputs if first else (), _layout(outputs))
    for o, value in zip(outputs, inputs if first else received, strict=True):
        o[...] = value


_RUN = {
    "all-reduce": _all_reduce, "reduce-scatter": _reduce_scatter, "all-gather": _all_gather, "all-to-all": _all_to_all,
    "collective-permute": _collective_permute, "collective-broadcast": _collective_broadcast, "ragged-all-to-all": _whole_inputs,
}  # fmt: skip


def difference(name: str, prints: Sequence[bytes], texts: Sequence[str]) -> str:
    """Which ranks have which of several programs, and the first line in which two of them differ."""
    first = prints.index(next(p for p in prints if p != prints[0]))
    same = [r for r, p in enumerate(prints) if p == prints[0]]
    other = [r for r, p in enumerate(prints) if p == prints[first]]
    mine, theirs = texts[0].splitlines(), texts[first].splitlines()
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))

    def line(lines: list[str]) -> str:
        return lines[at].strip() if at < len(lines) else "(the program ends)"

    return (
        f"{name}: the ranks run different programs. Ranks {', '.join(map(str, same))} and {', '.join(map(str, other))} differ first in line {at + 1}:\n"
        f"  rank {same[0]}: {line(mine)}\n  rank {first}: {line(theirs)}"
    )


class _Board:
    """What the ranks tell each other through torch.distributed's store: a sign of life, where they are, and failures."""

    def __init__(self, rank: int, size: int, told: Callable[[str], None]) -> None:
        # The store of the default group is where the processes found each other: it needs no connection that may have failed.
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("torch_hlo", store.clone() if hasattr(store, "clone") else store)
        self.rank, self.size, self.told, self.world = rank, size, told, dist.group.WORLD
        self.beats = 0
        self.place = self.report = ""
        self.lock = threading.Lock()
        self.lost = self.ended = False
        self._publish()
        atexit.register(self._end)
        threading.Thread(target=self._live, daemon=True, name="torch_hlo heartbeat").start()

    def at(self, place: str) -> None:
        """Where this rank is: in a collective, or not ("")."""
        self.place = place

    def fail(self, why: str, soon: bool = True) -> None:
        """Report a failure; `soon`: the others stop waiting when they see it."""
        self.report = why
        self._publish()
        if soon:
            self._try(lambda: self.store.set("failure", why))

    def culprits(self, what: str, error: Exception) -> str:
        """A sentence that names the ranks that a failed collective is to be blamed on. Takes a few seconds."""
        self.report = f"{type(error).__name__} in {what}"
        self._publish()
        others = [r for r in range(self.size) if r != self.rank]
        before = {r: self._read(r) for r in others}
        end = time.monotonic() + _SILENT
        while time.monotonic() < end and not self.lost:
            time.sleep(0.2)
            found = self._failure()
            if found:
                return found
        after = {r: self._read(r) for r in others}
        if self.lost:
            return "rank 0 does not respond any more: the store of torch.distributed, which rank 0 or the launcher kept, is gone"
        silent = [r for r in others if before[r].get("beats") == after[r].get("beats") and not after[r].get("report")]
        if silent:
            return "; ".join(self._described(r, after[r], "does not respond any more") for r in silent)
        elsewhere = [r for r in others if after[r].get("place") != what and not after[r].get("report")]
        if elsewhere:
            return "; ".join(self._described(r, after[r], "did not come") for r in elsewhere)
        return f"{type(error).__name__}: {error}"

    @staticmethod
    def _described(rank: int, state: dict, verb: str) -> str:
        if not state:
            return f"rank {rank} {verb}; it has not come to its first collective"
        if state.get("ended"):
            return f"rank {rank} has ended"
        return f"rank {rank} {verb}; it was last seen " + (f"in {state['place']}" if state["place"] else "outside of collectives")

    # -- the store

    def _live(self) -> None:
        while not self.ended and not self.lost:
            time.sleep(_BEAT)
            if not self._in_use():
                return
            self.beats += 1
            self._publish()
            if not self.report and (why := self._failure()):
                self.told(why)

    def _end(self) -> None:
        self.ended = True
        if self._in_use():
            self._publish()

    def _in_use(self) -> bool:
        """Whether the process group is still there; without it the store may go at any time."""
        return dist.is_initialized() and dist.group.WORLD is self.world

    def _publish(self) -> None:
        state = {"beats": self.beats, "place": self.place, "report": self.report, "ended": self.ended}
        self._try(lambda: self.store.set(str(self.rank), json.dumps(state)))

    def _read(self, rank: int) -> dict:
        return json.loads(self._get(str(rank)) or "{}")

    def _failure(self) -> str:
        return self._get("failure")

    def _get(self, key: str) -> str:
        return self._try(lambda: self.store.get(key).decode() if self.store.check([key]) else "") or ""

    def _try(self, use: Callable):
        with self.lock:
            if self.lost:
                return None
            try:
                return use()
            except Exception:  # its process is gone
                self.lost = True
                return None
