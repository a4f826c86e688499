"""Conditions on values that PyTorch looks at between ops: the arguments of distributions, `torch._assert_async`.

Looking at a value that is still to be computed would cut the graph and wait. So a condition on data that came from the CPU is judged at the call, as indices
are (checks.py); any other is computed with its step and looked at when that is known to have run, as an assertion in a CUDA kernel is: the error
surfaces at a later mark_step, sync or read. Numbers that Python asks for (`if mask.all():`) and that depend on nothing else come from the CPU as well. A captured step (capture.py) judges what came from the CPU while it is traced, and nothing when it is replayed.
"""
from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable

import torch

from torch_hlo.lazy import engine
from torch_hlo.lazy.dispatch import call, handles
from torch_hlo.lazy.meta import aten
from torch_hlo.lazy.storage import Array, Number, Storage
from torch_hlo.lazy.tensor import HloTensor, make, peek, to_cpu
from torch_hlo.lazy.views import HOST_OPS, on_host
from torch_hlo.lowering.graph import Node, Out
from torch_hlo.lowering.registry import is_random

Check = Callable[[torch.Tensor], None]  # raises if the value, on the CPU, is wrong
EXPECTED: deque[tuple[HloTensor, Check]] = deque()
NODES, ELEMENTS = 24, 1 << 14  # more than that is computed on the device


def expect(value: HloTensor, check: Check) -> None:
    """`check(value)`, now or when the value is there. `value` must not be written to later."""
    found = known(value)
    if found is not None:
        check(found)
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


def known(value: HloTensor, constant: bool = False) -> torch.Tensor | None:
    """The value computed on the CPU, if it takes few and small ops from arrays that came from there (`constant`: from none); else None."""
    nodes = _small(value._storage.value, constant) if type(value._storage.value) is Out else None
    if nodes is None:
        return None
    with torch.no_grad():
        for node in nodes:
            kwargs = {k: torch.device("cpu") if k == "device" else _argument(v, nodes) for k, v in node.kwargs.items()}
            try:
                nodes[node] = HOST_OPS.get(node.target, node.target)(*(_argument(a, nodes) for a in node.args), **kwargs)
            except NotImplementedError:  # PyTorch has no such kernel for the CPU: linear_backward
                return None
        return on_host(_argument(value._storage.value, nodes), value._view)


@functools.cache
def _runs_on_cpu(target) -> bool:
    return getattr(target, "namespace", "") == "aten" and not is_random(target)


def _small(out: Out, constant: bool) -> dict[Node, object] | None:
    """The nodes that compute `out`, operands first; None if the CPU should not run them, or does not have what they need."""
    found: set[Node] = {out.node}
    left = [out.node]
    while left:
        n = left.pop()
        if not _runs_on_cpu(n.target) or any(o is not None and o.size > ELEMENTS for o in n.outs):
            return None
        operands = [*n.args, *n.kwargs.values()]
        for x in operands:
            kind = type(x)
            if kind is list or kind is tuple:
                operands.extend(x)  # looked at in its turn
            elif kind is Array:
                if constant or x.bounds is None or x.shape.size > ELEMENTS or _owner(x) is None:
                    return None
            elif kind is Out and x.node not in found:
                if len(found) == NODES:
                    return None
                found.add(x.node)
                left.append(x.node)
    return dict.fromkeys(sorted(found, key=lambda n: n.serial))


def _argument(x, nodes: dict[Node, object]):
    kind = type(x)
    if kind is Number:
        return x.value
    if kind is Array:
        owner = _owner(x)
        return peek(make(owner.meta, owner))
    if kind is Out:
        result = nodes[x.node]
        return result if isinstance(result, torch.Tensor) else result[x.index]
    return kind(_argument(v, nodes) for v in x) if kind in (list, tuple) else x


def _owner(array: Array) -> Storage | None:
    return next((s for s in (o() for o in array.owners) if s is not None and s.value is array), None)


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
