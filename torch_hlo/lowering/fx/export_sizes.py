"""What torch.export assumes about dynamic sizes, as conditions (icmp predicate, left, right) on
symbolic sizes."""

import ast
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dim, Dims, Size

from ..core import LoweringError
from .fx_size import size_of, size_of_expression

Condition = tuple[str, Size, Size]
_PREDICATES = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "slt",
    ast.LtE: "sle",
    ast.Gt: "sgt",
    ast.GtE: "sge",
}
_HOLDS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "slt": operator.lt,
    "sle": operator.le,
    "sgt": operator.gt,
    "sge": operator.ge,
}


@frozen
class Guards:
    """`unchecked`: source text of those that are not comparisons of sizes."""

    conditions: tuple[Condition, ...]
    unchecked: tuple[str, ...]


def ranges(ep: ExportedProgram) -> Iterator[Condition]:
    """Limits of dynamic dimensions. A lower limit up to 2 is PyTorch's way to say that the size
    differs, and no limit."""
    for expression, limits in ep.range_constraints.items():
        try:
            size = size_of_expression(expression)
        except LoweringError:
            continue
        if limits.lower.is_Integer and int(limits.lower) > 2:
            yield "sge", size, int(limits.lower)
        if limits.upper.is_Integer:
            yield "sle", size, int(limits.upper)


class _Sizes:
    """Stands for a tensor in the text of a guard."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape = tuple(map(size_of, value.shape))

    def size(self, dim: int | None = None) -> Size | Dims:
        return self.shape if dim is None else self.shape[dim]


def guards(ep: ExportedProgram) -> Guards:
    """Conditions that tracing met: Python text such as `L['x'].size()[0] % 2 == 0`."""
    texts = getattr(ep, "_guards_code", None) or ()
    scope = {"L": _arguments(ep), "__builtins__": {}}
    conditions: list[Condition] = []
    unchecked: list[str] = []
    for text in texts:
        try:
            conditions += _comparisons(ast.parse(text, mode="eval").body, scope)
        except Exception:  # whatever it says, it is reported as not understood
            unchecked.append(text)
    return Guards(tuple(conditions), tuple(unchecked))


def _arguments(ep: ExportedProgram) -> dict[str, Any]:
    """Argument name -> its value, tensors as _Sizes."""
    fakes = {n.name: n.meta.get("val") for n in ep.graph.find_nodes(op="placeholder")}
    flat = [
        getattr(s.arg, "value", None) if fakes.get(s.arg.name) is None else fakes[s.arg.name]
        for s in ep.graph_signature.input_specs
        if s.kind == InputKind.USER_INPUT
    ]
    flat = [_Sizes(v) if isinstance(v, torch.Tensor) else v for v in flat]
    args, kwargs = pytree.tree_unflatten(flat, ep.call_spec.in_spec)
    names = (
        ep.module_call_graph[0].signature.forward_arg_names or []
        if ep.module_call_graph and ep.module_call_graph[0].signature
        else []
    )
    named = [n for n in names if n not in kwargs]
    return {
        **dict(zip(named, args)),
        "args": args[len(named) :] if len(args) > len(named) else args,
        "kwargs": kwargs,
        **kwargs,
    }


def _comparisons(tree: ast.expr, scope: dict[str, Any]) -> Iterator[Condition]:
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        for part in tree.values:
            yield from _comparisons(part, scope)
        return
    if not isinstance(tree, ast.Compare):
        raise ValueError("not a comparison")
    sides = [tree.left, *tree.comparators]
    # the expressions are written by PyTorch
    values = [eval(compile(ast.Expression(s), "<guard>", "eval"), scope) for s in sides]
    for op, left, right in zip(tree.ops, values[:-1], values[1:]):
        predicate = _PREDICATES[type(op)]
        if isinstance(left, Dim) or isinstance(right, Dim):
            if not isinstance(left, (int, Dim)) or not isinstance(right, (int, Dim)):
                raise ValueError("not a comparison of sizes")
            if left is not right or predicate not in ("eq", "sle", "sge"):
                yield predicate, left, right
        elif not _HOLDS[predicate](left, right):
            raise ValueError("does not hold")
