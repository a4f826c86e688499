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
from torch_hlo.lowering.core.registry import HLO_TO_TORCH, is_pointwise, is_random
from torch_hlo.pytorch.operators import HigherOrderOperator, decompositions

from ..aten import dispatch
from ..record import Array, Number, aten, session
from ..record.views import HOST_OPS
from . import nan_checks
from .fingerprint import collect
from .nan_checks import can_be_nan

NEAR = 8
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu
# what was there before
_EMPTY = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
TIMES = 8  # PyTorch's error, and what rounding operands does


@dataclass(frozen=True)
class Compared:
    """A result. Errors are the largest differences from double precision, relative to the largest
    number of the result, or to the number itself where an elementwise operation is right otherwise;
    `allowed`: what `ours` may be."""

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
    engine = session.engine().base()
    state = session.current()
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
        self.found = found
        self.alone = alone

    def check(self) -> None:
        runs = [_Run(), _Run(wide=True), _Run(wide=True, noise=1)]
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
        if nan_checks.name(out.node) in _EMPTY:
            return None
        # whole numbers: places of the largest of equal numbers, and so on
        if not can_be_nan(mine.dtype) and not (self.alone and len(out.node.outs) == 1):
            return None
        node = out.node
        errors = _errors(mine, *values)
        narrow = can_be_nan(mine.dtype) and _wide(mine.dtype) != mine.dtype
        if narrow and self.alone and errors[0] <= errors[2] and _is_elementwise(node):
            errors = _each(out, mine, *values[:2]) or errors
        return Compared(
            nan_checks.name(node),
            node.source or next((n.source for n in self.nodes if n.source), ""),
            nan_checks.describe(out),
            tuple(map(nan_checks.describe, nan_checks.operands(node))),
            *errors,
        )


class _Run:
    """PyTorch's values: as they are, or in double precision (`wide`); also of operands that were
    rounded anew, or are `far` from what they were, and are the same for one seed of `noise`."""

    def __init__(self, wide: bool = False, noise: int = 0, far: float = 0.0) -> None:
        self.wide = wide
        self.far = far
        self.noise = torch.Generator().manual_seed(noise) if noise else None
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
        if x is None or not can_be_nan(x.dtype):
            return x
        if noise is not None:
            by = torch.empty(x.shape, dtype=torch.float64).uniform_(-1, 1, generator=noise)
            by = 1 + by * max(torch.finfo(x.dtype).eps, self.far)
            x = (x.to(_wide(x.dtype)) * by).to(x.dtype)
        return x.to(_wide(x.dtype)) if self.wide else x


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
    return None if nan_checks.shape(value) is None else nan_checks.computed(value).cpu()


def _rounded(x: Tensor | None, shape: Shape | None) -> Tensor | None:
    return None if x is None or shape is None else x.to(HLO_TO_TORCH[shape.dtype])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float64) if can_be_nan(dtype) else dtype


def _least(kind: torch.dtype) -> float:
    """What is always allowed."""
    times = 4 if kind.itemsize < 4 else 16  # narrow numbers are rounded f32
    return times * torch.finfo(kind).eps if can_be_nan(kind) else 0.0


def _errors(mine: Tensor, plain: Tensor, exact: Tensor, moved: Tensor) -> list[float]:
    """Of ours, of PyTorch's, and what is allowed."""
    least = _least(mine.dtype)
    known = plain.isfinite() == exact.isfinite()
    strange = (mine.isfinite() != plain.isfinite()) | (mine.isnan() != plain.isnan())
    if (known & strange).any():
        return [math.inf, 0.0, least]
    finite = plain.isfinite() & exact.isfinite() & mine.isfinite() & moved.isfinite()
    if not finite.any():
        return [0.0, 0.0, least]
    kind = exact.dtype if exact.is_complex() else torch.float64
    mine, plain, exact, moved = (x[finite].to(kind) for x in (mine, plain, exact, moved))
    scale = float(exact.abs().max()) or 1.0
    ours, torchs, by = (float((x - exact).abs().max()) / scale for x in (mine, plain, moved))
    return [ours, torchs, max(TIMES * max(torchs, by), least)]


def _is_elementwise(node: Node) -> bool:
    """Whether each number of the result follows from one of each operand, which are all there."""
    there = all(type(x) is Array or x.array is not None for x in nan_checks.operands(node))
    return there and not isinstance(node.target, HigherOrderOperator) and is_pointwise(node.target)


def _each(out: Out, mine: Tensor, plain: Tensor, exact: Tensor) -> list[float] | None:
    """The errors where ours is the worst, relative to the number that is there; None if each is
    right. PyTorch's are the largest near these operands, since one alone may be right by chance:
    very near for where the result is 0, and less so for where what is in between hardly changes."""
    least = _least(mine.dtype)
    kind = torch.finfo(mine.dtype)  # smaller numbers may be 0, and be multiplied then
    lost = max(kind.tiny * kind.eps, 2**10 * torch.finfo(torch.float32).tiny) / least

    def error(x: Tensor, right: Tensor, beside: Tensor = exact) -> Tensor:
        return ((x - right).abs() / (beside.abs() + lost)).nan_to_num(0.0, posinf=0.0)

    ours = error(mine, exact)
    torchs = error(plain, exact)
    by = torch.zeros_like(exact.abs())
    if not (ours > least).any():
        return None
    for seed in range(1, NEAR):
        for far in 0.0, 2**-7:
            near = [_Run(wide, seed, far).call(out.node) for wide in (False, True)]
            narrow, wide = ((found or near[1])[out.index] for found in near)
            torchs = torch.maximum(torchs, error(narrow, wide, wide if far else exact))
            by = by if far else torch.maximum(by, error(wide, exact))
    allowed = (TIMES * torch.maximum(torchs, by)).clamp_min(least)
    at = (ours / allowed).argmax()
    return [float(x.flatten()[at]) for x in (ours, torchs, allowed)]
