"""What a program left on two devices, compared; and what rounding alone may change."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# relative, of values of this dtype, before anybody asks what rounding does to them
TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2,
    torch.complex64: 2e-5, torch.complex128: 1e-9,
}  # fmt: skip


# statements that may have done a part of their work when they raise
PARTIAL = re.compile(r"out=|_foreach|module\.|resize_|^\w+\[.*, .*\] = ")


@dataclass
class Outcome:
    """What ran: the exceptions' types by statement, and what is left, as CPU tensors and numbers.
    `shown`: dtype, shape, strides and flags of each tensor."""

    errors: list[str | None]
    left: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, tuple] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    undefined: bool = False


@dataclass(frozen=True)
class Mismatch:
    kind: str  # "exception", "kept", "form" or "value"
    text: str


def look(
    left: dict[str, Any], strides: bool = True, gradients: bool = True
) -> tuple[dict[str, Any], dict[str, tuple]]:
    """`left` with CPU copies of tensors, and their forms."""
    shown: dict[str, tuple] = {}
    copies: dict[str, Any] = {}
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            shown[name] = _form(value, strides, gradients)
            # a copy: the values as they are now
            copies[name] = value.detach().cpu().clone()
        else:
            copies[name] = value
    return copies, shown


def _form(t: torch.Tensor, strides: bool, gradients: bool) -> tuple:
    seen = [s for s, n in zip(t.stride(), t.shape) if n > 1] if strides and t.numel() else None
    return t.dtype, tuple(t.shape), seen, *((t.requires_grad, t.is_leaf) if gradients else ())


def difference(want: Outcome, got: Outcome, lines: list[str]) -> Mismatch | None:
    """The first difference, or None."""
    for i, (w, g) in enumerate(zip(want.errors, got.errors)):
        if w != g:
            message = " | ".join((got if g else want).messages)
            line = lines[i] if i < len(lines) else f"call {i}"
            return Mismatch("exception", f"`{line}`: CPU {w or 'ran'}, hlo {g or 'ran'}: {message}")
        if w and i < len(lines) and PARTIAL.search(lines[i]):
            return None  # it raised in the middle of its work
    if want.left.keys() != got.left.keys():
        return Mismatch("kept", f"differ: {sorted(want.left.keys() ^ got.left.keys())}")
    for name, form in want.shown.items():
        if got.shown.get(name) != form:
            return Mismatch("form", f"{name}: CPU {form}, hlo {got.shown.get(name)}")
    for name, value in want.left.items():
        if not same(value, got.left[name]):
            return Mismatch("value", f"{name}: CPU {value!r}, hlo {got.left[name]!r}")
    return None


def same(want: Any, got: Any) -> bool:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        return close(want, got, TOLERANCE.get(want.dtype, 0.0))
    if isinstance(want, (float, complex)) and type(want) is type(got):
        return close(torch.tensor(want), torch.tensor(got), 2e-5)
    if isinstance(want, str) and want.startswith("tensor("):
        return True  # digits are rounded; the values are compared elsewhere
    return type(want) is type(got) and want == got


def close(want: torch.Tensor, got: torch.Tensor, tolerance: float) -> bool:
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    return (
        torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        if (want.numel())
        else True
    )


# multiples of 1/first up to the second are taken for exact
GRIDS = {torch.bfloat16: (8, 16), torch.float16: (8, 128)}
SUMS = re.compile(r"norm|var|std|mean|softmax|logsumexp|cdist")
CASTS = re.compile(r"copy|::sum|::prod|cum|out|_$|_Tensor|_Scalar")


# ops that show the bits of a NaN and the sign of a zero, and in which operands
BITS = {
    torch.ops.aten.view.dtype: [0], torch.ops.aten.copysign.Tensor: [1], torch.ops.aten.atan2.default: [0, 1],
}  # fmt: skip


# the CPU multiplies what it adds by `alpha`, which is 1 + 0j: where it is infinite, that is NaN
ADDED = re.compile(r"aten::(_foreach_)?(add|sub|rsub)_?")


class Noise(TorchDispatchMode):
    """Results that are not on the grid are moved by a few units in the last place: a second
    correct computation. Where it leads elsewhere, so may any other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.r = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.undefined = False  # whether a number became an integer that cannot hold it

    def _not_whole(self, func: Any, args: tuple) -> bool:
        if not CASTS.search(func._schema.name + func._overloadname):
            return False
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        return any(bool((~(t.abs() < 120)).any()) for t in tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        floats = self._not_whole(func, args)
        self.undefined |= _overlapping_write(func, args, kwargs or {})
        for i in BITS.get(func, ()):  # and what is a bool that holds a 5?
            floats_seen = args[i].is_floating_point() or args[i].is_complex()
            odd = (args[i].isnan() | (args[i] == 0)).any().item() if floats_seen else False
            self.undefined |= odd or args[i].dtype == torch.bool
        if ADDED.fullmatch(name):
            self.undefined |= _infinite([*args, *(kwargs or {}).values()])
        result = func(*args, **(kwargs or {}))
        if floats and isinstance(result, torch.Tensor) and not result.dtype.is_floating_point:
            self.undefined |= result.dtype != torch.bool
        view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if view or any(word in name for word in ("copy", "clone", "cat", "fill", "index_select")):
            return result
        precision = _precision(args)
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
                self.move(t, max(precision, torch.finfo(t.dtype).eps))
                self.cancel(t, name, args)
        return result

    def cancel(self, t: torch.Tensor, name: str, args: tuple) -> None:
        """A sum that almost vanishes may as well be zero, or a little more or less."""
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.numel()]
        if not SUMS.search(name) or not tensors or self.r.random() < 0.5:
            return
        largest = max(float(a.detach().abs().nan_to_num(0).max()) for a in tensors)
        if all(s or n <= 1 for s, n in zip(t.stride(), t.shape)):
            limit = torch.finfo(t.dtype).eps * (1 + largest) * (400 if "norm" in name else 8)
            t.data[t.abs() < limit] = 0 if t.is_complex() else self.r.choice([0, -limit, limit])

    def move(self, t: torch.Tensor, precision: float) -> None:
        eps = precision * 3
        x = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        grid, largest = GRIDS.get(x.dtype, (256, 1 << 15))
        off_grid = (x * grid != (x * grid).round()) | (x.abs() > largest)
        off_grid &= x.isfinite()
        if not off_grid.any():
            return
        factor = torch.ones_like(x, dtype=torch.float64)
        amount = 1 + torch.rand(int(off_grid.sum()), generator=self.numbers)
        factor[off_grid] += eps * self.r.choice([-1, 1]) * amount
        moved = (x.double() * factor).to(x.dtype)
        if t.is_complex():
            moved = torch.view_as_complex(moved.contiguous())
        if all(s or n <= 1 for s, n in zip(t.stride(), t.shape)):
            t.data.copy_(moved)


def _precision(args: tuple) -> float:
    """That of the operands: the result may be of a wider type."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    floats = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    whole = [torch.float32] if len(floats) < len(tensors) else []
    return max([torch.finfo(dtype).eps for dtype in floats + whole], default=0.0)


def _overlapping_write(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an element may be written twice, with different values, or be read after that."""
    out = kwargs.get("out")
    if isinstance(out, torch.Tensor):
        if torch._debug_has_internal_overlap(out) != 0:
            return True
        memory = out.untyped_storage().data_ptr()
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        return any(t.untyped_storage().data_ptr() == memory and t is not out for t in tensors)
    name = func._schema.name
    if not name.endswith("_") or name.endswith(("fill_", "zero_", "detach_")) or not args:
        return False
    written = args[0]
    if not isinstance(written, torch.Tensor) or not written.numel():
        return False
    memory = written.untyped_storage().data_ptr()
    return torch._debug_has_internal_overlap(written) != 0 or any(
        t.untyped_storage().data_ptr() == memory and _place(t) != _place(written)
        for t in args[1:]
        if isinstance(t, torch.Tensor)
    )


def _infinite(args: list) -> bool:
    """Whether there are complex numbers and infinite ones."""
    numbers = [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a])]
    tensors = [x for x in numbers if isinstance(x, torch.Tensor)]
    if not any(isinstance(x, complex) for x in numbers) and not any(
        t.is_complex() for t in tensors
    ):
        return False
    return any(
        bool(
            torch.view_as_real(t.resolve_conj()).isinf().any()
            if t.is_complex()
            else t.isinf().any()
        )
        for t in tensors
    )


def _place(t: torch.Tensor) -> tuple:
    return t.shape, t.stride(), t.storage_offset()


def rounding(want: Outcome, got: Outcome, moved: list[Outcome]) -> bool:
    """Whether `got` differs from `want` by no more than `moved` do, which are `want` with other
    rounding."""
    for other in moved:
        if (
            other.undefined
            or other.errors != want.errors
            or other.shown != want.shown
            or other.left.keys() != want.left.keys()
        ):
            return True
    if got.errors != want.errors or got.shown != want.shown or got.left.keys() != want.left.keys():
        return False
    return all(_within(name, value, got, moved) for name, value in want.left.items())


def _within(name: str, want: Any, got: Outcome, moved: list[Outcome]) -> bool:
    x = got.left[name]
    if same(want, x):
        return True
    others = [m.left[name] for m in moved]
    if isinstance(want, str) or not isinstance(want, (float, complex, torch.Tensor)):
        return any(o != want for o in others)
    wanted, values = torch.as_tensor(want), [torch.as_tensor(o) for o in others]
    if not wanted.is_floating_point() and not wanted.is_complex():
        return any(not torch.equal(wanted, v) for v in values)
    spread = torch.stack([(v - wanted).abs().nan_to_num(torch.inf) for v in values]).amax(0)
    both_odd = wanted.isnan() & torch.as_tensor(x).isnan() | (wanted == torch.as_tensor(x))
    off = (torch.as_tensor(x) - wanted).abs().nan_to_num(torch.inf)
    limit = spread.double() * 30 + TOLERANCE.get(wanted.dtype, 0) * (1 + wanted.abs().double())
    changed = torch.stack([v.isnan() != wanted.isnan() for v in values]).any(0)
    return bool((both_odd | changed | (off.double() <= limit)).all())
