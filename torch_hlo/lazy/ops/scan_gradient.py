"""The gradient of `scan`: a scan backwards, which computes the function again at each slice.

Kept from forward are the carries and the xs, and nothing of what the function computes in between.
Random numbers come from the key of the forward scan, so they are drawn again as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import control

Tensors = Sequence[Tensor]


def scan(fn: Callable, init: object, xs: object) -> tuple[Any, Any]:
    """`control.scan`, with gradients for `init` and `xs` where somebody wants them."""
    flat, form = pytree.tree_flatten((init, xs))
    if not (torch.is_grad_enabled() and any(_wants(t) for t in flat)):
        return control.scan(fn, init, xs)
    forms: list = []
    found = _Scan.apply(fn, form, forms, *flat)
    return pytree.tree_unflatten(list(found), forms[0])


def _wants(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable, form: Any, forms: list, *flat: Tensor):
        init, xs = pytree.tree_unflatten(flat, form)

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            new, y = fn(carry, x)
            return new, (y, carry)

        ctx.key = []
        last, (ys, carries) = control.scan(step, init, xs, key=ctx.key)
        results, result_form = pytree.tree_flatten((last, ys))
        forms.append(result_form)
        ctx.fn = fn
        ctx.form = form
        ctx.count = len(pytree.tree_leaves(init))
        ctx.save_for_backward(*pytree.tree_leaves((carries, xs)), *results)
        ctx.mark_non_differentiable(*[r for r in results if not r.is_floating_point()])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        count = ctx.count
        given = ctx.form.num_leaves
        slices = ctx.saved_tensors[:given]
        results = ctx.saved_tensors[given:]
        full = [torch.zeros_like(r) if g is None else g for g, r in zip(grads, results)]
        wanted = [t.is_floating_point() for t in slices]

        def step(carry: Tensors, x: Tensors) -> tuple[Tensors, Tensors]:
            inputs = x[:given]
            above = [*carry, *x[given:]]
            found = _gradients(ctx.fn, ctx.form, inputs, above)
            return found[:count], found[count:]

        inputs = [*slices, *full[count:]]
        first, rest = control.scan(
            step, full[:count], inputs, reverse=True, key=ctx.key, again=True
        )
        found = (*first, *rest)
        return None, None, None, *[g if w else None for g, w in zip(found, wanted)]


def _gradients(fn: Callable, form: Any, inputs: Tensors, above: Tensors) -> list[Tensor]:
    """Gradients of one step's inputs, zeros for those without, from those of its results."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        results = pytree.tree_leaves(fn(*pytree.tree_unflatten(leaves, form)))
        pairs = [(r, g) for r, g in zip(results, above, strict=True) if r.requires_grad]
        _no_strangers([r for r, _ in pairs], leaves)
        sources = [t for t in leaves if t.requires_grad]
        roots = [r for r, _ in pairs]
        weights = [g for _, g in pairs]
        found = torch.autograd.grad(roots, sources, weights, allow_unused=True) if pairs else ()
    by_id = {id(t): g for t, g in zip(sources, found) if g is not None}
    return [by_id.get(id(t), torch.zeros_like(t)) for t in leaves]


def _no_strangers(results: Tensors, leaves: Tensors) -> None:
    """Raises RuntimeError if the results depend on a tensor that wants a gradient and is none of
    `leaves`."""
    known = {id(t) for t in leaves}
    seen = set()
    stack = [r.grad_fn for r in results]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise RuntimeError(
                f"torch_hlo.scan: the function reads a tensor of shape {list(variable.shape)} that"
                " requires a gradient; hand it in through init or xs"
            )
        stack += [below for below, _ in node.next_functions]
