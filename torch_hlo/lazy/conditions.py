"""Conditions on values that PyTorch looks at between ops: the arguments of distributions, `torch._assert_async`.

Looking at a value that is still to be computed would cut the graph and wait. So a condition on data that came from the CPU is judged at the call, as indices
are (checks.py); any other is computed with its step and looked at when that is known to have run, as an assertion in a CUDA kernel is: the error
surfaces at a later mark_step, sync or read. A captured step (capture.py) judges what came from the CPU while it is traced, and nothing when it is replayed.
"""
from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

import torch

from torch_hlo.lazy import engine
from torch_hlo.lazy.dispatch import call, handles
from torch_hlo.lazy.meta import aten
from torch_hlo.lazy.storage import Array, Number
from torch_hlo.lazy.tensor import HloTensor, make, peek, to_cpu
from torch_hlo.lowering.graph import Node, Out

Check = Callable[[torch.Tensor], None]  # raises if the value, on the CPU, is wrong
EXPECTED: deque[tuple[HloTensor, Check]] = deque()
NODES = 16  # a longer way from data to condition is computed on the device


def expect(value: HloTensor, check: Check) -> None:
    """`check(value)`, now or when the value is there. `value` must not be written to later."""
    known = _known(value)
    if known is not None:
        check(known)
    elif hasattr(engine.current(), "later"):
        engine.current().later(value, check)
    else:
        check(to_cpu([value])[0])


def surface() -> None:
    """Judge what has been computed. Raises what a check raises."""
    while EXPECTED:
        value, check = EXPECTED[0]
        array = value._storage.value
        job = getattr(array.data, "job", None) if type(array) is Array else None
        if type(array) is not Array or job is not None and not job.is_done():
            return
        EXPECTED.popleft()
        check(to_cpu([value])[0])


def _known(value: HloTensor) -> torch.Tensor | None:
    """The value computed on the CPU, if it takes few ops from arrays that came from there; else None."""
    found: dict[Node, object] = {}

    def look(x):
        kind = type(x)
        if kind is Number:
            return x.value
        if kind is Array:
            owner = next((s for s in (o() for o in x.owners) if s is not None and s.value is x), None)
            if x.bounds is None or owner is None:
                raise _Unknown
            return peek(make(owner.meta, owner))
        if kind is Out:
            if x.node not in found:
                if len(found) >= NODES or not isinstance(x.node.target, torch._ops.OpOverload) or x.node.kwargs.keys() & {"device", "seed"}:
                    raise _Unknown
                found[x.node] = None
                found[x.node] = x.node.target(*map(look, x.node.args), **{k: look(v) for k, v in x.node.kwargs.items()})
            result = found[x.node]
            return result if isinstance(result, torch.Tensor) else result[x.index]
        if kind in (list, tuple):
            return kind(map(look, x))
        return x

    if value._view is not None:
        return None
    try:
        with torch.no_grad():
            return look(value._storage.value)
    except _Unknown:
        return None


class _Unknown(Exception):
    """A value that the device computes."""


@handles(aten._assert_async.msg, aten._assert_async.default)
def _assert_async(args: tuple, kwargs: dict) -> None:
    expect(call(aten.ne.Scalar, args[0], 0), lambda value: aten._assert_async.msg(value, args[1] if len(args) > 1 else "Expected Tensor with a value that is not zero"))


@handles(aten._is_all_true.default)
def _is_all_true(args: tuple, kwargs: dict):
    """What torch.distributions asks before it raises ValueError: yes, and the error comes from here. Others get the value."""
    result = call(aten.all.default, args[0])
    asking = _asking()
    if asking is None:
        return result

    def check(value: torch.Tensor) -> None:
        if not value:
            raise ValueError(asking)

    expect(result, check)
    return torch.ones((), dtype=torch.bool, device="cpu")


def _asking() -> str | None:
    """What torch.distributions validates; None when somebody else asks."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributions.distribution":
        if not frame.f_globals.get("__name__", "").startswith(("torch_hlo.", "torch._ops", "torch.utils")):
            return None
        frame = frame.f_back
    if frame is None:
        return None
    names = frame.f_locals
    kind = type(names["self"]).__name__
    if "param" in names:
        return f"Expected parameter {names['param']} of distribution {kind} to satisfy the constraint {names['constraint']!r}, but found invalid values"
    return f"Expected value argument to be within the support ({names.get('support')!r}) of the distribution {kind}, but found invalid values"
