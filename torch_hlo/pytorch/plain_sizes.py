"""PyTorch's shape functions without sympy.

Written in Python, most of them ask torch.fx.experimental.symbolic_shapes something about sizes ("is
this known to be true?") or whether a number is a sympy.Basic. That imports sympy, 0.3 s and 30 MB,
for answers that are plain where sizes are numbers. Inside `answers()`, stand-ins for those modules
give them. Whatever else the stand-ins are asked for, or by other threads, or about what is no plain
number, comes from the real modules."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator

import torch

from . import shortcuts


def _is_plain(value: object) -> bool:
    """True for what has no symbols in it: numbers, tensors of plain sizes, sequences of those."""
    if isinstance(value, (bool, int, float)):
        return True
    if isinstance(value, torch.Tensor):
        return not value._has_symbolic_sizes_strides
    return isinstance(value, (tuple, list)) and all(map(_is_plain, value))


def _answer(module: str, name: str, plain: Callable) -> Callable:
    """The function `name` of `module`, which for plain arguments is `plain`."""

    def function(*args: object, **options: object) -> object:
        if not options and all(map(_is_plain, args)):
            return plain(*args)
        return getattr(_real(module), name)(*args, **options)

    return function


class _Class:
    """In place of a class of `module`. What was not imported has no instances."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def _real(self) -> type:
        return getattr(_real(self.module), self.name)

    def __instancecheck__(self, value: object) -> bool:
        return not isinstance(
            sys.modules.get(self.module, self), (_Class, _StandIn)
        ) and isinstance(value, self._real())

    def __mro_entries__(self, bases: tuple) -> tuple[type]:
        return (self._real(),)

    def __call__(self, *args: object, **options: object) -> object:
        return self._real()(*args, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real(), name)


def _itself(value: object, *rest: object) -> object:
    return value


def _equal(x: object, y: object) -> bool:
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(map(_equal, x, y))
    return x == y


SHAPES, SYMPY, FUNCTIONS = (
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "torch.utils._sympy.functions",
)
PLAIN: dict[str, Callable] = {  # what functions of SHAPES return for plain arguments
    **dict.fromkeys(
        "guard_or_false guard_or_true guard_size_oblivious statically_known_true expect_true"
        " guard_bool".split(),
        _itself,
    ),
    **dict.fromkeys("guard_int guarding_hint_or_throw optimization_hint".split(), _itself),
    **dict.fromkeys("is_nested_int is_symbolic has_free_symbols".split(), lambda value: False),
    **dict.fromkeys("_advise_is_size _advise_is_bounded".split(), lambda value, bound=0: None),
    **dict.fromkeys("free_symbols free_unbacked_symbols".split(), lambda value: set()),
    "statically_known_false": lambda condition: not condition,
    "has_guarding_hint": lambda value: True,
    "sym_eq": _equal,
    "sym_and": lambda *conditions: all(conditions),
    "sym_or": lambda *conditions: any(conditions),
}
ANSWERS: dict[str, dict[str, object]] = {
    SHAPES: {name: _answer(SHAPES, name, plain) for name, plain in PLAIN.items()},
    SYMPY: {"Basic": _Class(SYMPY, "Basic")},
    FUNCTIONS: {"Max": _answer(FUNCTIONS, "Max", max)},
}


class _StandIn(types.ModuleType):
    """A module of which a thread that is inside `answers()` sees `ANSWERS`, and everybody else the
    real one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.__spec__  # so that an import statement, which looks for it, calls __getattr__

    def __getattr__(self, name: str) -> object:
        if name == "__spec__" and sys._getframe(1).f_code.co_name in (
            "<module>",
            "_find_and_load",
        ):
            # imported by a module, which keeps it, or by a call of importlib, not by a function for
            # its own use
            _real(self.__name__)
        if name.startswith("__"):
            raise AttributeError(name)
        if (
            _asking == threading.get_ident()
            and sys.modules.get(self.__name__) is self
            and name in ANSWERS[self.__name__]
        ):
            return ANSWERS[self.__name__][name]
        return getattr(_real(self.__name__), name)


_STAND_INS = {name: _StandIn(name) for name in ANSWERS}
_WANTED = shortcuts.on("plain_sizes")
_asking: int | None = None  # the thread that is inside `answers()`


def _remove() -> None:
    for name, module in _STAND_INS.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _real(name: str) -> types.ModuleType:
    _remove()
    return importlib.import_module(name)


@contextlib.contextmanager
def answers() -> Iterator[None]:
    """In the block, PyTorch's shape functions do not import sympy for plain sizes. One thread at a
    time."""
    global _asking
    if SYMPY in sys.modules or not _WANTED:  # nothing to save; or a block in a block
        yield
        return
    missing = [name for name in _STAND_INS if name not in sys.modules]
    sys.modules.update((name, _STAND_INS[name]) for name in missing)
    _asking = threading.get_ident()
    try:
        yield
    finally:
        _asking = None
        _remove()
