"""Storages: the memory that tensors alias, as a functional value that writes replace.

    Storage.value    Out (pending: a result of a recorded node) or Array (a device value, usable as
    a leaf) read(tensor)     the tensor's value, replaying its view operations as nodes
    write(tensor, v) a new value for the tensor; everything that aliases it sees the change

For the step (lazy/run/device_engine.py):
* `pending_storages()` are the live storages whose value is an `Out`, oldest first. The values of
  those are the outputs of the graph.
* When a graph has run, `storage.bind(out, data)` stores the device value `data` unless a newer
  value was written meanwhile.
* The leaves of a graph are `Array` (a `Leaf` that carries its device value in `.data`) and `Number`
  (a `Lift` that carries its Python value in `.value`). An Array may be donated when `array.held()`
  is false and nothing else recorded reads it.
* Old nodes stay valid after a step: whoever still holds one may evaluate it again. Nothing may be
  cleared in them.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from torch_hlo.hlo.ir import Ints, Shape
from torch_hlo.hlo.sharding.sharding import Sharding
from torch_hlo.lowering.core import LIFTS, Leaf, Lift, Out

from . import session, views
from .meta import Meta
from .views import View

_session = session.current()
_NONE: frozenset[int] = frozenset()


class Array(Leaf):
    """A leaf of the graph: an array on the device. `data` is the device runtime's value for it
    (opaque here).

    `bounds`: None if the values were computed, () if they came from the CPU, (lowest, highest) once
      somebody asked.
    `varying`: sizes among its own that torch.compile has been told, or has seen, to vary.
    """

    __slots__ = ("data", "owners", "bounds", "varying")

    def __init__(self, shape: Shape, data: Any) -> None:
        self.shape = shape
        self.place = self.form = -1
        self.data = data
        self.owners: tuple[ref, ...] = ()
        self.bounds: Ints | None = None
        self.varying: frozenset[int] = _NONE

    def held(self) -> bool:
        """True while the value of some live storage is this array."""
        for owner in self.owners:
            storage = owner()
            if storage is not None and storage.value is self:
                return True
        return False

    def holders(self) -> int:
        """How many storages have this array as their value; the others are forgotten. the lock
        `session.values` is held."""
        self.owners = tuple([r for r in self.owners if (s := r()) is not None and s.value is self])
        return len(self.owners)


class Number(Lift):
    """A Python number that enters a graph as a rank-0 input: `dtype` is "f64", "s64" (or "c128"),
    `value` the number."""

    __slots__ = ("value",)

    def __init__(self, value: float, dtype: str) -> None:
        self.value = value
        self.dtype = dtype
        self.place = -1
        self.form = LIFTS[dtype]


class Storage:
    """What the tensors of one alias set share. `value` is the array of the tensor that was created
    with the storage (logically: `shape` in row-major order, whatever its strides); `meta` is that
    tensor's metadata.

    `views` caches the values of views of the present value; `sharding` is where the value lives,
    and any value that replaces it (None: on one device).
    """

    __slots__ = (
        "value",
        "meta",
        "version",
        "views",
        "freed",
        "sharding",
        "__weakref__",
    )

    def __init__(self, value: Out | Array, meta: Meta) -> None:
        self.value = value
        self.meta = meta
        self.version = 0
        self.views: dict | None = None
        self.freed = False
        self.sharding: Sharding | None = None
        if type(value) is Out:
            _session.pending.append(ref(self))
        else:
            value.owners += (ref(self),)

    @property
    def shape(self) -> Shape:
        return self.meta.hlo

    def replace(self, value: Out | Array) -> None:
        """Give the storage another value, as an in-place operation does."""
        with _session.values:
            if type(value) is Array:
                value.owners += (ref(self),)
            elif type(self.value) is not Out:
                _session.pending.append(ref(self))
            self.value = value
            self.views = None
            self.version += 1
        if self.sharding is not None:
            written(value)

    def bind(self, out: Out, data: Any) -> bool:
        """The graph that computes `out` has run: its device value is `data`. False if a newer value
        has been written. `data` may be an Array (several storages with one value share it) or the
        bare device value."""
        with _session.values:
            if self.value is not out:
                return False
            array = data if type(data) is Array else Array(self.shape, data)
            array.owners += (ref(self),)
            self.value = array
            self.views = None
            return True


def written(value: Out | Array) -> None:
    """A tensor that lives on a mesh gets this value."""
    if _session.journal is not None:
        _session.journal.write(value)


_new = object.__new__


def holding(value: Out, meta: Meta) -> Storage:
    """`Storage(value, meta)` of a pending value: one for every result, and Python takes long to
    call `__init__`."""
    storage = _new(Storage)
    storage.value = value
    storage.meta = meta
    storage.version = 0
    storage.views = None
    storage.freed = False
    storage.sharding = None
    _session.pending.append(ref(storage))
    return storage


# A pending value: its place in the order of recording, a number that differs between bindings, the
# storage, the value, and the storage's reference.
Binding = tuple[int, int, Storage, Out | Array, ref]


class Effect:
    """Stands in a step's results for a value that no tensor has: it is computed because computing
    it does something."""

    __slots__ = ("value", "views", "sharding", "__weakref__")

    def __init__(self, value: Out) -> None:
        self.value = value
        self.views = self.sharding = None

    def bind(self, out: Out, data) -> bool:
        return False

    def replace(self, value: Out | Array) -> None:
        """Nobody sees the value."""


def must_run(out: Out) -> None:
    """The next step computes `out` even if no tensor needs it: a collective, for which other
    processes wait."""
    _session.effects.append(out)


def take_effects() -> list[Out]:
    """What was passed to `must_run` and has not run yet, in order."""
    found, _session.effects[:] = (
        [out for out in _session.effects if out.array is None],
        [],
    )
    return found


def pending() -> list[Binding]:
    """Live storages with a pending value, in the order in which they became pending: place of the
    value, a number, storage, value, reference to the storage. They stay registered until bound."""
    return [
        *{
            id(storage): (value.place, number, storage, value, reference)
            for number, reference in enumerate(_session.pending.copy())
            if (storage := reference()) is not None and type(value := storage.value) is Out
        }.values()
    ]


def pending_storages() -> list[Storage]:
    """The storages of `pending()`."""
    return [binding[2] for binding in pending()]


def forget_bound() -> None:
    """Storages that died, or whose value has been computed, are no longer pending."""
    for _ in range(len(_session.pending)):
        owner = _session.pending.popleft()
        storage = owner()
        if storage is not None and type(storage.value) is Out:
            _session.pending.append(owner)


def keeps_views() -> bool:
    """Whether what was recorded on the mesh is still to be computed: a cut of other values, which
    may be this rank's alone, must not change what is recorded from now on."""
    return _session.journal is not None and _session.journal.pending() > 0


def forget_views() -> None:
    """Forget the cached values of views: a step has been cut. What stays would pin that step's
    results as long as the base lives."""
    if keeps_views():
        return
    _session.filled.clear()
    for _ in range(len(_session.viewed)):
        storage = _session.viewed.popleft()()
        if storage is not None:
            storage.views = None


def read(tensor: torch.Tensor) -> Out | Array:
    """The value of an hlo tensor as an operand of a node, recorded by who holds RECORDING. Never
    evaluates anything."""
    storage = tensor._storage
    view = tensor._view
    if view is None:
        return storage.value
    cached = storage.views
    if cached is not None:
        value = cached.get(view)
        if value is not None:
            return value
    return _replay(storage, view)


def _replay(storage: Storage, view: View) -> Out | Array:
    cached = storage.views
    if cached is None:
        cached = storage.views = {}
        _session.viewed.append(ref(storage))
    if view.parent is None:
        value = cached[view] = view.of(storage.value)
        return value
    chain = []
    value = None
    while view is not None:
        value = cached.get(view)
        if value is not None:
            break
        chain.append(view)
        view = view.parent
    if value is None:
        value = storage.value
    for view in reversed(chain):
        value = cached[view] = view.of(value)
    return value


def write_all(tensors: Sequence, values: Sequence[Out]) -> None:
    """`write` each pending value to its tensor: an optimizer's hundreds, without a call for
    each."""
    views = []
    with _session.values:
        for tensor, value in zip(tensors, values):
            if tensor._view is not None:
                views.append((tensor, value))
                continue
            storage = tensor._storage
            if type(storage.value) is not Out:
                _session.pending.append(ref(storage))
            storage.value = value
            storage.views = None
            storage.version += 1
            if storage.sharding is not None:
                written(value)
    for tensor, value in views:
        write(tensor, value)


_aten = torch.ops.aten
# views that may show an element several times
_REPEATING = {_aten.expand.default, _aten.unfold.default, _aten.as_strided.default}


def write(tensor: torch.Tensor, value: Out | Array) -> None:
    """Make `value` (of the tensor's shape and dtype) the tensor's value; through a view, fold it
    into the storage's."""
    storage = tensor._storage
    view = tensor._view
    if view is None:
        storage.replace(value)
        return
    chain = []
    while view is not None:
        chain.append(view)
        view = view.parent
    if any(step.op in _REPEATING for step in chain[1:]):
        # The base of the last view holds copies of an element, of which the view may show one:
        # address memory instead.
        direct = views.strided(storage.meta, tensor._meta)
        if not views.has_lazy_bits(tensor._view):
            tensor._view = direct
            chain = []
            while direct is not None:
                chain.append(direct)
                direct = direct.parent
            if not chain:
                storage.replace(value)
                return
    seen = value
    cached = storage.views or {}
    bases: list = [storage.value]
    for step in reversed(chain[1:]):
        base = cached.get(step)
        bases.append(base if base is not None else step.of(bases[-1]))
    for step, base in zip(chain, reversed(bases)):
        value = step.inverse(base, value)
    storage.replace(value)
    storage.views = {chain[0]: seen}
    _session.viewed.append(ref(storage))
