"""Numbers that a captured function computes with in Python: those that it read from tensors, and
its floating-point arguments.

They are floats and ints for everybody, and remember how they were computed. So a replay can compute
them again: as numbers of the graph, as what the function returns, as what it leaves in variables,
as the answers to its comparisons (`if loss.item() > 3:`). What leaves Python unseen (a number that
is printed, kept elsewhere, or used as a key) is noted, so that such a function is not replayed.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from weakref import ref

from torch_hlo.lazy.record import recording


class How:
    """How a number follows from others: source number `index`, or `function` of operands (How, or
    constants)."""

    __slots__ = ("function", "operands", "index")

    def __init__(self, function: Callable | None, operands: Sequence, index: int = -1) -> None:
        self.function, self.operands, self.index = function, tuple(operands), index

    def value(self, sources: Sequence) -> float:
        """The number for these sources. Raises what Python's arithmetic raises."""
        if self.function is None:
            return sources[self.index]
        return self.function(*[x.value(sources) if type(x) is How else x for x in self.operands])

    def alike(self, other: How) -> bool:
        """Whether the other is computed in the same way."""
        if (
            self.function is not other.function
            or self.index != other.index
            or len(self.operands) != len(other.operands)
        ):
            return False
        return all(
            a.alike(b) if type(a) is How and type(b) is How else type(a) is type(b) and a == b
            for a, b in zip(self.operands, other.operands)
        )

    def last(self) -> int:
        """The highest source that it needs, -1 for none."""
        return (
            self.index
            if self.function is None
            else max([x.last() for x in self.operands if type(x) is How], default=-1)
        )


class Log:
    """What a call computed with its numbers.

    `sources`: their values; `made`: (how, value) of each number; `answers`: (how, answer) of each
      comparison; `shown`: what was done that a replay cannot do.
    """

    def __init__(self) -> None:
        self.sources: list = []
        self.made: list[tuple[How, int | float]] = []
        self.answers: list[tuple[How, object]] = []
        self.shown = ""
        self.asked = ""  # the line that last asked for a value that must not change
        self.active = True
        self._alive: list[ref] = []

    def source(self, value: int | float):
        """A number that is the next source."""
        self.sources.append(value)
        return self._number(value, How(None, (), len(self.sources) - 1))

    def counter(self, value: int | float):
        """A variable that is only counted, compared and divided (see source_variables.py), which
        is the next
        source: a float whatever it is, because Python's floats compute with whole numbers (`0.1 *
        step`) without asking them."""
        self.sources.append(value)
        return self._number(float(value), How(None, (), len(self.sources) - 1))

    def exact(self, number) -> None:
        """Python has seen this number: a replay is for calls in which it is the same."""
        self.asked = recording.source()
        self.answers.append((number.how, _plain(number)))

    def result(self, value: object, function: Callable, operands: Sequence):
        """The value of a function of numbers of which one is tracked."""
        kind = type(value)
        if value is NotImplemented or not self.active:
            return value
        how = How(function, [x.how if type(x) in TRACKED else x for x in operands])
        if kind is bool:
            self.asked = recording.source()
            self.answers.append((how, value))
        elif kind is int or kind is float:
            return self._number(value, how)
        else:
            for x in operands:
                if type(x) in TRACKED:
                    self.exact(x)
        return value

    def _number(self, value: float, how: How):
        number = (TrackedInt if isinstance(value, int) else TrackedFloat)(value)
        number.how, number.log, number.token = how, self, _Token()
        self.made.append((how, value))
        self._alive.append(ref(number.token))
        return number

    def close(self) -> None:
        """The call is over, and what it returned has been taken apart: whoever still holds a number
        has kept it."""
        if any(x() is not None for x in self._alive):
            gc.collect()
            if not self.shown and any(x() is not None for x in self._alive):
                self.shown = "a number that was read, or given, is kept: return it instead"
        self._alive, self.active = [], False


class _Token:
    """Lives as long as its number: ints have no weak references."""


def _plain(x):
    return (
        float.__float__(x)
        if type(x) is TrackedFloat
        else int.__int__(x)
        if type(x) is TrackedInt
        else x
    )


def plain(x):
    """The number, as the function would have got it."""
    return x.how.value(x.log.sources) if type(x) in TRACKED else x


def _operation(base: type, name: str, function: Callable):
    method, reflected = (
        getattr(base, name),
        name.startswith("__r") and name != "__round__",
    )

    def operation(self, *others):
        value = method(self, *map(_plain, others))
        return self.log.result(value, function, (*others, self) if reflected else (self, *others))

    return operation


def _seen(base: type, name: str):
    method = getattr(base, name)

    def seen(self) -> float:
        if self.log.active:
            self.log.exact(self)
        return method(self)

    return seen


def _shown(base: type, name: str):
    method = getattr(base, name)

    def shown(self, *args):
        if self.log.active:
            self.log.shown = "a number is shown, which a replay does not: return it instead"
        return method(self, *args)

    return shown


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_REFLECTED = {f"__r{name}__": getattr(operator, f"__{name}__") for name in _BINARY}
_TRACED = {
    **{
        f"__{name}__": getattr(operator, f"__{name}__")
        for name in (*_BINARY, *_COMPARE, "neg", "pos", "abs")
    },
    **_REFLECTED,
    "__round__": round,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__bool__": bool,
    "is_integer": lambda x: float(x).is_integer(),
}


def _tracked(base: type, others: Sequence[str]) -> type:
    members: dict = {
        name: _operation(base, name, function)
        for name, function in _TRACED.items()
        if hasattr(base, name)
    }
    members |= {name: _seen(base, name) for name in others}
    members |= {name: _shown(base, name) for name in ("__repr__", "__str__", "__format__")}
    # a copy is a number like any other
    members["__reduce__"] = lambda self: (base, (_plain(self),))
    return type(f"Tracked{base.__name__.capitalize()}", (base,), members)


TrackedFloat = _tracked(float, ("__int__", "__float__", "__hash__"))
TrackedInt = _tracked(int, ("__int__", "__float__", "__index__", "__hash__"))
TRACKED = frozenset({TrackedFloat, TrackedInt})


@contextlib.contextmanager
def logging() -> Iterator[Log]:
    """Numbers are tracked in the block. Functions of `math` take part, as they look into a float
    without asking it, and max and min, so that what they choose is no question of its own. Other
    threads have no tracked numbers, so nothing changes for them."""
    global _blocks
    with _LOCK:
        _blocks += 1
        if _blocks == 1:
            for module, name, function in _FUNCTIONS:
                setattr(module, name, _following(function))
    try:
        yield Log()
    finally:
        with _LOCK:
            _blocks -= 1
            if not _blocks:
                for module, name, function in _FUNCTIONS:
                    setattr(module, name, function)


def _following(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs) -> int | tuple[int, ...]:
        if (
            len(args) > 1
            and not kwargs
            and function in _CHOICES
            and all(isinstance(a, int | float) for a in args)
            or function not in _CHOICES
        ):
            mine = next((a.log for a in args if type(a) in TRACKED), None)
            if mine is not None:
                return mine.result(function(*map(_plain, args), **kwargs), function, args)
        return function(*args, **kwargs)

    return call


_LOCK, _blocks = threading.Lock(), 0
_CHOICES = (max, min)
_FUNCTIONS = [
    (builtins, "max", max),
    (builtins, "min", min),
    *(
        (math, name, getattr(math, name))
        for name in (
            "acos",
            "asin",
            "atan",
            "atan2",
            "ceil",
            "copysign",
            "cos",
            "cosh",
            "degrees",
            "erf",
            "erfc",
            "exp",
            "expm1",
            "fabs",
            "floor",
            "fmod",
            "hypot",
            "isfinite",
            "isinf",
            "isnan",
            "log",
            "log10",
            "log1p",
            "log2",
            "pow",
            "radians",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
            "trunc",
        )
        if hasattr(math, name)
    ),
]
