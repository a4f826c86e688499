"""Imports of torch._dynamo that only others need: AOTAutograd, its partitioner and parts of Inductor come for a test helper and the other backends.

    defer()         # before torch._dynamo is imported; nothing happens afterwards

While a module of `DEFERRED` is imported, what it imports from another one is a stand-in, and the other one is not imported: 0.25 s and 18 MB of a
process that compiles an inference graph. Whoever uses the stand-in, or imports that module himself, gets the real one.
"""
from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint


def _called(module: str, name: str) -> Callable:
    """In place of a function of `module`, which is imported when it is called."""

    def function(*args, **options):
        return getattr(importlib.import_module(module), name)(*args, **options)

    return function


TESTING = "torch._dynamo.testing"
# importing module: (imported module, what it takes of that)
DEFERRED: dict[str, tuple[str, dict[str, object]]] = {
    "torch._dynamo.debug_utils": (TESTING, {"rand_strided": _called(TESTING, "rand_strided")}),  # imports all of AOTAutograd
}
REGISTRY = "torch._dynamo.backends.registry"  # looks for names that it does not know in all backends, whose modules it imports


class _StandIn(types.ModuleType):
    """A module that has `names`; asked for anything else, it imports the real one and answers from that."""

    def __init__(self, module: str, names: dict[str, object]) -> None:
        super().__init__(module)
        vars(self).update(names)

    def remove(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str):
        if name.startswith("__"):  # import statements look for them
            raise AttributeError(name)
        self.remove()
        return getattr(importlib.import_module(self.__name__), name)


class _Finder:
    """Entry of sys.meta_path: modules of `DEFERRED` are executed beside a stand-in, and the registry of backends knows ours."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if name not in DEFERRED and name != REGISTRY:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: _execute(module, execute)
        return spec


def _execute(module: types.ModuleType, execute: Callable[[types.ModuleType], None]) -> None:
    other, names = DEFERRED.get(module.__name__, ("", {}))
    deferred = bool(other) and other not in sys.modules
    if deferred:
        stand_in = sys.modules[other] = _StandIn(other, names)
    try:
        execute(module)
    finally:
        if deferred:
            stand_in.remove()
    if module.__name__ == REGISTRY:
        module._BACKENDS.setdefault("hlo", EntryPoint("hlo", "torch_hlo.dynamo:hlo", "torch_dynamo_backends"))


def defer() -> None:
    """Defer the imports of `DEFERRED` in this process."""
    if "torch._dynamo" not in sys.modules and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
