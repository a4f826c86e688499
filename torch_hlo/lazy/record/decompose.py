"""Ops without a lowering of their own: PyTorch's decompositions, applied while recording; the CPU
as the last resort."""

from collections.abc import Callable
from functools import cache, partial

from torch_hlo.pytorch import operators, plain_sizes
from torch_hlo.pytorch.operators import OpOverload, base_name

from . import checks, fallback, handlers

# (CompositeExplicitAutogradNonFunctional kernels call the out= variant, which here means the
# functional one again.)
_COMPOSITE = (
    operators.Key.CompositeExplicitAutograd,
    operators.Key.CompositeImplicitAutograd,
)

# Decompositions that PyTorch has but that are not the op on the CPU: they sync, loop in Python over
# values, or differ.
_UNSUITABLE = frozenset(
    "nonzero nonzero_static unique_consecutive _unique2 unique_dim bincount histc"
    " masked_select".split()
)


@cache
def _tables() -> tuple[dict, dict]:
    return operators.core_decompositions(), operators.decompositions()


def decomposition(op: OpOverload) -> Callable | None:
    """A Python function (or composite kernel) that computes the op from other ops, or None."""
    if op.namespace not in ("aten", "prims"):
        return composite(op)
    if base_name(op) in _UNSUITABLE:
        return None
    if operators.has_kernel(op, operators.Key.CompositeImplicitAutograd):
        # What the dispatcher runs where autograd is on. The tables' functions for such ops are
        # torch._refs, some with other parameters in other places (nll_loss takes size_average where
        # the op has reduction).
        return composite(op)
    for table in _tables():
        found = table.get(op)
        if found is not None:
            return plain_sizes.answers()(found)  # written in Python, unlike the kernels below
    return composite(op)


def composite(op: OpOverload) -> Callable | None:
    """The composite kernel of the op, or the one that its library made for this device, if it has
    one."""
    own = () if op.namespace == "aten" else (operators.Key.PrivateUse1,)
    for key in (*_COMPOSITE, *own):
        if operators.has_kernel(op, key):
            return partial(operators.call_kernel, op, key)
    return None


def in_place(op: OpOverload, twin: OpOverload | None = None) -> handlers.Handler | None:
    """The handler of a mutating op whose functional twin is missing (None) or has no lowering.

    With a twin, None says that the generic way (twin, then write) serves.
    """
    if twin is not None and not op._schema.name.startswith("aten::_foreach_"):
        return None
    kernel = composite(op)
    if kernel is not None:
        return lambda args, kwargs: handlers.nested(kernel, args, kwargs)
    if twin is not None:
        return None
    return lambda args, kwargs: on_cpu(op, args, kwargs)


def on_cpu(op: OpOverload, args: tuple, kwargs: dict):
    """Run an op on the CPU, counted and announced as a fallback."""
    return fallback.run_fallback(op, tuple(checks.admit_all(args)), checks.admit_all(kwargs))
