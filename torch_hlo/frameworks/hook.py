"""What is done to modules of other packages when they are imported: constants of their functions
are exchanged, or methods of their classes wrapped.

    install((Row("accelerate.state", "PartialState.default_device", exchange("cpu", "hlo")),))
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from torch_hlo import config

Change = Callable[[Any, str], bool]  # of an attribute of (module or class); False: it is not there


class Row(NamedTuple):
    """A change of `name` in `module`, such as `Trainer.train`."""

    module: str
    name: str
    change: Change


def exchange(old: object, new: object) -> Change:
    """The constant `old` of a function is `new`."""
    return _constants(lambda x: new if type(x) is type(old) and x == old else x)


def listed(known: str, name: str) -> Change:
    """Where a function has a list of constants with `known` among them, `name` is one too."""
    return _constants(
        lambda x: type(x)((*x, name)) if isinstance(x, (tuple, frozenset)) and known in x else x
    )


def _constants(new: Callable[[Any], Any]) -> Change:
    """Constants of a function are exchanged in its code: whoever imported it has the new one."""

    def change(owner: Any, name: str) -> bool:
        found = vars(owner).get(name)
        getter = getattr(found, "fget", None) or getattr(found, "func", None)
        function = inspect.unwrap(getter or getattr(found, "__func__", found))
        if not isinstance(function, types.FunctionType):
            return False
        old = function.__code__.co_consts
        constants = tuple(map(new, old))
        function.__code__ = function.__code__.replace(co_consts=constants)
        if hasattr(found, "cache_clear"):
            found.cache_clear()
        return constants != old

    return change


def replaced(old: str, new: str, unless: str = "") -> Change:
    """A variable that is `old` is `new`, but not where the environment has set `unless`."""

    def change(owner: Any, name: str) -> bool:
        if getattr(owner, name, None) == old and config.variable(unless, None) is None:
            setattr(owner, name, new)
        return hasattr(owner, name)

    return change


def wrapped(path: str) -> Change:
    """A function is called through ours at `path` ("module:function"), which gets it as its first
    argument."""

    def change(owner: Any, name: str) -> bool:
        found = vars(owner).get(name)
        if found is None:
            return False
        around = _function(path)
        # a property that is computed once has its function in `func`
        original = getattr(found, "func", getattr(found, "__func__", found))

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        if isinstance(found, staticmethod):
            setattr(owner, name, staticmethod(wrapper))
        elif original is not found:
            found.func = wrapper
        else:
            setattr(owner, name, wrapper)
        return True

    return change


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def given_to(path: str) -> Change:
    """The function at `path` ("module:function") is called with the module that has this name."""

    def change(owner: Any, name: str) -> bool:
        if not hasattr(owner, name):
            return False
        _function(path)(owner)
        return True

    return change


def _mark(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch_hlo.lazy.record import session

    result = original(*args, **kwargs)
    session.engine().mark_step(False)
    return result


# What was recorded becomes a program when the function returns.
marked = wrapped(f"{__name__}:_mark")


class _Finder:
    """Entry of sys.meta_path: lets the others find a module, and changes it after it has run."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = defaultdict(list)
        for row in rows:
            self.rows[row.module].append(row)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self.rows:
            return None
        others = [f for f in sys.meta_path if f is not self]
        found = (f.find_spec(name, path, target) for f in others if hasattr(f, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(self._run, run)
        return spec

    def _run(self, run: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
        run(module)
        self.apply(module)

    def apply(self, module: types.ModuleType) -> None:
        for row in self.rows.pop(module.__name__, ()):
            owner, _, name = row.name.rpartition(".")
            holder = getattr(module, owner, None) if owner else module
            if holder is None or not row.change(holder, name):
                warnings.warn(
                    f"torch_hlo does not know this version of {row.module.partition('.')[0]}:"
                    f" {row.module}.{row.name} is another. See that it says your device, and not"
                    " the CPU",
                    stacklevel=2,
                )


def install(rows: Sequence[Row]) -> None:
    """Change what `rows` say: now, where a module is there already, else when it comes."""
    finder = _Finder(rows)
    for name in [n for n in finder.rows if n in sys.modules]:
        finder.apply(sys.modules[name])
    sys.meta_path.insert(0, finder)
