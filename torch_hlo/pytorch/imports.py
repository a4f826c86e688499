"""Imports that PyTorch's functions do for one question, and a shorter way from C++ to
`__torch_dispatch__`."""

from __future__ import annotations

import contextlib
import sys
import types

import torch
import torch._library.simple_registry

from . import shortcuts, version
from .tensors import make_wrapper


def spare_dynamo() -> None:
    """Let PyTorch's Python shape functions run without importing torch._dynamo, which takes longer
    than most first steps.

    They are wrapped so that Dynamo does not trace into them; the wrapper imports it on the first
    call to make the exempt function, unless there is one already. Nothing is changed once Dynamo is
    there."""
    if "torch._dynamo" in sys.modules or not shortcuts.on("dynamo_unneeded"):
        return
    from torch._compile import _disable_dynamo
    from torch._decomp import global_decomposition_table

    wrapper = _disable_dynamo(lambda: None).__code__
    stack = [f for table in global_decomposition_table.values() for f in table.values()]
    for name in ("torch._refs", "torch._refs.nn.functional", "torch._refs.special"):
        stack += vars(sys.modules.get(name, types)).values()
    seen: set[int] = set()
    while stack:
        f = stack.pop()
        if not isinstance(f, types.FunctionType) or id(f) in seen or not f.__closure__:
            continue
        seen.add(id(f))
        if f.__code__ is wrapper:
            inner = f.__closure__[f.__code__.co_freevars.index("fn")].cell_contents
            if not hasattr(inner, "__dynamo_disable"):
                setattr(inner, "__dynamo_disable", inner)
        for cell in f.__closure__:  # decorators within decorators
            with contextlib.suppress(ValueError):  # an empty cell
                stack.append(cell.cell_contents)


class _StandIn(type):
    """Type of what C++ takes for the class DTensor; it forwards to the real one once that
    exists."""

    @property
    def __torch_dispatch__(cls):
        return dtensor().__torch_dispatch__


def dtensor() -> type | None:
    """The class DTensor, once somebody imports it."""
    return getattr(sys.modules.get("torch.distributed.tensor._api"), "DTensor", None)


class _Watch:
    """Entry of sys.meta_path: from the import of DTensor on, its stand-in has instances."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name == "torch.distributed.tensor._api":
            sys.meta_path.remove(cls)
            _StandIn.__instancecheck__ = _is_dtensor


def _is_dtensor(stand_in: type, x: object) -> bool:
    real = dtensor()
    if real is None:  # it is being imported
        return False
    # asked for every op: without Python
    _StandIn.__instancecheck__ = type.__instancecheck__.__get__(real)
    return isinstance(x, real)


def shorten_dispatch(tensor_class: type) -> None:
    """Make every op on a tensor subclass cheaper, and the first one by an import of half a second.

    For each op C++ asks a Python function whether a rule was registered for this op and class, and
    whether the tensor is a DTensor. The function and the class are looked up at the first op of the
    process; the latter imports torch.distributed.tensor and, with it, sympy."""
    if shortcuts.on("dispatch_rule"):
        registry = torch._library.simple_registry
        find = registry.find_torch_dispatch_rule
        registry.find_torch_dispatch_rule = lambda op, cls: (
            None if cls is tensor_class else find(op, cls)
        )
    if not shortcuts.on("dtensor"):
        return
    module = "torch.distributed.tensor"
    # before, C++ compares types and asks no __instancecheck__
    stand_in = version.VERSION >= (2, 13) and module not in sys.modules
    if stand_in:
        sys.modules[module] = types.SimpleNamespace(DTensor=_StandIn("DTensor", (), {}))
        sys.meta_path.insert(0, _Watch)
    try:

        class Probe(torch.Tensor):
            __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: args[0])

        # the first op: C++ looks both up
        torch.ops.aten.neg.default(make_wrapper(Probe, (), dtype=torch.float32, device="cpu"))
    finally:
        if stand_in:
            del sys.modules[module]
