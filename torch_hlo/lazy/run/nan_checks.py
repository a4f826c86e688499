"""Which operation of a step made the first NaN.

    with torch_hlo.debug.nan_checks():
        train()     # FloatingPointError: log makes 2 NaN of 8 numbers at train.py:31 ...

Steps run as they always do, but overwrite nothing. When a step has a NaN among its results, a
second program says of each of its operations which results have one: the first operation that makes
one of operands without is what is looked for. Infinities are taken for results like others, but
named where a NaN follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_hlo.hlo.ir import Shape
from torch_hlo.lazy.record import Array, Binding, HloTensor, fresh, session
from torch_hlo.lazy.record import meta as metas
from torch_hlo.lowering.core import HLO_TO_TORCH, TORCH_TO_HLO, Node, Out

from .fingerprint import collect

Value = Out | Array


class Step:
    """A step that is about to run: its operations, in order, and its results."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self.results = [b[3] for b in bindings if type(b[3]) is Out]
        self.nodes = collect(self.results).nodes

    def check(self) -> None:
        """Raise FloatingPointError if a result has a NaN. The step has run."""
        floats = [t for t in map(_tensor, self.results) if t is not None]
        if floats and _any(floats, torch.isnan).any():
            raise FloatingPointError(self._reason())

    def _reason(self) -> str:
        if session.current().journal is not None:
            return "a result is NaN; run it in one process to see which operation made it"
        of = [(node, i) for node in self.nodes for i in range(len(node.outs))]
        made = {(id(n), i): t for n, i in of if (t := _tensor(Out(n, i))) is not None}
        nan = dict(zip(made, _any([*made.values()], torch.isnan)))
        for node in self.nodes:
            bad = [i for i in range(len(node.outs)) if nan.get((id(node), i))]
            if bad and not any(_has(x, nan, torch.isnan) for x in operands(node)):
                return self._describe(node, made[id(node), bad[0]], made)
        leaf = next(x for n in self.nodes for x in operands(n) if _has(x, nan, torch.isnan))
        return f"{describe(leaf)}, which the step reads, was NaN before it"

    def _describe(self, node: Node, result: HloTensor, made: dict) -> str:
        count = int(result.isnan().sum())
        lines = [
            f"{name(node)} makes {count} NaN of {result.numel()} numbers{_at(node)}"
            f" (operation {self.nodes.index(node) + 1} of {len(self.nodes)} in this step)"
        ]
        lines += [f"  given {_statistics(x)}" for x in operands(node)]
        infinite = dict(zip(made, _any([*made.values()], torch.isinf)))
        if any(_has(x, infinite, torch.isinf) for x in operands(node)):
            lines += self._infinity(node, infinite)
        return "\n".join(lines)

    def _infinity(self, node: Node, infinite: dict) -> Iterator[str]:
        """The first operation on the way to `node` that makes an infinity of finite numbers."""
        needed = {node}
        for last in reversed(self.nodes):
            if last in needed:
                needed.update(x.node for x in operands(last) if type(x) is Out)
        for before in filter(needed.__contains__, self.nodes):
            made = any(infinite.get((id(before), i)) for i in range(len(before.outs)))
            if made and not any(_has(x, infinite, torch.isinf) for x in operands(before)):
                yield f"  after {name(before)} made an infinity{_at(before)}"
                yield from (f"    given {_statistics(x)}" for x in operands(before))
                return


def _tensor(value: Value) -> HloTensor | None:
    """A tensor of a value; None if it cannot be NaN, or holds no numbers."""
    array, form = value.array if type(value) is Out else value, shape(value)
    if form is None or not form.nbytes:
        return None
    dtype = HLO_TO_TORCH[form.dtype]
    if not can_be_nan(dtype):
        return None
    return fresh(metas.contiguous(form.dims, dtype), value if array is None else array)


def can_be_nan(dtype: torch.dtype) -> bool:
    """Whether arithmetic makes NaN of this dtype: of floats of 8 bits it makes none."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _any(tensors: Sequence[HloTensor], judge: Any) -> torch.Tensor:
    """For each tensor, whether it has such a number."""
    return torch.stack([judge(t).any() for t in tensors]).cpu()


def operands(node: Node) -> list[Value]:
    """What an operation reads."""
    found: list[Value] = []
    stack = [*node.args, *node.kwargs.values()]
    while stack:
        x = stack.pop(0)
        if isinstance(x, (Out, Array)):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            stack += x
    return found


def _has(value: Value, known: dict, judge: Any) -> bool:
    if type(value) is Out and (id(value.node), value.index) in known:
        return bool(known[id(value.node), value.index])
    tensor = _tensor(value)
    return tensor is not None and bool(judge(tensor).any())


def name(node: Node) -> str:
    """What it is called in messages."""
    return str(node.target).removeprefix("aten.").rsplit(".", 1)[0]


def _at(node: Node) -> str:
    return f" at {node.source}" if node.source else ""


def shape(value: Value) -> Shape | None:
    """None for an undefined result."""
    array = value.array if type(value) is Out else value
    return array.shape if array is not None else value.node.outs[value.index]


def describe(value: Value) -> str:
    """`f32[2,3]`."""
    return str(shape(value))


def _statistics(value: Value) -> str:
    tensor = _tensor(value)
    return describe(value) if tensor is None else statistics(tensor)


def statistics(tensor: torch.Tensor) -> str:
    """`f32[2,3]: -1 to 2, mean 0.5, 1 zeros`: the finite numbers, and what else there is."""
    text = f"{TORCH_TO_HLO[tensor.dtype]}{[*tensor.shape]}".replace(" ", "")
    if not can_be_nan(tensor.dtype) or tensor.is_complex() or not tensor.numel():
        return text
    finite = tensor.detach()[tensor.isfinite()].double().cpu()
    parts = []
    if len(finite):
        low, high = finite.min().item(), finite.max().item()
        parts = [f"{low:.4g} to {high:.4g}, mean {finite.mean().item():.4g}"]
    counts = {
        "zeros": (tensor == 0).sum().item(),
        "infinities": tensor.isinf().sum().item(),
        "NaN": tensor.isnan().sum().item(),
    }
    parts += [f"{n} {what}" for what, n in counts.items() if n]
    return f"{text}: {', '.join(parts)}"
