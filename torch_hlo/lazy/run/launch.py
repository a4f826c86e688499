"""Starting a program: its inputs and results as buffers, a job for the executor, and the storages'
new values. What a step that is known costs.

    launch(compiled, leaves, numbers, bindings, places, where)

Results are bound before they are computed: a storage's new array has a buffer whose job is pending.
`Run.undo` gives the storages back what they had.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any
from weakref import ref

import numpy as np

from torch_hlo.device import runtime
from torch_hlo.device.interfaces import Program
from torch_hlo.device.memory import Buffer, Memory, Part
from torch_hlo.hlo.ir import Ints, Shape
from torch_hlo.hlo.sharding.collective import nothing
from torch_hlo.lowering.core import TAPE, Out

from ..record import Array, Binding, Number, Storage, session, storage
from . import executor, spmd
from .executor import Job

_NOTHING = Memory(0)
_BUFFERS = frozenset({Buffer})


class Compiled:
    """A program of the cache. Its inputs are the graph's leaves, `extra` arrays of no bytes whose
    sizes a symbolic program reads, then the graph's numbers; `aliases` are what the program wants
    shared, `overwrites[o]` the input whose memory output o takes, or -1."""

    __slots__ = (
        "name",
        "program",
        "key",
        "aliases",
        "outputs",
        "overwrites",
        "sources",
        "extra",
        "borrowed",
    )

    def __init__(
        self,
        name: str,
        program: Program,
        key: tuple,
        outputs: tuple[Shape, ...],
        sources: tuple[str, ...],
        extra: Ints = (),
    ) -> None:
        self.name = name
        self.program = program
        self.key = key
        self.outputs = outputs
        self.sources = sources
        self.aliases = tuple(program.aliases)
        given = dict(self.aliases)
        self.overwrites = [given.get(o, -1) for o in range(len(outputs))]
        self.extra = [Buffer(Shape("u8", (n, 0)), _NOTHING) for n in extra]
        self.borrowed = False  # from the cache's entry for a less particular key


class Run:
    """What a submitted job needs to be undone: (reference to a storage, its value before, its
    array), and the donated leaves with their buffers."""

    def __init__(
        self,
        job: Job,
        bound: list[tuple[ref, Out | Array, Array]],
        donated: list[tuple[Array, Buffer]],
    ) -> None:
        self.job = job
        self.bound = bound
        self.donated = donated

    def undo(self, replaced: dict[int, Out | Array]) -> None:
        """The job has failed: nothing has been written. `replaced[id(array)]` becomes the value
        that stands for an array which was never computed."""
        for array, buffer in self.donated:
            array.data = buffer
        for owner, value, array in self.bound:
            if type(value) is Out:
                value.array = None
            replaced[id(array)] = value
            s = owner()
            if s is not None and s.value is array:
                s.replace(value)


class RunInPlace(Run):
    """A run whose results take the place of what it overwrites. `outputs`: the job's;
    `new`: references to the storages of other results."""

    def __init__(self, job: Job, outputs: list[Buffer], new: list[ref]) -> None:
        self.job = job
        self.outputs = outputs
        self.new = new
        job.before = [buffer.job for buffer in outputs]

    def undo(self, replaced: dict[int, Out | Array]) -> None:
        """What was to be overwritten is as it was; the other results have no values."""
        for owner in self.new:
            s = owner()
            if s is not None and getattr(getattr(s.value, "data", None), "job", None) is self.job:
                s.value.data = None
        for buffer, job in zip(self.outputs, self.job.before):
            if buffer.job is self.job:
                buffer.job = job if job is not None and job.error is not None else None


def launch(
    known: Launch,
    leaves: Sequence[Array],
    numbers: Sequence[Number],
    bindings: Sequence[Binding],
    where: spmd.Placement | None,
    in_flight: deque[Run],
    before: Callable[[], None] = nothing,
) -> None:
    """Run a program in the background; the storage of a binding gets its result unless its value
    has changed meanwhile. `in_flight`: gets what may have to be undone. `before`: called when
    nothing can fail any more; may be called again."""
    compiled = known.compiled
    places = known.places
    inputs = [leaf.data for leaf in leaves]
    if not _BUFFERS.issuperset(map(type, inputs)):
        given = map(leaf_buffer, leaves)
        inputs = list(given if where is not None else map(spmd.alone, given))
    if where is None and known.stream(leaves, inputs, numbers, bindings):
        return
    if where is not None:
        inputs = [
            spmd.place(leaf, sharding)
            for leaf, sharding in zip(leaves, compiled.program.in_shardings)
        ]
    donated = [(leaves[i], inputs[i]) for _, i in compiled.aliases]
    inputs += compiled.extra
    if numbers:
        inputs += number_buffers(numbers)
    if where is None:
        outputs = [
            Buffer(s, inputs[i].memory) if i >= 0 else runtime.allocate(s)
            for s, i in zip(compiled.outputs, compiled.overwrites)
        ]
    else:
        outputs = compiled.program.allocate(
            compiled.outputs, {o: inputs[i] for o, i in compiled.aliases}
        )
    job = Job(compiled.name, compiled.program, inputs, outputs, compiled.aliases)
    arrays = [Array(shape, buffer) for shape, buffer in zip(compiled.outputs, outputs)]
    bound = [(b[4], b[3], arrays[place]) for b, place in zip(bindings, places)]
    run = Run(job, bound, donated)

    def commit() -> None:
        before()
        _bind(bindings, places, arrays)
        if where is not None:
            spmd.keep([(b[2], place) for b, place in zip(bindings, places)], outputs, where)
        for array, _ in donated:
            array.data = None
        if not in_flight or in_flight[-1] is not run:
            in_flight.append(run)

    _all_or_nothing(commit, job)


class Launch:
    """How a program is launched for a step that comes back. What it updates in place, and nobody
    else has, keeps its Array and Buffer, so a launch is about the other leaves and results.

    `places`: which output the storage at each position gets,
    `_updates`: (leaf, position of its storage) of what is overwritten, `_copies`: (leaf, positions)
      of other storages that get the same value (clones),
    `_results`: (output, shape, positions of its storages) of the rest.
    """

    def __init__(self, compiled: Compiled, places: Sequence[int]) -> None:
        self.compiled = compiled
        self.places = places
        positions: dict[int, list[int]] = {}
        for position, place in enumerate(places):
            positions.setdefault(place, []).append(position)
        self._updates = [(i, positions[o][0]) for o, i in compiled.aliases]
        self._copies = [(i, positions[o][1:]) for o, i in compiled.aliases if len(positions[o]) > 1]
        # of the last launch, whether that was on the stream, and what it takes for them
        self._numbers: tuple[tuple[Sequence[Number], bool], Any] = ((), True), b""
        self._results = [
            (o, shape, positions.get(o, []))
            for o, shape in enumerate(compiled.outputs)
            if compiled.overwrites[o] < 0
        ]

    def stream(
        self,
        leaves: Sequence[Array],
        inputs: list[Buffer],
        numbers: Sequence[Number],
        bindings: Sequence[Binding],
    ) -> bool:
        """Launch on the native stream, where nothing can fail, so nothing is kept to be undone.
        False, and nothing done, for programs and moments that need the general way."""
        compiled = self.compiled
        if not executor.streams(compiled.program, inputs):
            return False
        if any([inputs[i].memory.readers for i, _ in self._updates]):
            return False
        outputs = [inputs[i] if i >= 0 else None for i in compiled.overwrites]
        arrays: list[Array | None] = [None] * len(outputs)
        for o, shape, _ in self._results:
            outputs[o] = buffer = runtime.allocate(shape)
            arrays[o] = Array(shape, buffer)
        given = []
        for (o, i), (_, position) in zip(compiled.aliases, self._updates):
            leaf = leaves[i]
            if leaf.owners == (bindings[position][4],):
                leaf.bounds = None
            else:  # another storage gets the memory: the old array must not see it
                given.append(leaf)
                outputs[o] = Buffer(leaf.shape, inputs[i].memory)
                leaf = Array(leaf.shape, outputs[o])
            arrays[o] = leaf
        inputs = [*inputs, *compiled.extra]
        job = Job(compiled.name, compiled.program, inputs, outputs)
        executor.prepare(job, *compiled.program.prepare(inputs, pack_numbers(numbers), outputs))

        def commit() -> None:
            _bind(bindings, self.places, arrays)
            for array in given:
                array.data = None

        _all_or_nothing(commit, job)
        return True

    def spares(self, leaves: Sequence[Array], storages: Sequence[Storage]) -> bool:
        """Whether another program might overwrite more."""
        read = set(map(id, leaves))
        return any(
            id(storages[p].value) in read for _, _, positions in self._results for p in positions
        )

    def _may_overwrite(
        self, leaves: Sequence[Array], memories: Sequence[Memory], storages: Sequence[Storage]
    ) -> bool:
        """Whether these storages alone have what is overwritten, and nobody reads it."""
        for i, position in self._updates:
            leaf = leaves[i]
            if (
                storages[position].value is not leaf
                or memories[i].readers
                or len(leaf.owners) != 1
                and not alone(leaf)
            ):
                return False
        return True

    def launch(
        self,
        leaves: Sequence[Array],
        numbers: Sequence[Number],
        storages: Sequence[Storage],
        in_flight: deque[Run],
    ) -> bool:
        """As `launch`, where what the program overwrites are values of the storages that get the
        results, and of no others; False, and nothing done, elsewhere."""
        compiled = self.compiled
        try:
            inputs = [leaf.data for leaf in leaves]
        except AttributeError:  # another thread has just recorded a new value
            return False
        memories = [buffer.memory for buffer in inputs if type(buffer) is Buffer]
        if len(memories) < len(inputs):
            return False
        streams = executor.streams(compiled.program, inputs)
        if not self._may_overwrite(leaves, memories, storages):
            return False
        outputs = [inputs[i] if i >= 0 else None for i in compiled.overwrites]
        results = []
        for o, shape, positions in self._results:
            storage = storages[positions[0]]
            array, outputs[o] = _result(storage, shape)
            same = array is storage.value and array.data is outputs[o]
            if not same or array.bounds is not None or len(positions) > 1:
                results.append((array, outputs[o], positions))
        results += [(leaves[i], inputs[i], positions) for i, positions in self._copies]
        job = Job(compiled.name, compiled.program, inputs, outputs)
        run = None
        if (numbers, streams) != self._numbers[0]:
            packed = pack_numbers(numbers) if streams else number_buffers(numbers)
            self._numbers = (numbers, streams), packed
        if streams:
            executor.prepare(job, *compiled.program.prepare(inputs, self._numbers[1], outputs))
        else:
            # those that replace no array: of another, `launch` knows how to give it back
            new = [ref(storages[at[0]]) for x, _, at in results if x.data is None and len(at) == 1]
            if len(new) < len(results):
                return False
            inputs += self._numbers[1]
            run = RunInPlace(job, outputs, new)

        def commit() -> None:
            if run is not None and (not in_flight or in_flight[-1] is not run):
                in_flight.append(run)
            for i, _ in self._updates:
                leaves[i].bounds = None
            for array, buffer, positions in results:
                array.data, array.bounds = buffer, None
                _give(array, storages, positions)

        _all_or_nothing(commit, job)
        return True


def alone(array: Array) -> bool:
    """Whether only one storage has the array, now that copies may be gone."""
    with session.current().values:
        return array.holders() == 1


def _give(array: Array, storages: Sequence[Storage], positions: Sequence[int]) -> None:
    """The array becomes the value of these storages."""
    for position in positions:
        s = storages[position]
        if s.value is not array:
            array.owners += (ref(s),)
            s.value = array


class Programs:
    """What is known of a graph that is run again and again: its programs by which leaves die, and
    the one to be launched where it fits."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.by_dead: dict[Ints, Launch] = {}
        self.last: Launch | None = None


class _Probe:
    def __init__(self) -> None:
        self.value = object()


_probe = _Probe()
_ALONE = getrefcount(_probe.value)  # of what only one attribute refers to


def _result(storage: Storage, shape: Shape) -> tuple[Array, Buffer]:
    """The array and buffer of a result that becomes the storage's value: those which it replaces,
    if nobody else has them. Programs on the stream run in order, so those that read the old value
    may still be under way."""
    if (
        type(storage.value) is Array
        and getrefcount(storage.value) == _ALONE
        and len(storage.value.owners) == 1
    ):
        if storage.value.data is None:  # a replay has just made it
            return storage.value, runtime.allocate(shape)
        if type(storage.value.data) is Buffer and storage.value.data.shape is shape:
            # a job refers to its results until it is done
            in_flight = storage.value.data.job is not None
            if (
                getrefcount(storage.value.data) == _ALONE + in_flight
                and getrefcount(storage.value.data.memory) == _ALONE
            ):
                memory = storage.value.data.memory
                if not memory.readers:
                    memory.copies = None
                    return storage.value, storage.value.data
    buffer = runtime.allocate(shape)
    return Array(shape, buffer), buffer


def _bind(bindings: Sequence[Binding], places: Sequence[int], arrays: Sequence[Array]) -> None:
    keep = storage.keeps_views()
    with session.current().values:
        for (_, _, owner, value, reference), place in zip(bindings, places):
            array = arrays[place]
            if type(value) is Out:
                value.array = array
            if owner.value is value:
                if reference not in array.owners:
                    array.owners += (reference,)
                owner.value = array
                if not keep:
                    owner.views = None


def _all_or_nothing(commit: Callable[[], None], job: Job) -> None:
    """Bind the results and submit the job, also when Ctrl-C comes: each part may be repeated."""
    interrupt = None
    while True:
        try:
            if not job.here:
                for buffer in job.outputs:
                    buffer.job = job
            commit()
            TAPE.restart()
            storage.forget_views()
            storage.forget_bound()
            executor.submit(job)
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def leaf_buffer(leaf: Array) -> Buffer:
    """The leaf's memory. Raises RuntimeError when it has none any more, or never had."""
    if leaf.data is None:
        raise RuntimeError(
            f"hlo device: an array {leaf.shape} is used after its memory was given to a newer"
            " value; a tensor was overwritten in one thread while another thread recorded"
            " operations on it"
        )
    if isinstance(leaf.data, spmd.Abstract):
        raise RuntimeError(
            f"hlo device: the array {leaf.shape} has no memory (it was made by simulate's"
            " `abstract`), so nothing can be computed from it"
        )
    return leaf.data


_FORMATS = {"f64": "d8x", "s64": "q8x", "c128": "dd"}
_SCALARS = {name: Shape(name) for name in _FORMATS}


@functools.lru_cache(maxsize=4096)
def _packing(dtypes: tuple[str, ...]) -> tuple[struct.Struct, list[Shape]]:
    return struct.Struct("<" + "".join(_FORMATS[d] for d in dtypes)), [_SCALARS[d] for d in dtypes]


def pack_numbers(numbers: Sequence[Number]) -> bytes:
    """The values of lifted numbers, 16 bytes apart. Raises OverflowError for an integer that has no
    64 bits."""
    if not numbers:
        return b""
    values: list = []
    for n in numbers:
        if n.dtype == "c128":
            values += (n.value.real, n.value.imag)
        else:
            values.append(n.value)
    try:
        return _packing(tuple([n.dtype for n in numbers]))[0].pack(*values)
    except (struct.error, OverflowError):
        wrong = next(n for n in numbers if n.dtype == "s64" and not -(1 << 63) <= n.value < 1 << 63)
        raise OverflowError(
            f"hlo device: the number {wrong.value!r} does not fit {wrong.dtype}"
        ) from None


def number_buffers(numbers: Sequence[Number]) -> list[Buffer]:
    """Rank-0 arrays of the lifted numbers, in one block."""
    data = pack_numbers(numbers)
    block = Memory(len(data))
    block.array[: len(data)] = np.frombuffer(data, np.uint8)
    return [
        Buffer(shape, Part(block, 16 * i))
        for i, shape in enumerate(_packing(tuple([n.dtype for n in numbers]))[1])
    ]
