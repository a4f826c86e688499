"""Numbers that remember how they follow from others: `torch.SymFloat` and its kin over a node of
this package. PyTorch hands them through to operators whose arguments are Scalars, and asks for the
plain number (`guard_float`) wherever it needs one: that number is then a condition. Imports sympy.
The same in 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.sym_node import METHOD_TO_OPERATOR

Value = bool | int | float
How = Callable[[Sequence[Value]], Value]  # the number for other sources
Conditions = list[tuple[How, Value]]  # what has been taken for granted


@dataclass(eq=False)
class Followed:
    """The node of a number: its value now, and how it follows from the sources. PyTorch calls it a
    SymNode."""

    value: Value
    how: How
    conditions: Conditions

    def __getattr__(self, name: str) -> Callable:
        """Arithmetic and comparisons, as torch.fx.experimental.sym_node names them."""
        function = METHOD_TO_OPERATOR.get(name)
        if function is None:
            raise AttributeError(name)

        def apply(*others: Followed) -> Followed:
            hows = [self.how, *[x.how for x in others]]
            return Followed(
                function(self.value, *[x.value for x in others]),
                lambda sources: function(*[how(sources) for how in hows]),
                self.conditions,
            )

        return apply

    def _guard(self, *where: object) -> Any:
        """The plain number: it must be the same whenever the result is used."""
        self.conditions.append((self.how, self.value))
        return self.value

    guard_float = guard_int = guard_bool = bool_ = int_ = float_ = expect_true = _guard

    def _wrap(self, value: Value) -> Followed:
        return Followed(value, lambda sources: value, self.conditions)

    wrap_float = wrap_int = wrap_bool = _wrap

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        """Answers and whole numbers are not followed: they become conditions."""
        return type(self.value) is not float

    def is_nested_int(self) -> bool:
        return False

    def _nothing(self) -> None:
        return None

    maybe_as_float = maybe_as_int = maybe_as_bool = _nothing

    def _graph_repr(self) -> str:
        return repr(self.value)


KINDS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def plain(x: Any) -> Any:
    """The number itself, of one that is followed."""
    return x.node.value if isinstance(x, KINDS) and isinstance(x.node, Followed) else x


def followed(value: float, how: How, conditions: Conditions) -> torch.SymFloat:
    """A float whose uses are followed."""
    return torch.SymFloat(Followed(value, how, conditions))
