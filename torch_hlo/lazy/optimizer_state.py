"""Optimizers on hlo parameters: which of PyTorch's implementations they use, and what their first step creates.

PyTorch's default on a device it does not know is the "foreach" implementation: ten recorded ops per group, with a list of numbers computed in Python from
the number of the step, so that no two steps are the same. Where the user left the choice open, Adam takes the fused implementation instead: one op.
The others that count steps have none and take the capturable one: the count is a tensor, as are the numbers made from it.

State that the first step creates becomes an input of that step's program: `exp_avg = torch.zeros_like(p)` is part of the first step only. Recorded as it is, the first step of a training loop would be a program
of its own, compiled for a single run. With the zeros in memory before the program starts, it is the program of all later steps.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_hlo.lazy import engine
from torch_hlo.lazy.dispatch import Handler
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
}  # fmt: skip


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    _choose(optimizer)
    for settings in _watching:
        settings.add(optimizer)


class Settings:
    """The options (learning rate, betas, …) with which optimizers stepped: what Python may change between two steps.

    `places`: (optimizer, number of the group, name, position in a tuple or None); `values`: one for each. `inside`: the name of one that
    did not have the same value before, at and after the optimizer's step, or "".
    """

    def __init__(self) -> None:
        self.places: list[tuple[ref, int, str, int | None]] = []
        self.values: list = []
        self.inside = ""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step."""
        owner = ref(optimizer)
        if any(place[0] == owner for place in self.places):  # it steps twice
            return
        for g, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, (int, float)):
                    self.places.append((owner, g, name, None))
                elif isinstance(value, tuple):
                    self.places.extend((owner, g, name, i) for i in range(len(value)))
        self.values = self.present()

    def present(self) -> list | None:
        """What the options are now; None if one is gone."""
        values = []
        try:
            for owner, g, name, i in self.places:
                value = owner().param_groups[g][name]
                values.append(value if i is None else value[i])
        except (AttributeError, LookupError, TypeError):
            return None
        return values

    def compare(self, before: list | None) -> None:
        """The function that was watched has returned. `before`: what these options were when it was called, if they were known."""
        for known in (before, self.present()):
            if known is not None and len(known) == len(self.values):
                changed = [place for place, a, b in zip(self.places, known, self.values) if a != b]
                if changed:
                    self.inside = f"{changed[0][2]!r} of {type(changed[0][0]()).__name__}"

    def same(self, other: Settings) -> bool:
        return self.places == other.places and self.values == other.values


_watching: list[Settings] = []


@contextlib.contextmanager
def watching() -> Iterator[Settings]:
    """Collects the options of every optimizer that steps within the block."""
    settings = Settings()
    _watching.append(settings)
    try:
        yield settings
    finally:
        _watching.remove(settings)


def _choose(optimizer: torch.optim.Optimizer) -> None:
    """Set the implementation where the user left it open."""
    option = next((o for kind, o in IMPLEMENTATIONS.items() if isinstance(optimizer, kind)), None)
    if option is None:
        return
    for group in optimizer.param_groups:
        # Not when the user asked for an implementation: foreach, fused, capturable and differentiable are unset by default.
        if group.get("foreach") is None and group.get("fused") is None and not group.get("capturable") and not group.get("differentiable"):
            parameters = group["params"]
            if parameters and all(type(p) is HloTensor for p in parameters):
                group[option if all(p.is_floating_point() for p in parameters) else "capturable"] = True  # complex numbers are not fused
                for p in parameters:  # state from a checkpoint, or from before the model moved
                    for name in _COUNTS & optimizer.state.get(p, {}).keys():
                        optimizer.state[p][name] = torch.as_tensor(optimizer.state[p][name], dtype=torch.float32).to(p.device)


_COUNTS = {"step", "mu_product", "eta", "mu"}  # state that PyTorch keeps on the CPU unless an option says otherwise
_sizes: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # entries of `optimizer.state` when last seen


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if not FILLED or _sizes.get(optimizer) == len(optimizer.state):
        return
    _sizes[optimizer] = len(optimizer.state)
    states = {id(t._storage) for s in optimizer.state.values() if isinstance(s, dict) for t in s.values() if type(t) is HloTensor}
    for storage, out in ((owner(), out) for owner, out in FILLED):
        if storage is not None and id(storage) in states and storage.value is not out and out.array is None:
            number = torch.full((), _number(out), dtype=HLO_TO_TORCH[storage.shape.dtype], device="cpu")
            out.array = Array(storage.shape, engine.current().upload(number.expand(storage.shape.dims)))
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
