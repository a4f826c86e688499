"""Devices in several processes: the collectives of compiled programs over torch.distributed's
process groups. A link is that of one device; a process may have several.

    link().exchange(c, inputs, outputs)     # the device of this process

A collective is made of rounds in which each member of the group sends some arrays to each other one
(`_round`). Sums are formed here and not in the transport, in the order of ranks, so that the
results are those of virtual devices, bit by bit, and every element type works; an all-reduce moves
2(n-1)/n of its bytes as the best algorithms do. Every message starts with a block of one size that
says which collective it belongs to: two ranks that do not run the same one find out before they
exchange anything else.

There are two lanes (`_Lane`), each with a thread, connections and numbers of its own. What steps do
that run in the background goes through one; what the user's thread does, such as reading a sharded
tensor, through the other. Each is in the order of the program, whichever of the two is ahead. The
connections are made here and not by torch.distributed.new_group, which names groups by how many
there are: what the user does with groups at the same time does not interfere.

Failures: ranks publish where they are in torch.distributed's store, once a second (`_Board`). When
a message fails, does not come in time, or another rank reports a failure, the ranks that are gone,
silent or elsewhere are named. A process whose link has failed has to be started anew.
"""

from __future__ import annotations

import atexit
import datetime
import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torch_hlo import config
from torch_hlo.hlo.evaluate.interpreter import UFUNCS
from torch_hlo.hlo.sharding import collective
from torch_hlo.hlo.sharding.collective import (
    Collective,
    CollectiveError,
    Communicator,
    ProgramInfo,
)

_HEADER = 256  # bytes of the line that a message starts with
_FIRST = 2048  # bytes of the first part of a message: the header, and the arrays if they fit
# bytes up to which arrays travel in one piece, and an all-reduce is one round of everything to
# everybody
_SMALL = 1 << 16
_BEAT = 1.0  # seconds between two signs of life
_SILENT = 3.5  # seconds without one after which a rank counts as gone
Arrays = Sequence[np.ndarray]
Group = tuple[int, ...]


class _Job:
    """Something that the communication thread does."""

    def __init__(self, do: Callable[[], None], what: str) -> None:
        self.do, self.what, self.error, self.done = do, what, None, threading.Event()


class ProcessLink(Communicator):
    """That of a process; see the module's docstring. GPUs exchange arrays by themselves
    (device/cuda/nccl.py)."""

    own_process = True

    def __init__(self, device: int, count: int, replicas: int = 1, name: str = "") -> None:
        self.world = dist.group.WORLD
        self.device = device
        self.everybody = tuple(range(count))
        self.replicas = replicas
        self.partitions = count // replicas
        self.timeout = config.get("COLLECTIVE_TIMEOUT") or 365 * 86400.0
        self.groups: dict[tuple[object, ...], dist.ProcessGroup] = {}  # of GPUs
        self.program = "a program"
        self.failure: CollectiveError | None = None
        self.board = _Board(device, count, self._told, name)
        self.lanes = {name: _Lane(name, self) for name in ("steps", "host")}

    # -- programs

    def begin(self, program: ProgramInfo) -> None:
        """A program with collectives starts: if it is one for all devices, the ranks make sure that
        it is the same one. Those of steps were compared before (lazy/run/agreement.py)."""
        self.program = collective.program_name(program.name)
        if program.devices > 1:
            if program.devices != len(self.everybody):
                raise CollectiveError(
                    f"{self.program} is for {program.devices} devices, torch.distributed runs"
                    f" {len(self.everybody)} processes"
                )
            if collective.in_step():
                return
            what = f"the comparison of programs before {program.first}"
            prints = self._gather(program.fingerprint, what, self.program)
            if len(set(prints)) > 1:
                texts = self.share(program.text().encode(), f"the texts after {what}", self.program)
                raise CollectiveError(
                    difference(self.program, prints, [text.decode() for text in texts])
                )

    # -- collectives

    def exchange(self, c: Collective, inputs: Arrays, outputs: Arrays) -> None:
        self.start(c, inputs, outputs)()

    def start(self, c: Collective, inputs: Arrays, outputs: Arrays) -> Callable[[], None]:
        if collective.solo(c, self, inputs, outputs):
            return collective.nothing
        group = c.group(self.device, self.replicas, self.partitions)
        lane = self._lane()
        number = lane.number(group)
        sizes = ", ".join(str(list(a.shape)) for a in inputs)
        what = (
            f"{c.op}({', '.join(c.dtypes)}) of sizes {sizes}, the {number}. of ranks"
            f" {','.join(map(str, group))}"
        )
        tag = _Tag(
            f"{number} {c.op} {','.join(c.dtypes)} {sizes} {c.dimension}"
            f" {c.reduction if c.reduction in UFUNCS else ''}",
            f"in {self.program}",
        )
        job = self._start(
            lane,
            lambda: _RUN[c.op](_Meeting(lane, c, group, tag, inputs, outputs)),
            f"{what}, in {self.program}",
        )
        return lambda: self._wait(job)

    def gather(self, block: np.ndarray, what: str, where: str = "") -> list[np.ndarray]:
        lane = self._lane()
        number = lane.number(self.everybody)
        tag = _Tag(f"{number} {what} ({block.nbytes} bytes)", where)
        found: list[Arrays] = []
        job = self._start(
            lane,
            lambda: found.extend(lane.all_gather(self.everybody, tag, [block])),
            f"{what} {where}".rstrip(),
        )
        self._wait(job)
        return [b for (b,) in found]

    def share(self, data: bytes, what: str, where: str = "") -> list[bytes]:
        sizes = self._gather(len(data).to_bytes(8, "little"), f"sizes of {what}", where)
        lengths = [int.from_bytes(size, "little") for size in sizes]
        padded = data.ljust(max(lengths), b"\0")
        return [b[:n] for b, n in zip(self._gather(padded, what, where), lengths, strict=True)]

    def _gather(self, data: bytes, what: str, where: str) -> list[bytes]:
        block = np.frombuffer(data, np.uint8)
        return [found.tobytes() for found in self.gather(block, what, where)]

    # -- jobs of the lanes

    def _lane(self) -> _Lane:
        return self.lanes["steps" if collective.in_step() else "host"]

    def _start(self, lane: _Lane, do: Callable[[], None], what: str) -> _Job:
        if self.failure is not None:
            raise CollectiveError(
                f"{what}: this process must be started anew, since {self.failure}"
            ) from self.failure
        job = _Job(do, what)
        lane.jobs.put(job)
        return job

    def _wait(self, job: _Job) -> None:
        while not job.done.wait(timeout=0.2):
            if self.failure is not None:
                raise CollectiveError(f"{job.what}: {self.failure}") from self.failure
        if job.error is not None:
            raise job.error

    def run(self, lane: _Lane, job: _Job) -> None:
        """Do a job of a lane, on its thread. Never raises: the error is kept."""
        self.board.at(lane.name, job.what)
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
            try:
                why = self.board.culprits(job.what, error)
            except Exception as trouble:  # this thread has to go on: a program waits
                why = f"{type(error).__name__}: {error} (nobody could be named: {trouble})"
            self.failure = CollectiveError(why)
            job.error = CollectiveError(f"{job.what}: {why}")
            job.error.__cause__ = error
            self.board.fail(why)
        else:
            self.board.at(lane.name, "")
        job.done.set()

    def _told(self, why: str) -> None:
        """Another rank has reported a failure: do not wait for the transport to find out."""
        if self.failure is None:
            self.failure = CollectiveError(why)


@dataclass(frozen=True)
class _Tag:
    """Which collective a message belongs to: `text` is the same on all ranks. `where` need not be:
    it is for errors."""

    text: str
    where: str = ""


class _Lane:
    """Collectives one after another, in the order in which they are started. The lanes know nothing
    of each other: which of them is ahead may differ between ranks."""

    def __init__(self, name: str, link: ProcessLink) -> None:
        self.name = name
        self.link = link
        self.device = link.device
        self.replicas = link.replicas
        self.partitions = link.partitions
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.counts: dict[Group, int] = {}
        self.connections: dict[Group, dist.ProcessGroupGloo] = {}
        threading.Thread(
            target=self._communicate, daemon=True, name=f"torch_hlo communication of {name}"
        ).start()

    def number(self, group: Group) -> int:
        """Of the next collective of these ranks."""
        self.counts[group] = self.counts.get(group, 0) + 1
        return self.counts[group]

    def _communicate(self) -> None:
        while True:
            self.link.run(self, self.jobs.get())

    def _connection(self, members: Group) -> dist.ProcessGroupGloo:
        found = self.connections.get(members)
        if found is None:
            name = f"{self.name} {','.join(map(str, members))}"
            found = self.connections[members] = dist.ProcessGroupGloo(
                dist.PrefixStore(name, self.link.board.store.clone()),
                members.index(self.device),
                len(members),
                datetime.timedelta(seconds=self.link.timeout),
            )
        return found

    def round(
        self,
        group: Group,
        tag: _Tag,
        sends: dict[int, Arrays],
        receives: dict[int, Arrays],
    ) -> None:
        """Send `sends[device]` to each, fill `receives[device]` (contiguous arrays) from each. What
        a device has for itself is copied."""
        members = tuple(sorted(group))
        connection = self._connection(members)
        works = []
        kept = []  # until everything is sent
        for device, arrays in sends.items():
            if device != self.device:
                for k, part in enumerate(_parts(_header(tag), arrays)):
                    kept.append(torch.from_numpy(part))
                    works.append(connection.send([kept[-1]], members.index(device), _slot(tag, k)))
        incoming = []
        for device, arrays in receives.items():
            if device == self.device:
                for mine, value in zip(arrays, sends[device], strict=True):
                    mine[...] = value
                continue
            first = np.empty(_FIRST, np.uint8)
            rest = _rest(arrays)
            waits = [
                connection.recv([torch.from_numpy(into)], members.index(device), _slot(tag, k))
                for k, into in enumerate((first, *rest))
            ]
            incoming.append((device, arrays, first, rest, waits))
        for device, arrays, first, rest, waits in incoming:
            waits[0].wait()
            self._check(device, tag, first[:_HEADER].tobytes())
            for work in waits[1:]:
                work.wait()
            if _fits(arrays):
                _split(first[_HEADER:], arrays)
            elif _nbytes(arrays) <= _SMALL:
                _split(rest[0], arrays)
        for work in works:
            work.wait()

    def _check(self, sender: int, tag: _Tag, header: bytes) -> None:
        if _identity(header) != _identity(_header(tag)):
            raise CollectiveError(
                f"the ranks do not run the same collectives: rank {self.device} is in its number"
                f" {_readable(_header(tag))}; rank {sender} in its number {_readable(header)}"
            )

    def all_gather(self, group: Group, tag: _Tag, arrays: Arrays) -> list[Arrays]:
        """Everybody's arrays, by rank; all have the same sizes."""
        rows = [
            arrays if d == self.device else [np.empty(a.shape, a.dtype) for a in arrays]
            for d in group
        ]
        others = [d for d in group if d != self.device]
        self.round(
            group,
            tag,
            dict.fromkeys(others, arrays),
            {d: row for d, row in zip(group, rows, strict=True) if d != self.device},
        )
        return rows


class _Default:
    """The links of this process in torch.distributed's default group."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """In a forked child: the link is its parent's."""
        # Of `_links`, each of which is made once. Nothing of ours may be held when it is taken; the
        # board's is taken under it.
        self._lock = threading.Lock()
        self._links: dict[tuple[Group, int, int], ProcessLink] = {}

    def link(self, devices: Group = (), device: int = 0, replicas: int = 1) -> ProcessLink:
        """That of a device which is number `device` for programs on `devices`; without them that
        of a process which is one device. Made when first asked for, and anew when
        torch.distributed was."""
        key = devices, device, replicas
        with self._lock:
            found = self._links.get(key)
            if found is None or found.world is not dist.group.WORLD:
                found = self._links[key] = (
                    ProcessLink(device, len(devices), replicas, f"{devices} {replicas}")
                    if devices
                    else ProcessLink(dist.get_rank(), dist.get_world_size())
                )
            return found


link = _Default().link


def _header(tag: _Tag) -> bytes:
    """The text of the collective, and where it is, in two lines."""
    data = tag.text.encode()
    if len(data) > _HEADER // 2:
        digest = hashlib.blake2b(data, digest_size=8).hexdigest().encode()
        data = data[: _HEADER // 2 - len(digest)] + digest
    return (data + b"\n" + tag.where.encode())[:_HEADER].ljust(_HEADER, b"\0")


def _slot(tag: _Tag, part: int) -> int:
    """The number that a part of a message travels under. Parts behind the first may have other
    sizes in other collectives, and the transport ends a process that gets more than it asked for:
    they meet only within one."""
    if not part:
        return 0
    return (zlib.crc32(_identity(_header(tag))) & 0x7FFF) << 15 | part & 0x7FFF


def _identity(header: bytes) -> bytes:
    """What is the same on all ranks."""
    return header.partition(b"\n")[0]


def _readable(header: bytes) -> str:
    text, _, where = header.rstrip(b"\0").decode(errors="replace").partition("\n")
    return f"{text} ({where})" if where else text


def _fits(arrays: Arrays) -> bool:
    """Whether they travel with the header."""
    return _HEADER + _nbytes(arrays) <= _FIRST


def _parts(header: bytes, arrays: Arrays) -> list[np.ndarray]:
    """What is sent for some arrays: a first part of one size, then small ones in one piece, others
    as they lie in memory."""
    first = np.zeros(_FIRST, np.uint8)
    first[:_HEADER] = np.frombuffer(header, np.uint8)
    flat = [_bytes(a) for a in arrays if a.nbytes]
    if _fits(arrays):
        if flat:
            together = np.concatenate(flat)
            first[_HEADER : _HEADER + len(together)] = together
        return [first]
    return [first, np.concatenate(flat)] if _nbytes(arrays) <= _SMALL else [first, *flat]


def _rest(arrays: Arrays) -> list[np.ndarray]:
    """Where the parts behind the first are received."""
    if _fits(arrays):
        return []
    nbytes = _nbytes(arrays)
    return (
        [np.empty(nbytes, np.uint8)]
        if nbytes <= _SMALL
        else [_bytes(a) for a in arrays if a.nbytes]
    )


def _split(data: np.ndarray, arrays: Arrays) -> None:
    """Fill arrays from the bytes of all of them."""
    at = 0
    for a in arrays:
        _bytes(a)[:] = data[at : at + a.nbytes]
        at += a.nbytes


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array; a copy unless it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _nbytes(arrays: Arrays) -> int:
    return sum(a.nbytes for a in arrays)


# -- the collectives


@dataclass
class _Meeting:
    """A device's part in a collective: with whom, what it brings, what it is to have."""

    lane: _Lane
    c: Collective
    group: Group
    tag: _Tag
    inputs: Arrays
    outputs: Arrays

    @property
    def me(self) -> int:
        return self.lane.device

    def round(self, sends: dict[int, Arrays], receives: dict[int, Arrays]) -> None:
        self.lane.round(self.group, self.tag, sends, receives)

    def gathered(self) -> list[Arrays]:
        return self.lane.all_gather(self.group, self.tag, self.inputs)

    def space(self, arrays: Arrays) -> dict[int, Arrays]:
        """Room for as much from each of the others."""
        return {d: [np.empty_like(a) for a in arrays] for d in self.group if d != self.me}

    def parts(self, cut: Callable[[int], Arrays]) -> dict[int, Arrays]:
        """For each device what `cut` makes of its rank."""
        return {d: cut(r) for r, d in enumerate(self.group)}

    def blocks(self, arrays: Arrays) -> dict[int, Arrays]:
        """The blocks along the collective's dimension, one for each rank."""
        n = len(self.group)
        return self.parts(lambda r: [collective.block(a, self.c.dimension, r, n) for a in arrays])

    def fold(self, received: dict[int, Arrays], outputs: Arrays) -> None:
        """What the ranks have sent, summed in their order."""
        for k, out in enumerate(outputs):
            values = [received[d][k] for d in self.group]
            collective.fold(self.c.reduction, self.c.dtypes[k], values, out)

    def spread(self, sends: dict[int, Arrays], targets: dict[int, Arrays]) -> None:
        """A round into arrays that need not be contiguous."""
        received = {d: [_into(a) for a in arrays] for d, arrays in targets.items()}
        self.round(sends, received)
        for d, arrays in targets.items():
            for target, value in zip(arrays, received[d], strict=True):
                if value is not target:
                    target[...] = value


def _into(target: np.ndarray) -> np.ndarray:
    """Where to receive what belongs in `target`: itself if it is contiguous."""
    return target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)


def _whole_inputs(m: _Meeting) -> None:
    """Everybody gets everything, and does its own part of the work."""
    everybody = m.space(m.outputs) | {m.me: m.outputs}
    for task in m.c.tasks(m.group, m.gathered(), [everybody[d] for d in m.group]):
        task()


def _all_reduce(m: _Meeting) -> None:
    n = len(m.group)
    if n * _nbytes(m.inputs) <= _SMALL:
        return m.fold(dict(zip(m.group, m.gathered(), strict=True)), m.outputs)
    # each rank sums a part of each operand; the last parts are shorter
    sizes = [-(-i.size // n) for i in m.inputs]

    def parts(arrays: Arrays) -> dict[int, Arrays]:
        return m.parts(
            lambda r: [
                a.reshape(-1)[r * s : (r + 1) * s] for a, s in zip(arrays, sizes, strict=True)
            ]
        )

    mine = parts(m.inputs)
    results = parts(m.outputs)
    received = m.space(mine[m.me])
    m.round(mine, received)
    sums = results.pop(m.me)
    m.fold(received | {m.me: mine[m.me]}, sums)
    m.round(dict.fromkeys(results, sums), results)


def _reduce_scatter(m: _Meeting) -> None:
    blocks = m.blocks(m.inputs)
    received = m.space(m.outputs)
    m.round(blocks, received)
    m.fold(received | {m.me: blocks[m.me]}, m.outputs)


def _all_gather(m: _Meeting) -> None:
    m.spread(dict.fromkeys(m.group, m.inputs), m.blocks(m.outputs))


def _all_to_all(m: _Meeting) -> None:
    def of(arrays: Arrays) -> dict[int, Arrays]:
        return m.parts(lambda r: [arrays[r]]) if m.c.dimension is None else m.blocks(arrays[:1])

    m.spread(of(m.inputs), of(m.outputs))


def _collective_permute(m: _Meeting) -> None:
    pairs = m.c.pairs(m.lane.replicas, m.lane.partitions)
    sources = [s for s, t in pairs if t == m.me]
    m.round({t: m.inputs for s, t in pairs if s == m.me}, dict.fromkeys(sources, m.outputs))
    if not sources:
        for o in m.outputs:
            o[...] = 0


def _collective_broadcast(m: _Meeting) -> None:
    first = m.group[0]
    sends = dict.fromkeys(m.group, m.inputs) if first == m.me else {}
    m.round(sends, {first: m.outputs})


_RUN = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "collective-permute": _collective_permute,
    "collective-broadcast": _collective_broadcast,
    "ragged-all-to-all": _whole_inputs,
}


def difference(name: str, prints: Sequence[bytes], texts: Sequence[str]) -> str:
    """Which ranks have which of several programs, and the first line in which two of them
    differ."""
    first = prints.index(next(p for p in prints if p != prints[0]))
    same = [r for r, p in enumerate(prints) if p == prints[0]]
    other = [r for r, p in enumerate(prints) if p == prints[first]]
    mine = texts[0].splitlines()
    theirs = texts[first].splitlines()
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b),
        min(len(mine), len(theirs)),
    )

    def line(lines: list[str]) -> str:
        return lines[at].strip() if at < len(lines) else "(the program ends)"

    return (
        f"{name}: the ranks run different programs. Ranks {', '.join(map(str, same))} and"
        f" {', '.join(map(str, other))} differ first in line {at + 1}:\n  rank {same[0]}:"
        f" {line(mine)}\n  rank {first}: {line(theirs)}"
    )


class _Board:
    """What the ranks tell each other through torch.distributed's store: a sign of life, where they
    are, and failures."""

    def __init__(self, rank: int, size: int, told: Callable[[str], None], name: str = "") -> None:
        # The store of the default group is where the processes found each other: it needs no
        # connection that may have failed.
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"torch_hlo{name}", store.clone())
        self.rank, self.size, self.told, self.world = (
            rank,
            size,
            told,
            dist.group.WORLD,
        )
        self.beats = 0
        self.places: dict[str, str] = {}  # by lane
        self.report = ""
        # Of `lost` and the store's connection: one call at a time. Nothing is taken under it.
        self.lock = threading.Lock()
        self.lost = False
        self.ended = threading.Event()
        self._publish()
        self.heart = threading.Thread(target=self._live, daemon=True, name="torch_hlo heartbeat")
        self.heart.start()
        atexit.register(self._end)

    def at(self, lane: str, place: str) -> None:
        """Where a lane of this rank is: in a collective, or not ("")."""
        self.places[lane] = place

    def fail(self, why: str, soon: bool = True) -> None:
        """Report a failure; `soon`: the others stop waiting when they see it."""
        self.report = why
        self._publish()
        if soon:
            self._try(lambda: self.store.set("failure", why))

    def culprits(self, what: str, error: Exception) -> str:
        """A sentence that names the ranks that a failed collective is to be blamed on. Takes a few
        seconds."""
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
            return (
                "rank 0 does not respond any more: the store of torch.distributed, which rank 0 or"
                " the launcher kept, is gone"
            )
        silent = [
            r
            for r in others
            if before[r].get("beats") == after[r].get("beats") and not after[r].get("report")
        ]
        if silent:
            return "; ".join(
                self._described(r, after[r], "does not respond any more") for r in silent
            )
        elsewhere = [
            r
            for r in others
            if what not in after[r].get("places", {}).values() and not after[r].get("report")
        ]
        if elsewhere:
            return "; ".join(self._described(r, after[r], "did not come") for r in elsewhere)
        return f"{type(error).__name__}: {error}"

    @staticmethod
    def _described(rank: int, state: dict, verb: str) -> str:
        if not state:
            return f"rank {rank} {verb}; it has not come to its first collective"
        if state.get("ended"):
            return f"rank {rank} has ended"
        places = [place for place in state["places"].values() if place]
        return f"rank {rank} {verb}; it was last seen " + (
            f"in {' and '.join(places)}" if places else "outside of collectives"
        )

    # -- the store

    def _live(self) -> None:
        while not self.ended.wait(_BEAT) and not self.lost:
            if not self._in_use():
                return
            self.beats += 1
            self._publish()
            if not self.report and (why := self._failure()):
                self.told(why)

    def _end(self) -> None:
        self.ended.set()
        if self._in_use():
            self._publish()
        # C++ that returns to a Python that takes itself apart ends the process
        self.heart.join(_SILENT)

    def _in_use(self) -> bool:
        """Whether the process group is still there; without it the store may go at any time."""
        return dist.is_initialized() and dist.group.WORLD is self.world

    def _publish(self) -> None:
        state = {
            "beats": self.beats,
            "places": self.places,
            "report": self.report,
            "ended": self.ended.is_set(),
        }
        self._try(lambda: self.store.set(str(self.rank), json.dumps(state)))

    def _read(self, rank: int) -> dict:
        return json.loads(self._get(str(rank)) or "{}")

    def _failure(self) -> str:
        return self._get("failure")

    def _get(self, key: str) -> str:
        return (
            self._try(lambda: self.store.get(key).decode() if self.store.check([key]) else "") or ""
        )

    def _try(self, use: Callable[[], Any]) -> Any:
        with self.lock:
            if self.lost:
                return None
            try:
                return use()
            except Exception:  # its process is gone
                self.lost = True
                return None
