"""The options of optimizers, which a replay of a captured step has to follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import torch

from torch_hlo.lazy.capture import traced_numbers
from torch_hlo.lazy.capture.guard import Guard


class Settings:
    """The options (learning rate, betas, …) with which optimizers stepped: what Python may change
    between two steps.

    `places`: (optimizer, number of the group, name, position in a tuple or None); `values`: one for
      each. `assigned`: places that the function itself
    set to a number which it computed (see lazy/capture/traced_numbers.py), and how.
    """

    def __init__(self) -> None:
        self.places: list[tuple[ref, int, str, int | None]] = []
        self.values: list = []
        self.assigned: dict[tuple[ref, int, str], traced_numbers.How] = {}
        self.followed: set[int] = set()  # values of which it is known what they change
        # values that one number of the graph is, as long as they agree
        self.groups: list[list[int]] = []
        self._owners: set[ref] = set()
        # how many places there were, and what reads them: one list of Python
        self._read: tuple[int, Callable] = 0, list

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step."""
        owner = ref(optimizer)
        if owner in self._owners:  # it steps twice
            return
        self.forget()
        self._owners.add(owner)
        for g, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if type(value) in traced_numbers.TRACKED:
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
        """The call is over: optimizers that are gone are its own (the inner loop of a
        meta-learner), and the next call makes others."""
        if all(owner() is not None for owner in self._owners):
            return
        kept = [
            (place, value)
            for place, value in zip(self.places, self.values)
            if place[0]() is not None
        ]
        self.places, self.values = (
            [place for place, _ in kept],
            [value for _, value in kept],
        )
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
            if type(value) in traced_numbers.TRACKED:
                self.assigned[owner, g, name] = value.how
                owner().param_groups[g][name] = traced_numbers.plain(value)

    def assign(self, sources: Sequence) -> None:
        """Set what the function sets."""
        for (owner, g, name), how in self.assigned.items():
            owner().param_groups[g][name] = how.value(sources)

    def inside(self, before: list | None, scheduled: bool) -> str:
        """Why a replay does not know the options, or "": one had another value before the call
        (`before`, if known), or has after it, than at the optimizer's step, and no schedule
        (`scheduled`) has done that."""
        for known in (before, None if scheduled else self.present()):
            if known is not None and len(known) == len(self.values):
                changed = [place for place, a, b in zip(self.places, known, self.values) if a != b]
                if changed:
                    return (
                        f"{changed[0][2]!r} of {type(changed[0][0]()).__name__} changes inside the"
                        " function, which a replay does not run; step the schedule outside"
                    )
        return ""

    def same(self, other: Settings) -> bool:
        return self.places == other.places and self.values == other.values

    def alike(
        self, other: Settings, old: float, new: float
    ) -> Callable[[Sequence, Sequence], int | float] | None:
        """How a number that was `old` there and is `new` here follows from the options: one of
        them, or its negative. None if it does not."""
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
        """What the options are now; None if one has changed of which it is not known what it
        changes, or is gone."""
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
