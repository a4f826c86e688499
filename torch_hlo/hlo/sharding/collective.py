"""Collectives: who takes part, what everybody gets, and how a running program reaches the other
devices.

    c = Collective.of(x)                          # of an all-reduce, … or the -start of one
    c.groups(replicas=1, partitions=4)            # ((0, 1), (2, 3)): who exchange values
    for task in c.tasks(inputs, outputs): task()  # the meaning: fills the members' outputs

    with communicator(link): …                    # what runs in this thread is `link.device`
    current().exchange(c, inputs, outputs)        # blocks until the outputs are filled

A device has the number `replica * partitions + partition`. The evaluator and compiled programs
speak to the same protocol; who implements it (one device, threads, processes) is not known to a
program.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from torch_hlo.frozen import frozen

from ..evaluate.interpreter import UFUNCS, apply, simple_fold
from ..ir import DTYPES, Computation, Instruction, Ints, decode, encode, numpy_dtype
from ..ir.numeric import round_to
from ..text.printer import computation_text

CHUNK = 1 << 16  # elements of one task of a reduction: sums stay in the cache
Groups = tuple[Ints, ...]
Arrays = Sequence[np.ndarray]  # the operands, or the results, of one member of a group
Members = Sequence[Arrays]  # of all of a group
Tasks = list[Callable[[], object]]


class CollectiveError(RuntimeError):
    """Devices that do not meet: they disagree on the next collective, one has failed, or one does
    not come in time."""


# all-reduce & co. say with use_global_device_ids what their ids are; these have no such attribute,
# a channel alone makes ids partitions.
_NO_GLOBAL_IDS = frozenset(
    "all-to-all collective-permute collective-broadcast ragged-all-to-all".split()
)
_REDUCES = frozenset(("all-reduce", "reduce-scatter"))


@frozen
class Collective:
    """A collective as data (`to_json`, `from_json`), without its operands.

    ids: what `members` lists: "replica" (within a partition), "partition" (within a replica),
    "replica and partition" (of replicas, all their partitions), "device". members: replica_groups;
    of a collective-permute the (source, target) pairs. reduction: an opcode of UFUNCS, or the HLO
    text of the computation. dtypes: of the operands, HLO names."""

    op: str
    ids: str
    members: Groups
    dtypes: tuple[str, ...]
    dimension: int | None = None
    reduction: str = ""
    channel: int = 0

    @classmethod
    def of(cls, x: Instruction) -> Collective:
        """The collective that an instruction starts or is."""
        op = x.op.removesuffix("-start")
        channel = x.get("channel_id") or 0
        flag = False if op in _NO_GLOBAL_IDS else x.get("use_global_device_ids", False)
        if channel > 0:
            ids = (
                "partition"
                if op in _NO_GLOBAL_IDS
                else "device"
                if flag
                else "replica and partition"
            )
        elif flag:
            raise CollectiveError(
                f"{op} of {x.operand_shapes}: use_global_device_ids needs a channel_id"
            )
        else:
            ids = "replica"
        dimensions = x.get("dimensions") or ()
        return cls(
            op,
            ids,
            tuple(x["source_target_pairs"] if op == "collective-permute" else x["replica_groups"]),
            tuple(o.dtype for o in x.operands),
            dimensions[0] if dimensions else None,
            _reduction(x["to_apply"]) if op in _REDUCES else "",
            channel,
        )

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__match_args__}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Collective:
        return cls(
            **{
                **data,
                "members": tuple(map(tuple, data["members"])),
                "dtypes": tuple(data["dtypes"]),
            }
        )

    def groups(self, replicas: int, partitions: int) -> Groups:
        """Devices that exchange values, in the order of their ranks. Devices in no group take no
        part.

        Raises CollectiveError for an id that does not exist, or that is in two groups.
        """
        return _groups(self, replicas, partitions)

    def group(self, device: int, replicas: int, partitions: int) -> Ints:
        """The group of a device; () when it takes no part. Raises CollectiveError when a collective
        without that notion leaves it out."""
        found = next((g for g in self.groups(replicas, partitions) if device in g), ())
        if not found and self.op not in (
            "collective-permute",
            "collective-broadcast",
        ):
            raise CollectiveError(
                f"{self} is run by device {device}, which is in none of its groups"
            )
        return found

    def pairs(self, replicas: int, partitions: int) -> Groups:
        """(source, target) devices of a collective-permute."""
        return tuple(
            p
            for s in _spans(self.ids, replicas, partitions)
            for p in ((s[a], s[b]) for a, b in self.members)
        )

    def tasks(
        self,
        group: Ints,
        inputs: Sequence[Arrays],
        outputs: Sequence[Arrays],
        pairs: Groups = (),
    ) -> list[Callable[[], object]]:
        """Independent pieces of work that together fill every member's `outputs[rank]` from all
        `inputs[rank]`; in any order, on any threads.

        Arrays hold the values (numpy_dtype) or, for bf16 and f8, the bits. Sums are formed in rank
        order, in f32 for narrower floats."""
        return _TASKS[self.op](_Meeting(self, group, inputs, outputs, pairs))

    def __str__(self) -> str:
        """`all-reduce(f32, bf16) over {0,1},{2,3}, channel 4`."""
        kind = f" by {self.reduction}" if self.reduction in UFUNCS else ""
        what = "pairs" if self.op == "collective-permute" else "over"
        groups = (
            ",".join("{" + ",".join(map(str, g)) + "}" for g in self.members[:8])
            + (",…" if len(self.members) > 8 else "")
            or "all"
        )
        return f"{self.op}({', '.join(self.dtypes)}){kind} {what} {groups}" + (
            f", channel {self.channel}" if self.channel else ""
        )


@lru_cache(maxsize=1024)
def _groups(c: Collective, replicas: int, partitions: int) -> Groups:
    try:
        if c.op == "collective-permute":
            found = _connected(c.pairs(replicas, partitions))
        else:
            spans = _spans(c.ids, replicas, partitions)
            found = tuple(
                tuple(d for i in g for d in _tuple(s[i]))
                for s in spans
                for g in c.members or (tuple(range(len(s))),)
            )
    except IndexError:
        if replicas * partitions == 1:
            raise CollectiveError(
                f"{c} needs more than one device, and this program runs on one: give run_text(…,"
                " devices=N), or start one process per device with torchrun"
            ) from None
        raise CollectiveError(
            f"{c}: there is no such {c.ids} among {replicas} replicas of {partitions} partitions"
        ) from None
    flat = [d for g in found for d in g]
    if len(flat) != len(set(flat)):
        raise CollectiveError(f"{c}: a device is in two groups")
    return found


def _spans(ids: str, replicas: int, partitions: int) -> list[list[Any]]:
    """Lists that ids index: one per set of devices that have the ids for themselves."""
    if ids == "replica":
        return [[r * partitions + p for r in range(replicas)] for p in range(partitions)]
    if ids == "partition":
        return [[r * partitions + p for p in range(partitions)] for r in range(replicas)]
    if ids == "device":
        return [list(range(replicas * partitions))]
    return [[tuple(range(r * partitions, (r + 1) * partitions)) for r in range(replicas)]]


def _tuple(x: int | Ints) -> Ints:
    return x if isinstance(x, tuple) else (x,)


def _connected(pairs: Groups) -> Groups:
    """Devices that are linked by pairs, sorted."""
    group: dict[int, list[int]] = {}
    for a, b in pairs:
        first = group.setdefault(a, [a])
        second = group.setdefault(b, [b])
        if first is not second:
            first += second
            for d in second:
                group[d] = first
    return tuple(dict.fromkeys(tuple(sorted(g)) for g in group.values()))


# Reductions


def _reduction(computation: Computation) -> str:
    if simple_fold(computation) is not None and computation.root.op in UFUNCS:
        return computation.root.op
    return computation_text(computation)


@lru_cache(maxsize=64)
def _computation(text: str) -> Computation:
    from ..text.parser import parse_computation

    return parse_computation(text)


def fold(reduction: str, dtype: str, arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
    """out = arrays[0] ∘ arrays[1] ∘ …, element by element; floats narrower than f32 are accumulated
    in f32 and rounded once."""
    values = [decoded(a, dtype) for a in arrays]
    ufunc = UFUNCS.get(reduction)
    narrow = DTYPES[dtype].kind == "f" and DTYPES[dtype].bits < 32
    with np.errstate(all="ignore"):
        if ufunc is not None and not narrow:
            ufunc(values[0], values[1], out=out) if len(values) > 1 else np.copyto(out, values[0])
            for v in values[2:]:
                ufunc(out, v, out=out)
            return
        total = values[0].astype(np.float32) if narrow and ufunc is not None else values[0]
        for v in values[1:]:
            total = (
                ufunc(total, v)
                if ufunc is not None
                else apply(_computation(reduction), (total, v))[0]
            )
    out[...] = encoded(total, dtype, out)


def decoded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values of an array that holds values, or the bits of bf16 and f8."""
    return (
        array if array.dtype == numpy_dtype(dtype) else decode(array.tobytes(), dtype, array.shape)
    )


def encoded(values: np.ndarray, dtype: str, like: np.ndarray) -> np.ndarray:
    """Inverse of decoded: in the form that `like` has."""
    if like.dtype == numpy_dtype(dtype):
        return round_to(values, dtype)
    return np.frombuffer(encode(values, dtype), like.dtype).reshape(values.shape)


# What every kind of collective does


@dataclass
class _Meeting:
    """The members of a group in a collective: what each brings, and what it is to have."""

    c: Collective
    group: Ints
    inputs: Members
    outputs: Members
    pairs: Groups

    def block(self, array: np.ndarray, rank: int) -> np.ndarray:
        return block(array, self.c.dimension, rank, len(self.group))


def _sum_into(reduction: str, dtype: str, values: list[np.ndarray], outs: list[np.ndarray]) -> None:
    fold(reduction, dtype, values, outs[0])
    for out in outs[1:]:
        np.copyto(out, outs[0])


def _all_reduce(m: _Meeting) -> Tasks:
    tasks: Tasks = []
    for k, dtype in enumerate(m.c.dtypes):
        values = [i[k].reshape(-1) for i in m.inputs]
        outs = [o[k].reshape(-1) for o in m.outputs]
        for lo in range(0, values[0].size, CHUNK):
            pieces = ([a[lo : lo + CHUNK] for a in arrays] for arrays in (values, outs))
            tasks.append(partial(_sum_into, m.c.reduction, dtype, *pieces))
    return tasks


def block(array: np.ndarray, dimension: int | None, rank: int, count: int) -> np.ndarray:
    """The `rank`-th of `count` equal blocks along a dimension, a view."""
    assert dimension is not None
    n = array.shape[dimension] // count
    return array[(slice(None),) * dimension + (slice(rank * n, (rank + 1) * n),)]


def _reduce_scatter(m: _Meeting) -> Tasks:
    return [
        partial(fold, m.c.reduction, dtype, [m.block(i[k], rank) for i in m.inputs], outs[k])
        for k, dtype in enumerate(m.c.dtypes)
        for rank, outs in enumerate(m.outputs)
    ]


def _all_gather(m: _Meeting) -> Tasks:
    return [
        partial(np.copyto, m.block(o, rank), i)
        for outs in m.outputs
        for rank, ins in enumerate(m.inputs)
        for o, i in zip(outs, ins, strict=True)
    ]


def _all_to_all(m: _Meeting) -> Tasks:
    """With a dimension, block j of rank i becomes block i of rank j; without, operand j of rank i
    becomes result i of rank j."""
    if m.c.dimension is None:
        return [
            partial(np.copyto, outs[i], ins[j])
            for i, ins in enumerate(m.inputs)
            for j, outs in enumerate(m.outputs)
        ]
    return [
        partial(np.copyto, m.block(outs[0], i), m.block(ins[0], j))
        for i, ins in enumerate(m.inputs)
        for j, outs in enumerate(m.outputs)
    ]


def _collective_permute(m: _Meeting) -> Tasks:
    """Who is no target gets zeros."""
    source = {target: m.inputs[m.group.index(s)] for s, target in m.pairs if s in m.group}
    return [
        partial(np.copyto, o, source[d][k]) if d in source else partial(o.fill, 0)
        for d, outs in zip(m.group, m.outputs, strict=True)
        for k, o in enumerate(outs)
    ]


def _collective_broadcast(m: _Meeting) -> Tasks:
    return [
        partial(np.copyto, o, i)
        for outs in m.outputs
        for o, i in zip(outs, m.inputs[0], strict=True)
    ]


def _ragged_all_to_all(m: _Meeting) -> Tasks:
    """Operands: rows to send, the initial output, and per update the input offset, rows sent,
    offset at the receiver, rows received. The updates are cut into equal runs, one for each
    peer."""

    def receive(rank: int) -> None:
        out = m.outputs[rank][0]
        np.copyto(out, m.inputs[rank][1])
        for rows, _, starts, counts, targets, _ in m.inputs:
            each = len(counts) // len(m.group)
            for u in range(rank * each, (rank + 1) * each):
                a = int(starts[u])
                n = int(counts[u])
                b = int(targets[u])
                out[b : b + n] = rows[a : a + n]

    return [partial(receive, rank) for rank in range(len(m.group))]


_TASKS = {
    "all-reduce": _all_reduce, "reduce-scatter": _reduce_scatter, "all-gather": _all_gather,
    "all-to-all": _all_to_all, "collective-permute": _collective_permute,
    "collective-broadcast": _collective_broadcast, "ragged-all-to-all": _ragged_all_to_all,
}  # fmt: skip


# How a running program reaches the other devices


class ProgramInfo(Protocol):
    """What a program with collectives says about itself. `devices`: how many run this very program,
    1 when they may run others (and only meet in collectives). `fingerprint`: of `text()`. `first`:
    a collective of it, for messages."""

    name: str
    devices: int
    fingerprint: bytes
    first: str

    def text(self) -> str: ...


class Communicator(ABC):
    """The link of one device to the others, for the program that runs on it."""

    device: int
    replicas: int
    partitions: int
    own_process = False  # the device is the only one of its process: a ProcessLink

    def begin(self, program: ProgramInfo) -> None:
        """A program with collectives starts. Raises CollectiveError when the others run another
        one."""
        return  # devices of one process all run the same

    @abstractmethod
    def exchange(self, c: Collective, inputs: Arrays, outputs: Arrays) -> None:
        """Take part in a collective: returns when `outputs` are filled and `inputs` may be
        overwritten. Raises CollectiveError."""

    def start(self, c: Collective, inputs: Arrays, outputs: Arrays) -> Callable[[], None]:
        """Begin a collective; calling the result waits for it. Until then `inputs` and `outputs`
        belong to it. Devices of one process share its cores, so that waiting for the others costs
        nothing: it is done at once."""
        self.exchange(c, inputs, outputs)
        return nothing

    def gather(self, block: np.ndarray, what: str, where: str = "") -> list[np.ndarray]:
        """Every process's `block` (uint8[n]) in the order of ranks. All processes call it; `what`
        they do is the same and stands in errors, with `where` (a line of the user's program)."""
        return [block]

    def share(self, data: bytes, what: str, where: str = "") -> list[bytes]:
        """Every process's `data`, of any length, in the order of ranks; otherwise as `gather`."""
        return [data]


class Alone(Communicator):
    """The only device."""

    device = 0
    replicas = 1
    partitions = 1

    def exchange(self, c: Collective, inputs: Arrays, outputs: Arrays) -> None:
        solo(c, self, inputs, outputs)


def solo(c: Collective, link: Communicator, inputs: Arrays, outputs: Arrays) -> bool:
    """Do a collective that needs nobody else: whether that was so."""
    group = c.group(link.device, link.replicas, link.partitions)
    if len(group) > 1:
        return False
    if not group:  # a permutation or a broadcast that leaves this device out
        for o in outputs:
            o[...] = 0
    else:
        pairs = c.pairs(link.replicas, link.partitions) if c.op == "collective-permute" else ()
        for task in c.tasks(group, [inputs], [outputs], pairs):
            task()
    return True


def nothing() -> None:
    """What there is left to wait for."""


_ALONE = Alone()
_local = threading.local()


def _default() -> Communicator:
    return _ALONE


def current() -> Communicator:
    """The link of the program that runs in this thread: that of an enclosing `communicator`, else
    the process's own."""
    return getattr(_local, "link", None) or _default()


@contextlib.contextmanager
def _said(what: str, value: object) -> Iterator[None]:
    before = getattr(_local, what, None)
    setattr(_local, what, value)
    try:
        yield
    finally:
        setattr(_local, what, before)


def communicator(link: Communicator) -> contextlib.AbstractContextManager[None]:
    """Programs that this thread runs in the block speak to the others through `link`."""
    return _said("link", link)


def named(name: str) -> contextlib.AbstractContextManager[None]:
    """In the block, messages call programs that this thread runs `name`."""
    return _said("name", name)


def in_step() -> bool:
    """Whether this thread runs a program in a `named` block: a step of the background."""
    return bool(getattr(_local, "name", ""))


def program_name(name: str) -> str:
    """What messages call the program `name` that this thread runs."""
    return getattr(_local, "name", "") or name


def set_default(find: Callable[[], Communicator]) -> None:
    """What gives threads without a `communicator` their link: that of a process which is one of
    several devices."""
    global _default
    _default = find
