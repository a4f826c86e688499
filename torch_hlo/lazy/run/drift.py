"""How far the device is from exact numbers, compared with PyTorch on the CPU.

    with drift.watched(alone=True) as found:      # operation by operation
        model(x).sum().backward()
    print(found.first)

The operations of each step are computed again by PyTorch, from the arrays that the step read: in
their own types, and in double precision. An error may be a few times PyTorch's, or what rounding
the operands anew does to the exact result. Random numbers, and what PyTorch's CPU has no kernel
for, are taken from the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hlo import config
from torch_hlo.hlo.ir import Shape
from torch_hlo.lowering.core.graph import Node, Out
from torch_hlo.lowering.core.registry import HLO_TO_TORCH, is_random
from torch_hlo.pytorch.operators import HigherOrderOperator, decompositions

from ..aten import dispatch
from ..record import Array, Number, aten, fresh, meta as metas, session
from ..record.views import HOST_OPS
from . import nan_checks
from .fingerprint import collect
from .nan_checks import can_be_nan

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu
TIMES = 8  # PyTorch's error, and what rounding operands does


@dataclass(frozen=True)
class Compared:
    """A result. Errors are the largest differences from double precision, relative to the largest
    number of the result; `allowed`: what `ours` may be."""

    op: str
    line: str
    result: str
    operands: tuple[str, ...]
    ours: float
    torch: float
    allowed: float

    @property
    def drifts(self) -> bool:
        return not self.ours <= self.allowed


@dataclass
class Found:
    """`left`: operations whose results are the device's, because PyTorch has none to compare."""

    results: list[Compared] = field(default_factory=list)
    left: set[str] = field(default_factory=set)

    @property
    def first(self) -> Compared | None:
        """The first result that drifts."""
        return next((x for x in self.results if x.drifts), None)


@contextmanager
def watched(alone: bool) -> Iterator[Found]:
    """Compare what runs in the block: operations `alone`, or whole steps."""
    engine, state = session.engine().base(), session.current()
    found = Found()
    engine.mark_step(wait=True)
    before = state.sources, engine.judge
    state.sources, engine.judge = True, partial(Step, found=found, alone=alone)
    try:
        with config.override(NAN=1), torch.autograd.set_detect_anomaly(True, check_nan=False):
            dispatch.set_eager(alone)
            yield found
            engine.mark_step(wait=True)
    finally:
        state.sources, engine.judge = before
        dispatch.set_eager(config.get("EAGER"))


class Step(nan_checks.Step):
    """A step whose results are to be compared; whole numbers only where the step is an `alone`
    operation: elsewhere they may follow from rounding."""

    def __init__(self, values: Sequence[nan_checks.Value], found: Found, alone: bool) -> None:
        super().__init__(values)
        self.found, self.alone = found, alone

    def check(self) -> None:
        runs = [_Run(), _Run(wide=True), _Run(wide=True, noise=True)]
        for node in self.nodes:
            loop = isinstance(node.target, HigherOrderOperator)
            skip = loop or is_random(node.target) and node.target not in BY_OTHERS
            made = [] if skip else [run.call(node) for run in runs]
            if made and not made[0] and made[1]:
                made[0] = [_rounded(x, out) for x, out in zip(made[1], node.outs)]
            if not made or None in made:
                if not (loop and self.alone and self._inside(node)):
                    self.found.left.add(nan_checks.name(node))
                device = [_device(Out(node, i)) for i in range(len(node.outs))]
                made = [[run.form(x) for x in device] for run in runs]
            for run, values in zip(runs, made):
                run.made[node] = values
        for out in self.results:
            found = self._compared(out, runs)
            if found is not None:
                self.found.results.append(found if self.alone else self._origin(out, found, runs))

    def _inside(self, node: Node) -> bool:
        """Compare what a loop or a branch has computed, an operation at a time."""
        looked = False
        for _, results in nan_checks.turns(node):
            made = [*results, *(x for n in collect(results).nodes for x in nan_checks.operands(n))]
            outs = {(x.node, x.index): x for x in made if type(x) is Out and x.array is None}
            for out in sorted(outs.values(), key=lambda x: (x.node.serial, x.index)):
                Step([out], self.found, True).check()  # its operands are there
                looked = True
        return looked

    def _origin(self, out: Out, found: Compared, runs: Sequence[_Run]) -> Compared:
        """Of a result that drifts: the operation before which nothing does, where what leads to it
        is a program by itself."""
        for x in nan_checks.operands(out.node) if found.drifts else ():
            before = self._compared(x, runs) if type(x) is Out and x.array is None else None
            if before is not None and before.drifts:
                return self._origin(x, before, runs)
        return found

    def _compared(self, out: Out, runs: Sequence[_Run]) -> Compared | None:
        values = [run.made[out.node][out.index] for run in runs]
        mine = _device(out)
        if mine is None or not mine.numel() or values[0] is None:
            return None
        # whole numbers: places of the largest of equal numbers, and so on
        if not can_be_nan(mine.dtype) and not (self.alone and len(out.node.outs) == 1):
            return None
        node, (ours, plain, moved, least) = out.node, _errors(mine, *values)
        return Compared(
            nan_checks.name(node),
            node.source or next((n.source for n in self.nodes if n.source), ""),
            nan_checks.describe(out),
            tuple(map(nan_checks.describe, nan_checks.operands(node))),
            ours,
            plain,
            max(TIMES * max(plain, moved), least),
        )


class _Run:
    """PyTorch's values: as they are, or in double precision (`wide`), there also of operands that
    were rounded anew (`noise`)."""

    def __init__(self, wide: bool = False, noise: bool = False) -> None:
        self.wide = wide
        self.noise = torch.Generator().manual_seed(0) if noise else None
        self.made: dict[Node, list[Any]] = {}

    def call(self, node: Node) -> list[Any] | None:
        """The results, or None where PyTorch cannot compute them."""
        kwargs = {k: self.value(v) for k, v in node.kwargs.items() if k != "device"}
        target = BY_OTHERS.get(node.target) or HOST_OPS.get(node.target, node.target)
        args = [*map(self.value, node.args)]
        for function in target, decompositions().get(target):
            try:
                results = function(*args, **kwargs)
            except (NotImplementedError, RuntimeError, TypeError):  # no kernel; our own
                continue
            results = [results] if isinstance(results, Tensor) else [*pytree.tree_leaves(results)]
            return results + [None] * (len(node.outs) - len(results))
        return None

    def value(self, x: Any) -> Any:
        kind = type(x)
        if kind is Out and (made := self.made.get(x.node)) and made[x.index] is not None:
            return made[x.index]
        if kind is Out or kind is Array:
            return self.form(_device(x), self.noise)
        if kind in (list, tuple):
            return kind(map(self.value, x))
        if kind is torch.dtype:
            return _wide(x) if self.wide else x
        return x.value if kind is Number else x

    def form(self, x: Tensor | None, noise: torch.Generator | None = None) -> Tensor | None:
        if x is None or not (self.wide and can_be_nan(x.dtype)):
            return x
        wide = x.to(_wide(x.dtype))
        if noise is not None:
            by = torch.empty(x.shape, dtype=torch.float64).uniform_(-1, 1, generator=noise)
            wide = wide * (1 + by * torch.finfo(x.dtype).eps)
        return wide


def _linear_backward(x: Tensor, grad: Tensor, weight: Tensor, mask: Any) -> list[Tensor]:
    rows = grad.reshape(-1, grad.shape[-1])
    return [grad @ weight, rows.mT @ x.reshape(-1, x.shape[-1]), rows.sum(0)]


def _attention(*given: Any, scale: float | None = None, **seed: int) -> list[Tensor | None]:
    q, k, v, bias, dropout, causal = (*given, *(None, 0.0, False)[len(given) - 3 :])[:6]
    return _FLASH.default(q, k, v, dropout, causal, attn_mask=bias, scale=scale)


def _attention_backward(*given: Any, scale: float | None = None, **seed: int) -> list[Any]:
    grad, q, k, v, bias, *_, dropout, causal = given[:14]
    more = {"attn_mask": bias, "scale": scale}
    found = _FLASH.default(q, k, v, dropout, causal, **more)
    slopes = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return slopes(grad, q, k, v, *found, dropout, causal, **more)


# What PyTorch's CPU computes by other operations. A result that is None is not compared.
BY_OTHERS = {
    aten.linear_backward.default: _linear_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
}


def _device(value: Out | Array) -> Tensor | None:
    """What the device has computed; None for an undefined result."""
    shape = nan_checks.shape(value)
    if shape is None:
        return None
    array = value.array if type(value) is Out else value
    meta = metas.contiguous(shape.dims, HLO_TO_TORCH[shape.dtype])
    return fresh(meta, value if array is None else array).cpu()


def _rounded(x: Tensor | None, shape: Shape | None) -> Tensor | None:
    return None if x is None or shape is None else x.to(HLO_TO_TORCH[shape.dtype])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float64) if can_be_nan(dtype) else dtype


def _errors(mine: Tensor, plain: Tensor, exact: Tensor, moved: Tensor) -> list[float]:
    """Of ours, of PyTorch's, of moved operands, and what is always allowed."""
    kind = mine.dtype
    # narrow numbers are rounded f32
    times = 4 if kind.itemsize < 4 else 16
    least = times * torch.finfo(kind).eps if can_be_nan(kind) else 0.0
    known = plain.isfinite() == exact.isfinite()
    strange = (mine.isfinite() != plain.isfinite()) | (mine.isnan() != plain.isnan())
    if (known & strange).any():
        return [math.inf, 0.0, 0.0, least]
    finite = plain.isfinite() & exact.isfinite() & mine.isfinite() & moved.isfinite()
    if not finite.any():
        return [0.0, 0.0, 0.0, least]
    kind = exact.dtype if exact.is_complex() else torch.float64
    mine, plain, exact, moved = (x[finite].to(kind) for x in (mine, plain, exact, moved))
    scale = float(exact.abs().max()) or 1.0
    return [float((x - exact).abs().max()) / scale for x in (mine, plain, moved)] + [least]
