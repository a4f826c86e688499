"""How far the device is from exact numbers, compared with PyTorch on the CPU.

    with drift.watched(alone=True) as found:      # operation by operation
        model(x).sum().backward()
    print(found.first)

The operations of each step are computed again by PyTorch, from the arrays that the step read: in
their own types, and in double precision. An error may be a few times PyTorch's, or what rounding
the operands anew does to the exact result. Random numbers, and what PyTorch's CPU has no kernel
for, are taken from the device."""

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
from torch_hlo.lowering.core.graph import Node, Out
from torch_hlo.lowering.core.registry import HLO_TO_TORCH, is_random

from ..aten import dispatch
from ..record import Array, Number, aten, fresh, meta as metas, session
from ..record.views import HOST_OPS
from . import nan_checks
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
            skip = is_random(node.target) and node.target not in _BY_OTHERS
            made = [] if skip else [run.call(node) for run in runs]
            if not made or None in made:
                self.found.left.add(nan_checks.name(node))
                device = [_device(Out(node, i)) for i in range(len(node.outs))]
                made = [[run.form(x) for x in device] for run in runs]
            for run, values in zip(runs, made):
                run.made[node] = values
        for out in self.results:
            values = [run.made[out.node][out.index] for run in runs]
            mine = _device(out)
            if mine is None or not mine.numel() or values[0] is None:
                continue
            # whole numbers: places of the largest of equal numbers, and so on
            if can_be_nan(mine.dtype) or self.alone and len(out.node.outs) == 1:
                self.found.results.append(self._compared(out, _errors(mine, *values)))

    def _compared(self, out: Out, errors: list[float]) -> Compared:
        node, (ours, plain, moved, least) = out.node, errors
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
        target = _BY_OTHERS.get(node.target) or HOST_OPS.get(node.target, node.target)
        try:
            results = target(*map(self.value, node.args), **kwargs)
        except (NotImplementedError, RuntimeError, TypeError):  # no kernel; our own
            return None
        return [results] if isinstance(results, Tensor) else pytree.tree_leaves(results)

    def value(self, x: Any) -> Any:
        kind = type(x)
        if kind is Out and x.node in self.made:
            return self.made[x.node][x.index]
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
    found = _FLASH.default(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    return [*found, *[None] * 7]


def _attention_backward(*given: Any, scale: float | None = None, **seed: int) -> list[Any]:
    grad, q, k, v, bias, *_, dropout, causal = given[:14]
    more = {"attn_mask": bias, "scale": scale}
    found = _FLASH.default(q, k, v, dropout, causal, **more)
    slopes = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return [*slopes(grad, q, k, v, *found, dropout, causal, **more), None]


# What PyTorch's CPU computes by other operations. A result that is None is not compared.
_BY_OTHERS = {
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float64) if can_be_nan(dtype) else dtype


def _errors(mine: Tensor, plain: Tensor, exact: Tensor, moved: Tensor) -> list[float]:
    """Of ours, of PyTorch's, of moved operands, and what is always allowed."""
    least = 4 * torch.finfo(mine.dtype).eps if can_be_nan(mine.dtype) else 0.0
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
