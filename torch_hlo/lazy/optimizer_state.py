"""Optimizers on hlo parameters: which of PyTorch's implementations they use, and what their first step creates.

PyTorch's default on a device it does not know is the "foreach" implementation: ten recorded ops per group, with a list of numbers computed in Python from
the number of the step, so that no two steps are the same. Where the user left the choice open, Adam takes the fused implementation instead: one op.
The others that count steps have none and take the capturable one: the count is a tensor, as are the numbers made from it.

State that the first step creates becomes an input of that step's program: `exp_avg = torch.zeros_like(p)` is part of the first step only. Recorded as it is, the first step of a training loop would be a program
of its own, compiled for a single run. With the zeros in memory before the program starts, it is the program of all later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_hlo.lazy import engine, tracked
from torch_hlo.lazy.dispatch import Handler
from torch_hlo.lazy.guard import Guard
from torch_hlo.lazy.meta import aten
from torch_hlo.lazy.storage import FILLED, Array, Number, Storage
from torch_hlo.lazy.tensor import HloTensor
from torch_hlo.lowering.graph import Out
from torch_hlo.lowering.registry import HLO_TO_TORCH
from torch_hlo.lowering.tape import TAPE

# Ops whose result is one number everywhere: the number, or the position of the argument that is it.
FILLS: dict = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.ones.default: 1, aten.ones_like.default: 1,
    aten.new_ones.default: 1, aten.full.default: [1], aten.full_like.default: [1], aten.new_full.default: [2], aten.zero.default: 0,
    aten.fill.Scalar: [1],
}  # fmt: skip


def noted(handler: Handler) -> Handler:
    """The handler of one of FILLS, which remembers what the result's storage began as."""

    def fill(args: tuple, kwargs: dict):
        result = handler(args, kwargs)
        if type(result) is HloTensor:
            note(result._storage)
        return result

    return fill


def note(storage: Storage) -> None:
    """The storage's value is the result of one of FILLS."""
    if type(storage.value) is Out:
        FILLED.append((ref(storage), storage.value))


# Optimizers whose step depends on its number -> the option of their groups that keeps the number on the device.
IMPLEMENTATIONS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "fused",  # and AdamW, a subclass
    torch.optim.NAdam: "capturable", torch.optim.RAdam: "capturable", torch.optim.Adamax: "capturable", torch.optim.ASGD: "capturable",
    torch.optim.Adafactor: "",  # has no such option
}  # fmt: skip


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    _choose(optimizer)
    for watcher in WATCHING:
        watcher(optimizer)


class Settings:
    """The options (learning rate, betas, …) with which optimizers stepped: what Python may change between two steps.

    `places`: (optimizer, number of the group, name, position in a tuple or None); `values`: one for each. `assigned`: places that the function itself
    set to a number which it computed (see tracked.py), and how.
    """

    def __init__(self) -> None:
        self.places: list[tuple[ref, int, str, int | None]] = []
        self.values: list = []
        self.assigned: dict[tuple[ref, int, str], tracked.How] = {}
        self.followed: set[int] = set()  # values of which it is known what they change
        self.groups: list[
            list[int]
        ] = []  # values that one number of the graph is, as long as they agree
        self._owners: set[ref] = set()
        self._read: tuple[int, Callable] = (
            0,
            list,
        )  # how many places there were, and what reads them: one list of Python

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step."""
        owner = ref(optimizer)
        if owner in self._owners:  # it steps twice
            return
        self.forget()
        self._owners.add(owner)
        for g, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if type(value) in tracked.TRACKED:
                    self.assigned[owner, g, name] = value.how
                elif isinstance(value, (int, float)):
                    self.places.append((owner, g, name, None))
                elif isinstance(value, tuple):
                    self.places.extend((owner, g, name, i) for i in range(len(value)))
        self.values = self.present()

    def present(self) -> list | None:
        """What the options are now; None if one is gone."""
        try:
            if len(self.places) != self._read[0]:
                guard = Guard()
                terms = [
                    f"{guard.name(owner)}().param_groups[{g}][{name!r}]"
                    + ("" if i is None else f"[{i}]")
                    for owner, g, name, i in self.places
                ]
                self._read = len(terms), guard.function("", f"[{', '.join(terms)}]")
            return self._read[1]()
        except (AttributeError, LookupError, TypeError):
            return None

    def forget(self) -> None:
        """The call is over: optimizers that are gone are its own (the inner loop of a meta-learner), and the next call makes others."""
        if all(owner() is not None for owner in self._owners):
            return
        kept = [
            (place, value)
            for place, value in zip(self.places, self.values)
            if place[0]() is not None
        ]
        self.places, self.values = [place for place, _ in kept], [value for _, value in kept]
        self.assigned = {
            place: how for place, how in self.assigned.items() if place[0]() is not None
        }
        self._owners, self._read = (
            {owner for owner in self._owners if owner() is not None},
            (0, list),
        )

    def end(self) -> None:
        """The function has returned: what it set are plain numbers from here on."""
        self.forget()
        for (owner, g, name), _ in self.assigned.items():
            value = owner().param_groups[g][name]
            if type(value) in tracked.TRACKED:
                self.assigned[owner, g, name] = value.how
                owner().param_groups[g][name] = tracked.plain(value)

    def assign(self, sources: Sequence) -> None:
        """Set what the function sets."""
        for (owner, g, name), how in self.assigned.items():
            owner().param_groups[g][name] = how.value(sources)

    def inside(self, before: list | None, scheduled: bool) -> str:
        """Why a replay does not know the options, or "": one had another value before the call (`before`, if known), or has after it, than at the optimizer's
        step, and no schedule (`scheduled`) has done that."""
        for known in (before, None if scheduled else self.present()):
            if known is not None and len(known) == len(self.values):
                changed = [place for place, a, b in zip(self.places, known, self.values) if a != b]
                if changed:
                    return f"{changed[0][2]!r} of {type(changed[0][0]()).__name__} changes inside the function, which a replay does not run; step the schedule outside"
        return ""

    def same(self, other: Settings) -> bool:
        return self.places == other.places and self.values == other.values

    def alike(
        self, other: Settings, old, new
    ) -> Callable[[Sequence, Sequence], int | float] | None:
        """How a number that was `old` there and is `new` here follows from the options: one of them, or its negative. None if it does not."""
        if self.places != other.places:
            return None
        for sign in (1, -1):
            alike = [
                k
                for k, pair in enumerate(zip(other.values, self.values))
                if pair == (sign * old, sign * new)
            ]
            if alike:
                self.followed.update(alike)
                self.groups.append(alike)
                return lambda options, sources, sign=sign, k=alike[0]: sign * options[k]
        return None

    def inherit(self, other: Settings) -> bool:
        """Know what another call with these options knew. False if they are others."""
        if self.places != other.places:
            return False
        self.followed, self.groups = set(other.followed), list(other.groups)
        return True

    def followable(self) -> list | None:
        """What the options are now; None if one has changed of which it is not known what it changes, or is gone."""
        present = self.present()
        if present is None or present == self.values:
            return present
        if any(
            a != b and k not in self.followed for k, (a, b) in enumerate(zip(present, self.values))
        ):
            return None
        for group in self.groups:
            if (
                len({present[k] for k in group}) > 1
                or type(present[group[0]]) is bool
                or not isinstance(present[group[0]], (int, float))
            ):
                return None
        return present


WATCHING: list[
    Callable[[torch.optim.Optimizer], None]
] = []  # are told of every optimizer that is about to step


def _choose(optimizer: torch.optim.Optimizer) -> None:
    """Set the implementation where the user left it open, and keep counts of steps on the device."""
    option = next((o for kind, o in IMPLEMENTATIONS.items() if isinstance(optimizer, kind)), None)
    if option is None:
        return
    for group in optimizer.param_groups:
        parameters = group["params"]
        if (
            not parameters
            or group.get("fused")
            or group.get("capturable")
            or group.get("differentiable")
            or not all(type(p) is HloTensor for p in parameters)
        ):
            continue
        if option in group:
            # Where the user chose an implementation, that one counts on the device; complex numbers are not fused.
            left_open = group.get("foreach") is None and group.get("fused") is None
            group[
                option
                if left_open and all(p.is_floating_point() for p in parameters)
                else "capturable"
            ] = True
        for p in parameters:  # state from a checkpoint, or from before the model moved
            for name in _COUNTS & optimizer.state.get(p, {}).keys():
                optimizer.state[p][name] = torch.as_tensor(
                    optimizer.state[p][name], dtype=torch.float32
                ).to(p.device)


_COUNTS = {
    "step",
    "mu_product",
    "eta",
    "mu",
}  # state that PyTorch keeps on the CPU unless an option says otherwise
_sizes: WeakKeyDictionary[torch.optim.Optimizer, int] = (
    WeakKeyDictionary()
)  # entries of `optimizer.state` when last seen


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if not FILLED or _sizes.get(optimizer) == len(optimizer.state):
        return
    _sizes[optimizer] = len(optimizer.state)
    states = {
        id(t._storage)
        for s in optimizer.state.values()
        if isinstance(s, dict)
        for t in s.values()
        if type(t) is HloTensor
    }
    for storage, out in ((owner(), out) for owner, out in FILLED):
        if (
            storage is not None
            and id(storage) in states
            and storage.value is not out
            and out.array is None
        ):
            number = torch.full(
                (), _number(out), dtype=HLO_TO_TORCH[storage.shape.dtype], device="cpu"
            )
            out.array = Array(
                storage.shape, engine.current().upload(number.expand(storage.shape.dims))
            )
            out.array.owners += (ref(storage),)
            TAPE.exact = False


def _number(out: Out):
    where = FILLS[out.node.target]
    value = out.node.args[where[0]] if isinstance(where, list) else where
    return value.value if isinstance(value, Number) else value


def register() -> None:
    """Watch every optimizer."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
