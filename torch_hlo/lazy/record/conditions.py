"""Conditions on values that PyTorch looks at between ops: the arguments of distributions,
`torch._assert_async`.

Looking at a value that is still to be computed would cut the graph and wait. So a condition on data
that came from the CPU is judged at the call, as indices are (checks.py); any other is computed with
its step and looked at when that is known to have run, as an assertion in a CUDA kernel is: the
error surfaces at a later mark_step, sync or read. Numbers that Python asks for (`if mask.all():`)
and that depend on nothing else come from the CPU as well. While a graph is recorded to be started
again (dynamo/recording.py), the engine is told of data that is looked at, and conditions are judged
after each start.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_hlo.lowering.core import Node, Out, is_random, looks
from torch_hlo.pytorch.registration import PLACE

from . import session
from .handlers import call, handles
from .meta import aten
from .storage import Array, Number, Storage
from .tensor import HloTensor, make, peek, to_cpu
from .views import HOST_OPS, on_host

Check = Callable[[Tensor], None]  # raises if the value, on the CPU, is wrong
NODES = 24  # more than that is computed on the device
ELEMENTS = 1 << 14
# What the CPU has computed, or has been given, stays until nobody needs it: a loop that reads a
# number per turn computes each once. An array that is overwritten has no bounds: see `from_cpu`.
_values: WeakKeyDictionary[Node | Array, Any] = WeakKeyDictionary()


def expect(value: HloTensor, check: Check) -> None:
    """`check(value)`, now or when the value is there. `value` must not be written to later."""
    found = known(value, constant=session.engine().captures)
    if found is not None:
        check(found)
    else:
        session.engine().later(value, check)


def surface(together: bool = False) -> None:
    """Judge what has been computed; what is spread over processes only at moments that are the same
    for all (`together`). Raises what a check raises. Its own reads, and those of the functions that
    it calls, come here again and do nothing: what is done meanwhile has to wait its turn."""
    state = session.current()
    thread = threading.get_ident()
    if thread in state.judges:
        return
    state.judges.add(thread)
    try:
        _judge(state.expected, together)
    finally:
        state.judges.discard(thread)


def _judge(expected: deque[tuple[HloTensor, Check]], together: bool) -> None:
    ready = []
    left = []
    waiting = False
    for condition in expected:
        ordered = getattr(condition[1], "ordered", False)
        now = _computed(condition[0], together) and not (ordered and waiting)
        waiting = waiting or ordered and not now
        (ready if now else left).append(condition)
    if not ready:
        return
    expected.clear()
    expected.extend(left)
    values = to_cpu([value for value, _ in ready])
    errors: list[Exception] = []
    kept = []
    for value, condition in zip(values, ready):
        if errors and not getattr(condition[1], "ordered", False):
            kept.append(condition)
            continue
        try:
            condition[1](value)
        except Exception as error:
            errors.append(error)
    expected.extendleft(reversed(kept))
    looks.raise_together(errors)


def _computed(value: HloTensor, together: bool) -> bool:
    array = value._storage.value
    if type(array) is not Array:
        return False
    if session.current().journal is not None and is_spread(array):
        return together
    job = getattr(array.data, "job", None)
    return job is None or job.is_done()


def known(value: HloTensor, constant: bool = False) -> Tensor | None:
    """The value computed on the CPU, if it takes few and small ops from arrays that came from there
    (`constant`: from none); else None."""
    out = value._storage.value
    nodes = []
    if type(out) is Array:
        arrays = [out]
        if constant or not from_cpu(out):
            return None
    else:
        found = None if _is_computed(out) else _small(out, constant)
        if found is None:
            return None
        nodes, arrays = found
    if arrays:
        session.engine().looks("it looks at data of the CPU")
    return _on_cpu(nodes, out, value._view)


def _on_cpu(nodes: list[Node], out: Out | Array, view: Any) -> Tensor | None:
    """The value of `out` through a view, computed by the CPU; None where PyTorch has no such kernel
    for it."""
    with torch.no_grad():
        for node in nodes:
            if node in _values:
                continue
            kwargs = {
                k: torch.device("cpu") if k == "device" else _argument(v)
                for k, v in node.kwargs.items()
            }
            try:
                function = HOST_OPS.get(node.target, node.target)
                _values[node] = function(*map(_argument, node.args), **kwargs)
            except NotImplementedError:  # linear_backward
                return None
        return on_host(_argument(out), view)


def from_cpu(array: Array) -> bool:
    """Whether a storage's value is a small array that came from the CPU."""
    return (
        type(array) is Array
        and array.bounds is not None
        and array.shape.size <= ELEMENTS
        and not is_spread(array)  # looking at it would be a collective
        and (array in _values or _owner(array) is not None)
    )


def is_spread(array: Array) -> bool:
    """Whether the array lives on a mesh."""
    return getattr(array.data, "sharding", None) is not None


@functools.cache
def _runs_on_cpu(target) -> bool:
    return getattr(target, "namespace", "") == "aten" and not is_random(target)


def _is_computed(out: Out) -> bool:
    """Whether the first of what `out` comes from is an array that the device has computed: what
    most values that are read in a loop come from, found without looking at all operands."""
    x: Any = out
    for _ in range(NODES):
        if type(x) is not Out or x.node in _values or not x.node.args:
            break
        x = x.node.args[0]
    return type(x) is Array and x.bounds is None


def _small(out: Out, constant: bool) -> tuple[list[Node], list[Array]] | None:
    """The nodes that compute `out`, operands first, and the arrays they read; None if the CPU
    should not run them, or does not have what they need. What has been computed is left out, unless
    somebody has to know what it was made of."""
    whole = constant or session.engine().captures
    if not whole and out.node in _values:
        return [], []
    found: set[Node] = {out.node}
    left = [out.node]
    arrays: list[Array] = []
    while left:
        n = left.pop()
        if not _runs_on_cpu(n.target):
            return None
        for shape in n.outs:
            if shape is not None and shape.size > ELEMENTS:
                return None
        operands = [*n.args, *n.kwargs.values()]
        for x in operands:
            kind = type(x)
            if kind is list or kind is tuple:
                operands.extend(x)  # looked at in its turn
            elif kind is Array:
                if constant or not from_cpu(x):
                    return None
                arrays.append(x)
            elif kind is Out and x.node not in found and (whole or x.node not in _values):
                if len(found) == NODES:
                    return None
                found.add(x.node)
                left.append(x.node)
    return sorted(found, key=lambda n: n.serial), arrays


def _argument(x: Any) -> Any:
    kind = type(x)
    if kind is Number:
        return x.value
    if kind is Array:
        if x not in _values:
            owner = _owner(x)
            _values[x] = peek(make(owner.meta, owner))
        return _values[x]
    if kind is Out:
        result = _values[x.node]
        return result if isinstance(result, Tensor) else result[x.index]
    return kind(map(_argument, x)) if kind in (list, tuple) else x


def _owner(array: Array) -> Storage | None:
    return next(
        (s for s in (o() for o in array.owners) if s is not None and s.value is array),
        None,
    )


@handles(aten._assert_async.msg, aten._assert_async.default)
def _assert_async(args: tuple, kwargs: dict) -> None:
    expect(
        call(aten.ne.Scalar, args[0], 0),
        lambda value: aten._assert_async.msg(
            value,
            args[1] if len(args) > 1 else "Expected Tensor with a value that is not zero",
        ),
    )


def hand(function: Callable[..., None], values: Sequence[Tensor]) -> None:
    """Call a function with the values that tensors have here, on the CPU, when they are there."""
    look = looks.At(looks.Look(function, len(values)), session.line())
    on_device = any(isinstance(x, HloTensor) for x in values)
    for value in values or [torch.zeros((), device=PLACE.device)]:
        value = value.detach()
        if on_device or not values:
            value = value.to(PLACE.device)
            session.engine().later(call(aten.clone.default, value), look)
        else:
            look(value)


@handles(looks.look)
def _look(args: tuple, kwargs: dict) -> None:
    value, number = args
    look = looks.At(looks.numbered(number), session.line())
    session.engine().later(call(aten.clone.default, value.detach()), look)


@handles(aten._is_all_true.default)
def _is_all_true(args: tuple, kwargs: dict):
    """What torch.distributions asks before it raises ValueError: yes, and the error comes from
    here. Others get the value."""
    result = call(aten.all.default, args[0])
    asking = _asking()
    if asking is None:
        return result

    def check(value: Tensor) -> None:
        if not value:
            raise ValueError(asking)

    expect(result, check)
    return torch.ones((), dtype=torch.bool, device="cpu")


def _asking() -> str | None:
    """What torch.distributions validates; None when somebody else asks."""
    frame = sys._getframe(1)
    while (
        frame is not None and frame.f_globals.get("__name__") != "torch.distributions.distribution"
    ):
        if not frame.f_globals.get("__name__", "").startswith(
            ("torch_hlo.", "torch._ops", "torch.utils")
        ):
            return None
        frame = frame.f_back
    if frame is None:
        return None
    names = frame.f_locals
    kind = type(names["self"]).__name__
    if "param" in names:
        return (
            f"Expected parameter {names['param']} of distribution {kind} to satisfy the constraint"
            f" {names['constraint']!r}, but found invalid values"
        )
    return (
        f"Expected value argument to be within the support ({names.get('support')!r}) of the"
        f" distribution {kind}, but found invalid values"
    )
