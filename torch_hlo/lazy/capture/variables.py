"""Python's variables that a captured function can see: see capture.py.

They are found from the function as Python finds them: what its closure and the globals that it
names hold, what modules, containers and objects of the program's own classes hold in turn, and what
their methods name. A replay is for calls in which all of them are what they were; a generated
function compares them. What a call leaves in them (tensors, numbers that traced_numbers.py
followed,
further elements of a list) a replay leaves in them again, as it returns what the function returns.
"""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from torch_hlo.lazy.capture import source_variables, traced_numbers
from torch_hlo.lazy.capture.guard import Guard
from torch_hlo.lazy.record import session
from torch_hlo.lazy.record.meta import Meta
from torch_hlo.lazy.record.storage import Storage
from torch_hlo.lazy.record.tensor import HloTensor, blank, make
from torch_hlo.lazy.record.views import View

DEPTH = 4  # objects within objects, and functions that functions name
ELEMENTS = 64  # containers that hold more are not looked into; appending to them is seen
_SIMPLE = frozenset({int, float, bool, str, type(None)})
_WORDS = frozenset({bool, str, type(None)})
_CONTAINERS = (list, dict, deque)
# other ways to read may make what they return (Hugging Face's ACT2FN)
_READS = frozenset(kind.__getitem__ for kind in _CONTAINERS)
# nobody is expected to replace these
_NO_VARIABLES = (types.ModuleType, type, types.BuiltinFunctionType)
_PARTS = ("_parameters", "_buffers", "_modules")
_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training", *_PARTS}
_MISSING = object()


class Slot:
    """A variable: what `owner` (a cell, or what has items) holds under `key`."""

    __slots__ = ("owner", "key", "name", "before")

    def __init__(self, owner, key: str | None, name: str) -> None:
        self.owner, self.key, self.name = owner, key, name
        self.before = _weak(self.read())

    def read(self):
        try:
            return (
                self.owner.cell_contents
                if type(self.owner) is types.CellType
                else self.owner[self.key]
            )
        except (LookupError, ValueError):
            return _MISSING

    def write(self, value) -> None:
        if type(self.owner) is types.CellType:
            self.owner.cell_contents = value
        else:
            self.owner[self.key] = value

    def expression(self, guard: Guard) -> str:
        owner = guard.name(self.owner)
        if type(self.owner) is types.CellType:
            return f"{owner}.cell_contents"
        return (
            f"{owner}[{self.key!r}]"
            if type(self.key) in (int, str)
            else f"{owner}[{guard.name(self.key)}]"
        )


class Moving(NamedTuple):
    """A tensor of a variable that does not hold the same one at each call: leaf `at` of what the
    slot holds."""

    where: tuple[int, object]
    at: int


class Variables:
    """`left`: what the call has left in variables, as leaves, and `forms`: in which, and how they
    are put together; `places`: storages of tensors in variables that change; `inside`: why the call
    cannot be replayed, or "".

    `counted`: names of whole numbers that may be followed (see source_variables.py); `known`:
    what an
      earlier call found.
    """

    def __init__(self, fn: Callable, known: Variables | None, counted: set[str]) -> None:
        self.inside = ""
        self._name = getattr(fn, "__qualname__", repr(fn))
        self.left: list = []
        self.forms: list[tuple] = []
        self.places: dict[ref, Moving] = {}
        # slots whose tensors change -> what these have in common
        self.moving: dict[tuple, tuple] = {}
        # slots of numbers that a call changed
        self.learned: set[tuple] = set() if known is None else set(known.learned)
        self._known = known
        self._counted = counted
        self._random = _random_state()
        self._slots: dict[tuple, Slot] = {}
        # slot -> storages of the tensors in it, and what they are like
        self._tensors: dict[tuple, tuple[list[ref | None], tuple]] = {}
        # (container, its keys or elements, their names)
        self._containers: list[tuple[object, list, Callable[[object], str]]] = []
        self._versions: list[tuple[ref, int, str]] = []  # of tensors of the CPU
        # (how to read its state, the state, name)
        self._generators: list[tuple[Callable, str, str]] = []
        # modules and parameters, and how many hooks they have
        self._hooked: list[tuple[ref, int]] = []
        self._functions: list[types.FunctionType] = []
        self._followed: dict[tuple, traced_numbers.How] = {}
        self._writes: list[Callable] = []
        # variables that are set to what does not follow from numbers, and what they were
        self._constants: list[tuple[Slot, object]] = []
        self._seen: dict[int, object] = {}
        self._lengths: list[tuple[object, int, str]] = []
        self._visit(fn, "", DEPTH, root=True)

    # ---- what there is

    def _slot(self, owner, key: str | None, name: str, depth: int) -> None:
        where = id(owner), key
        if where in self._slots:
            return
        slot = Slot(owner, key, name)
        value = slot.read()
        if isinstance(value, types.ModuleType):
            self._namespace(value, depth)
        if value is _MISSING or isinstance(value, _NO_VARIABLES):
            return
        self._slots[where] = slot
        if type(value) not in _SIMPLE:
            leaves = pytree.tree_leaves(value) if isinstance(value, (tuple, HloTensor)) else ()
            if any(isinstance(x, HloTensor) for x in leaves):
                self._tensors[where] = (
                    [reference(x._storage) if isinstance(x, HloTensor) else None for x in leaves],
                    _kind(value),
                )
            self._visit(value, name, depth)

    def _visit(self, value, name: str, depth: int, root: bool = False) -> None:
        if (
            id(value) in self._seen
            or isinstance(value, _NO_VARIABLES)
            or type(value) in _SIMPLE
            or isinstance(value, types.FunctionType)
            and not (depth or root)
        ):
            return
        self._seen[id(value)] = value if not isinstance(value, torch.Tensor) else None
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and not value.is_inference():
                self._versions.append((ref(value), value._version, name))
            elif value.is_leaf and value.requires_grad:
                self._hooked.append((ref(value), _hooks(value)))
                for hook in (
                    *(value._backward_hooks or {}).values(),
                    *(getattr(value, "_post_accumulate_grad_hooks", None) or {}).values(),
                ):
                    self._visit(hook, name, max(depth, 2))
        elif isinstance(value, types.MethodType):
            code = getattr(value.__func__, "__code__", None)
            self._visit(
                value.__self__,
                code.co_varnames[0] if code is not None and code.co_argcount else "self",
                depth,
            )
            self._visit(value.__func__, name, depth, root)
        elif isinstance(value, types.FunctionType):
            if root or _own(value):
                self._function(value, depth - 1)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part, name, depth, root)
        elif isinstance(value, torch.nn.Module):
            self._module(value, name, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, name, depth)
        elif isinstance(value, _CONTAINERS):
            if type(value).__getitem__ in _READS:
                self._container(value, name, depth)
        elif isinstance(value, tuple):
            for i, x in enumerate(value[:ELEMENTS]):
                self._visit(x, f"{name}[{i}]", depth)
        elif isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            state = (
                getattr(value, "getstate", None)
                or getattr(value, "get_state", None)
                or (lambda: value.bit_generator.state)
            )
            self._generators.append((state, repr(state()), name))
        elif depth and _own(type(value)):
            self._object(value, name, depth - 1)

    def _function(self, fn: types.FunctionType, depth: int) -> None:
        self._functions.append(fn)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            self._slot(cell, None, name, depth)
        for name in _names(fn.__code__):
            if name in fn.__globals__:
                self._slot(fn.__globals__, name, name, depth)
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._visit(value, f"a default argument of {fn.__name__}", depth)
        self._visit(getattr(fn, "__wrapped__", None), "", depth, root=True)

    def _namespace(self, module: types.ModuleType, depth: int) -> None:
        """What the functions found so far name in a module of the program."""
        if depth and id(module) not in self._seen and _own(module):
            self._seen[id(module)] = module
            for name in {name for fn in self._functions for name in _names(fn.__code__)} & vars(
                module
            ).keys():
                self._slot(vars(module), name, f"{module.__name__}.{name}", depth - 1)

    def _object(self, value, name: str, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict:
            return
        attribute = f"{name}.{{}}".format
        self._containers.append((attributes, list(attributes), attribute))
        module = isinstance(value, torch.nn.Module)
        for key in list(attributes):
            if not (module and key in _INTERNAL):
                self._slot(attributes, key, attribute(key), depth)
        for kind in type(value).__mro__:
            if _own(kind):
                for member in vars(kind).values():
                    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                    if isinstance(member, types.FunctionType):
                        self._visit(member, "", max(depth, 1))

    def _module(self, module: torch.nn.Module, name: str, depth: int) -> None:
        self._hooked.append((ref(module), _hooks(module)))
        self._object(module, name, depth)
        for key, hooks in vars(module).items():
            if key in _INTERNAL and isinstance(hooks, dict) and hooks:
                self._container(hooks, f"{name}.{key}", max(depth, 1))

    def _optimizer(self, optimizer: torch.optim.Optimizer, name: str, depth: int) -> None:
        """Its options are followed by lazy/ops/optimizer_state.py; the state of PyTorch's own is
        tensors that stay."""
        groups = optimizer.param_groups
        for values, part in (
            (groups, name + ".param_groups"),
            *((g["params"], f"{name}.param_groups[{i}]") for i, g in enumerate(groups)),
        ):
            self._containers.append((values, list(map(_weak, values)), f"{part}[{{!r}}]".format))
        if _own(type(optimizer)):
            for key in vars(optimizer).keys() - {"param_groups", "state", "defaults"}:
                if "hook" not in key:
                    self._slot(vars(optimizer), key, f"{name}.{key}", depth)
            for state in optimizer.state.values():
                self._visit(state, f"{name}.state[...]", max(depth, 1))
            for member in vars(type(optimizer)).values():
                self._visit(getattr(member, "__wrapped__", member), "", 1)

    def _container(self, value, name: str, depth: int) -> None:
        owner, _, part = name.rpartition(".")
        element = f"{owner}.{{}}".format if part in _PARTS else f"{name}[{{!r}}]".format
        self._containers.append(
            (
                value,
                list(value) if isinstance(value, dict) else list(map(_weak, value)),
                element,
            )
        )
        if len(value) <= ELEMENTS or part in _PARTS:
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                self._slot(
                    value,
                    key,
                    element(key) if type(key) in (int, str) else f"{name}[...]",
                    depth,
                )

    def meet(self, module: torch.nn.Module) -> None:
        """A module is about to run. One that the call made for itself is no variable."""
        if id(module) not in self._seen:
            first = next(module.parameters(), None)
            if not (
                isinstance(first, HloTensor) and first._storage.traced == session.current().traces
            ):
                self._visit(module, type(module).__name__, DEPTH)

    # ---- a call that is traced

    def begin(self, log: traced_numbers.Log) -> None:
        """The function is about to be called: what it counts are numbers that remember it."""
        for where, slot in self._slots.items():
            value = slot.read()
            if type(value) in (int, float) and (
                where in self.learned or slot.name in self._counted
            ):
                number = log.counter(value)
                slot.write(number)
                self._followed[where] = number.how

    def sources(self) -> list:
        """The present values of the numbers that are followed."""
        return [self._slots[where].read() for where in self._followed]

    def end(self) -> None:
        """It has returned, or raised: tracked numbers in variables become plain, and what has
        changed is noted."""
        grown = [c for c, before, element in self._containers if self._grown(c, before, element)]
        self._lengths = [
            (c, len(c), _container_name(element))
            for c, _, element in self._containers
            if not any(c is g for g in grown)
        ]
        for where, slot in self._slots.items():
            now = slot.read()
            if any(slot.owner is g for g in grown):
                self.moving[where] = ()
            elif where in self._followed or not _same(slot.before, now):
                self._changed(where, slot, now)
        self._look_outside()
        self._compare_tensors()
        self._seen, self._containers, self._known = {}, [], None
        for slot in self._slots.values():
            slot.before = None

    def _changed(self, where: tuple, slot: Slot, now) -> None:
        followed, old = where in self._followed, slot.before
        self.moving[where] = ()
        leaves, form = ([now], _LEAF) if now is None else pytree.tree_flatten(now)
        number = (
            type(old) is float
            or type(old) is int
            and source_variables.counted(self._functions, slot.name)
        )
        if number:  # it may follow from what it was
            self.learned.add(where)
        if now is _MISSING:
            self._refuse(f"it removes {slot.name}, which a replay does not do")
        elif (
            followed
            and type(now) in _SIMPLE
            or leaves
            and all(type(x) in traced_numbers.TRACKED or _plain_tensor(x) for x in leaves)
        ):
            self._leave(where, slot.write, leaves, form)
            slot.write(self._settled(leaves, form))
        elif type(now) in _WORDS and type(old) in _WORDS:
            self._constants.append((slot, old))
            self._leave(where, slot.write, [now], _LEAF)
        elif type(now) in _SIMPLE:
            self._refuse(
                f"it changes {slot.name} (from {_text(old)} to {now!r}), which a replay does not"
                " do; do that outside, or keep it in a tensor"
            )
        else:
            self._refuse(
                f"it puts another {type(now).__qualname__} into {slot.name}, which a replay does"
                " not do; do that outside"
            )

    def _grown(self, container, before: list, element: Callable[[object], str]) -> bool:
        """Whether further elements were appended to the container, and nobody looks at it. New keys
        are variables that were missing."""
        if isinstance(container, dict):
            known = set(before)
            for key in [k for k in container if k not in known]:
                slot = self._slots[id(container), key] = Slot(container, key, element(key))
                slot.before = _MISSING
            return False
        new, name = list(container)[len(before) :], _container_name(element)
        if (
            len(container) == len(before)
            or len(container) > len(before)
            and not all(map(_same, before, container))
        ):
            return False
        if len(container) < len(before) or not source_variables.appended(self._functions, name):
            self._refuse(
                f"it changes how many elements {name} has, which a replay does not do; do that"
                " outside"
            )
            return False
        leaves, form = pytree.tree_flatten(new)
        if not all(
            type(x) in traced_numbers.TRACKED or type(x) in _SIMPLE or _plain_tensor(x)
            for x in leaves
        ):
            self._refuse(
                f"it appends another {type(new[0]).__qualname__} to {name}, which a replay does not"
                " do; do that outside"
            )
            return False
        self._leave((id(container), _MISSING), container.extend, leaves, form)
        for i, x in enumerate(self._settled(leaves, form)):
            container[len(before) + i] = x
        return True

    def _leave(self, where: tuple, write: Callable, leaves: list, form) -> None:
        self.forms.append((where, form))
        self._writes.append(write)
        self.left += leaves

    def _settled(self, leaves: list, form) -> object:
        """What remains in a variable: numbers that nobody follows, values without the graph of
        autograd, which would keep more of the call alive."""
        ends = [isinstance(x, HloTensor) and x.requires_grad and not x.is_leaf for x in leaves]
        return pytree.tree_unflatten(
            [
                Ended(self._name)(x._meta, x._storage, x._view) if end else traced_numbers.plain(x)
                for x, end in zip(leaves, ends)
            ],
            form,
        )

    def assign(self, values: Sequence) -> None:
        """Leave in variables what the call has computed: present values for `left`."""
        at = 0
        for (_, form), write in zip(self.forms, self._writes):
            write(pytree.tree_unflatten(values[at : at + form.num_leaves], form))
            at += form.num_leaves

    def _refuse(self, reason: str) -> None:
        self.inside = self.inside or reason

    def _look_outside(self) -> None:
        if _random_state() != self._random or any(
            repr(read()) != state for read, state, _ in self._generators
        ):
            self._refuse(
                "it draws random numbers of Python or NumPy; draw them outside and pass them as"
                " arguments, or use torch's"
            )
        for tensor, version, name in self._versions:
            if tensor() is not None and tensor()._version != version:
                self._refuse(
                    f"it writes to {name}, a tensor of the CPU, which a replay does not do; move it"
                    " to the device"
                )

    # ---- tensors in variables

    def _compare_tensors(self) -> None:
        """Find the variables that do not hold the same tensors at each call, and tensors that got
        another `data`."""
        known = self._known
        for where, (storages, kind) in self._tensors.items():
            slot = self._slots[where]
            now = slot.read()
            if (
                where not in self.moving
                and isinstance(now, HloTensor)
                and now._storage is not storages[0]()
            ):
                tensor = ref(now)
                self._leave(
                    (where, "data"),
                    lambda value, tensor=tensor: setattr(tensor(), "data", value),
                    [make(now._meta, now._storage, now._view)],
                    _LEAF,
                )
                self.moving[where] = kind
            elif (
                where in self.moving
                or known is not None
                and (
                    where in known.moving
                    or where in known._tensors
                    and known._tensors[where][0] != storages
                )
            ):
                self.moving[where] = kind
            if where in self.moving:
                self.places.update(
                    {s: Moving(where, i) for i, s in enumerate(storages) if s is not None}
                )

    def held(self, x: Moving) -> Storage | None:
        """That of the tensor which the variable holds at present; None if it is another kind of
        value."""
        now = self._slots[x.where].read()
        if _kind(now) != self.moving[x.where]:
            return None
        return (now if isinstance(now, HloTensor) else pytree.tree_leaves(now)[x.at])._storage

    # ---- whether all is as it was

    def conditions(self, guard: Guard) -> None:
        """Those under which the call may be replayed."""
        for where, slot in self._slots.items():
            if where not in self.moving and type(now := slot.read()) in _SIMPLE:
                guard.value(slot.expression(guard), now, slot.name)
        for slot, before in self._constants:
            guard.value(slot.expression(guard), before, slot.name)
        by_storage: dict[ref, list[tuple]] = {}
        for where, slot in self._slots.items():
            now = slot.read()
            if isinstance(now, HloTensor):
                by_storage.setdefault(reference(now._storage), []).append(where)
            if where in self.moving or type(now) in _SIMPLE:
                continue
            expression = slot.expression(guard)
            if isinstance(now, HloTensor):
                guard.term(
                    f"(t := {expression}) is {guard.name(ref(now))}() and t._storage is"
                    f" {guard.name(reference(now._storage))}()",
                    slot.name,
                )
            else:
                weak = _weakly(now)
                guard.term(
                    f"{expression} is {guard.name(weak)}{'()' if weak is not now else ''}",
                    slot.name,
                )
        for first, *others in by_storage.values():
            if any(where in self.moving for where in (first, *others)):
                for where in others:
                    guard.term(
                        f"{self._slots[where].expression(guard)}._storage is"
                        f" {self._slots[first].expression(guard)}._storage",
                        self._slots[where].name,
                    )
        for container, length, name in self._lengths:
            guard.term(
                f"len({guard.name(container)}) == {length}",
                f"how many elements {name} has",
            )
        for tensor, version, name in self._versions:
            if tensor() is not None:
                guard.term(
                    f"{guard.name(tensor)}()._version == {version}",
                    f"{name}, a tensor of the CPU,",
                )
        for x, n in self._hooked:
            if n and isinstance(x(), torch.Tensor):
                guard.term(
                    f"{guard.name(_hooks)}({guard.name(x)}()) == {n}",
                    "hooks of a parameter",
                )
        guard.changing(
            f"{guard.name(RemovableHandle)}.next_id",
            lambda: all(x() is None or _hooks(x()) == n for x, n in self._hooked),
            "hooks",
        )


_LEAF = pytree.tree_flatten(0)[1]


class _Ended(torch.autograd.Function):
    """Tensors whose storage is still to be given, and which need gradients: the backward pass from
    them is over, or was never recorded."""

    @staticmethod
    def forward(
        ctx, anchor: torch.Tensor, name: str, meta: Meta, count: int
    ) -> tuple[HloTensor, ...]:
        ctx.name = name
        return tuple([blank(meta) for _ in range(count)])

    @staticmethod
    def backward(ctx, *gradients) -> None:
        raise RuntimeError(
            f"torch_hlo.compile: a result of {ctx.name} has no graph to go back through; call"
            f" backward() or torch.autograd.grad() inside {ctx.name}"
        )


_ANCHOR = torch.zeros((), requires_grad=True)


class Ended:
    """`make` for a result of the captured function `name` that needs gradients. One that comes back
    is made many at a time, while somebody waits for a program: alone it takes five times as
    long."""

    COUNT = 16

    def __init__(self, name: str) -> None:
        self._name = name
        self._spare: list[HloTensor] = []
        self._meta: Meta | None = None  # of the last one

    def __call__(self, meta: Meta, storage: Storage, view: View | None = None) -> HloTensor:
        known = meta is self._meta
        if not known or not self._spare:
            self._meta, self._spare = meta, []
            self._fill(self.COUNT if known else 1)
        tensor = self._spare.pop()
        if known and len(self._spare) == self.COUNT // 2:
            _WANTED.append(self)
        tensor._storage, tensor._view = storage, view
        return tensor

    def _fill(self, count: int) -> None:
        with torch.enable_grad():
            self._spare += _Ended.apply(_ANCHOR, self._name, self._meta, count)

    @staticmethod
    def ahead(enough: Callable[[], bool]) -> None:
        """Make those that will be wanted."""
        while _WANTED and not torch.is_inference_mode_enabled() and not enough():
            wanted = _WANTED.popleft()
            wanted._fill(wanted.COUNT - len(wanted._spare))


_WANTED: deque[Ended] = deque()
session.current().executor.meanwhile.append(Ended.ahead)


def reference(storage: Storage) -> ref:
    """A weak reference that can be looked up when its storage is gone."""
    r = ref(storage)
    hash(r)
    return r


def like(x: HloTensor) -> tuple:
    """What tensors have in common of which a replay takes one or the other: metadata, whether it
    requires gradients, the view of its storage."""
    view = x._view
    if view is None:
        return x._meta, x.requires_grad
    steps = []
    while view is not None:
        steps.append((view.op, repr(view.args)))
        view = view.parent
    return x._meta, x.requires_grad, tuple(steps)


def _kind(value: object) -> object:
    """What is common to values of a variable whose tensors change."""
    if isinstance(value, HloTensor):
        return like(value)
    leaves, form = pytree.tree_flatten(value)
    return form, tuple([like(x) if isinstance(x, HloTensor) else x for x in leaves])


def _container_name(element: Callable[[object], str]) -> str:
    return element("").removesuffix("['']").removesuffix(".")


def _plain_tensor(x: object) -> bool:
    return isinstance(x, HloTensor) and not isinstance(x, torch.nn.Parameter)


def _weak(value):
    """The value, to be compared with `_same`; tensors are not kept alive."""
    if isinstance(value, torch.Tensor):
        return ref(value)
    return tuple(map(_weak, value)) if type(value) is tuple else value


def _same(before, now) -> bool:
    if before is now or type(before) is ref and before() is now:
        return True
    if type(before) is not type(now):
        return False
    return (
        type(now) in _SIMPLE
        and before == now
        or type(now) is tuple
        and len(before) == len(now)
        and all(map(_same, before, now))
    )


def _weakly(value):
    try:
        return ref(value)
    except TypeError:
        return value


def _text(value: object) -> str:
    return (
        "nothing"
        if value is _MISSING
        else (
            repr(value)
            if type(value) in _SIMPLE
            else type(value).__qualname__
            if type(value) is not ref
            else "a tensor"
        )
    )


def _hooks(x) -> int:
    if isinstance(x, torch.nn.Module):
        return sum(len(v) for k, v in vars(x).items() if k in _INTERNAL and isinstance(v, dict))
    return (
        0
        if x is None
        else len(x._backward_hooks or ())
        + len(getattr(x, "_post_accumulate_grad_hooks", None) or ())
    )


@functools.cache
def _own_module(name: str) -> bool:
    if name.partition(".")[0] in ("torch", "numpy", "torch_hlo", "builtins"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return (
        name == "__main__"
        if file is None
        else "site-packages" in file or not file.startswith(_STANDARD)
    )


_STANDARD = sysconfig.get_path("stdlib")


def _own(x) -> bool:
    """Whether a module, class or function is the program's own, or that of a library which may keep
    variables for it."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    return not isinstance(name, str) or _own_module(name)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals (and attributes) in a function and those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _random_state() -> tuple:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else (0, b"", 0)
    return random.getstate(), state[1].tobytes() if numpy is not None else b"", state[2]
