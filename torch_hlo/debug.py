"""Look at the program that recorded tensors would become, without running it.

y = (x + 1).relu()
print(torch_hlo.debug.graph_text([y]))    # the recorded aten ops
print(torch_hlo.debug.hlo_text([y]))      # lowered to HLO
print(torch_hlo.debug.optimized_text([y]))
module, arrays = torch_hlo.debug.pending_step()   # all that is recorded, and its inputs

with torch_hlo.debug.nan_checks():                # which operation makes the first NaN?
    train()

print(torch_hlo.debug.compare(model, x))   # the first operation that is less precise than PyTorch's

torch_hlo.debug.print("loss {x:.3f} at step {i}", x=loss, i=step)   # in compiled functions, too
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import functools
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hlo.hlo.ir import Module
from torch_hlo.lazy import device_module
from torch_hlo.lazy.record import HloTensor, conditions, generator, read, session
from torch_hlo.lazy.run import drift, spmd
from torch_hlo.lazy.run.fingerprint import Graph, collect
from torch_hlo.lowering.core import Leaf, Lift, Out, looks, lower

from . import config
from .compiler import pipeline
from .hlo import stablehlo


def graph(tensors: Sequence[Tensor]) -> Graph:
    """The recorded graph of pending hlo tensors. Raises ValueError when none is pending."""
    found = [value for t in tensors if type(value := read(t)) is Out and value.array is None]
    if not found:
        raise ValueError(
            "none of these tensors is pending: they are computed already, and nothing is recorded"
            " for them"
        )
    return collect(found)


def graph_text(tensors: Sequence[Tensor]) -> str:
    """One line per recorded op: `%2 = aten.add.Tensor(%0, leaf0)  # f32[4]`."""
    g = graph(tensors)
    leaves: list[Leaf] = [*g.leaves]
    numbers: list[Lift] = [*g.numbers]

    def text(x: object) -> str:
        if isinstance(x, Out):
            return (
                f"leaf{leaves.index(x.array)}"
                if x.array is not None
                else f"%{g.position[id(x.node)]}" + (f".{x.index}" if len(x.node.outs) > 1 else "")
            )
        if isinstance(x, Leaf):
            return f"leaf{leaves.index(x)}"
        if isinstance(x, Lift):
            return f"number{numbers.index(x)}"
        return "[" + ", ".join(map(text, x)) + "]" if isinstance(x, (list, tuple)) else str(x)

    lines = []
    for i, node in enumerate(g.nodes):
        args = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
        lines.append(
            f"%{i} = {node.target}({', '.join(args)})  #"
            f" {', '.join(map(str, node.outs))}{f'  {node.source}' if node.source else ''}"
        )
    return "\n".join(lines)


def module(tensors: Sequence[Tensor] | None = None) -> Module:
    """The HLO module of pending hlo tensors, or of all that is recorded, before any pass."""
    if not tensors:
        return pending_step()[0]
    g = graph(tensors)
    where = spmd.placement(g, [None] * len(g.outputs))
    if where is not None:
        return spmd.annotated(g, where, ())
    return lower(g.nodes, g.outputs, [*g.leaves, *g.numbers])


def pending_step() -> tuple[Module, list[np.ndarray]]:
    """The program that the next `mark_step()` would run, before any pass (`aliases`: results that
    overwrite inputs), and the bytes of each of its parameters (u8[nbytes], a copy). Raises
    ValueError when nothing is recorded."""
    found, buffers = session.engine().base().pending_step()
    return found, [buffer.bytes.copy() for buffer in buffers]


def stablehlo_text(tensors: Sequence[Tensor] | None = None) -> str:
    """`module(tensors)` in StableHLO."""
    return stablehlo.stablehlo_text(module(tensors))


def hlo_text(tensors: Sequence[Tensor]) -> str:
    """`str(module(tensors))`."""
    return str(module(tensors))


def optimized_text(
    tensors: Sequence[Tensor],
    observe: Callable[[str, Module], None] | None = None,
) -> str:
    """The HLO after all passes; `observe(pass name, module)` sees it after each."""
    dump = None if observe is None else lambda name, m, _: observe(name, m)
    return str(pipeline.optimize(module(tensors), dump))


def is_pending(tensor: Tensor) -> bool:
    """Whether the tensor's value is recorded and still to be computed."""
    value = read(tensor) if isinstance(tensor, HloTensor) else None
    return type(value) is Out and value.array is None


@contextlib.contextmanager
def nan_checks(infinities: bool = True) -> Iterator[None]:
    """In the block, a step on the device that makes a NaN or an infinity raises FloatingPointError:
    it names the first operation that makes one (forward, backward or an optimizer's), its Python
    line, and the range of its operands. `TORCH_HLO_NAN=1` does so for the whole process.

    Steps run as they do elsewhere, but one after the other and without overwriting their inputs, so
    they take more memory. The error comes where the step is started: at `mark_step()`, or where a
    value is read. What was recorded before the block ends is run there."""
    state = session.current()
    before, state.sources = state.sources, True
    try:
        with (
            config.override(NAN=1 if infinities else 2),
            torch.autograd.set_detect_anomaly(True, check_nan=False),
        ):
            yield
            session.engine().mark_step()
    finally:
        state.sources = before


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found: `alone`, operation by operation; `together`, in programs as they are
    compiled without it. `first` is the first result that drifts, or None."""

    alone: drift.Found
    together: drift.Found

    @property
    def first(self) -> drift.Compared | None:
        return self.alone.first or self.together.first

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        bad = self.first
        lines = [f"{len(self.alone.results)} results compared; none drifts"]
        if bad is not None:
            how = "by itself" if self.alone.first else "in its compiled program, not by itself"
            lines = [f"{bad.op} drifts {how}{bad.line and f', at {bad.line}'}"]
            lines += [f"  {', '.join(bad.operands)} -> {bad.result}"]
        rows = [x for found in (self.alone, self.together) for x in found.results]
        rows = sorted(rows, key=lambda x: -x.ours / x.allowed if x.allowed else -x.ours)[:5]
        lines += [f"{'error of ours':>14} {'PyTorch':>9} {'allowed':>9}  operation"]
        for x in rows if bad is None else [bad, *(x for x in rows if x is not bad)]:
            lines += [f"{x.ours:14.2g} {x.torch:9.2g} {x.allowed:9.2g}  {x.op} {x.result} {x.line}"]
        if left := sorted(self.alone.left):
            lines += [f"not compared (random, or not in PyTorch): {', '.join(left)}"]
        return "\n".join(lines)

    __repr__ = __str__


def compare(function: Callable[..., Any], *inputs: Any, backward: bool = True) -> Comparison:
    """Run a model on the device, forward and backward, and compare each operation with PyTorch on
    the CPU, whose error and ours are measured against double precision. A module, which may be on
    any device, is copied; a function has to take its tensors as inputs, or from "hlo"."""
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).to("hlo")
    state = device_module.get_rng_state()
    found = []
    for alone in True, False:
        device_module.set_rng_state(state)
        with drift.watched(alone) as results:
            alive = _train(function, inputs, backward)  # what nobody has is not computed
        found.append(results)
    del alive
    device_module.set_rng_state(state)
    return Comparison(*found)


def _train(function: Callable[..., Any], inputs: Sequence[Any], backward: bool) -> Any:
    """One step; what it has made. Gradients of results are numbers of both signs."""

    def given(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().to("hlo").requires_grad_(x.requires_grad)

    inputs = pytree.tree_map(given, inputs)
    results = pytree.tree_leaves(function(*inputs))
    wanted = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if wanted and backward:
        seeds = [torch.linspace(1, -0.5, x.numel()).reshape(x.shape).to(x) for x in wanted]
        torch.autograd.backward(wanted, seeds)
    return inputs, results


@dataclasses.dataclass(frozen=True)
class _Checked:
    """Raises RuntimeError unless all is true."""

    message: str

    def __call__(self, value: Tensor) -> None:
        if not value.all():
            raise RuntimeError(self.message)


def print(form: str, *args: Tensor | float, **kwargs: Tensor | float) -> None:
    """Print `form.format(*args, **kwargs)` with the values that tensors have here, in recorded,
    captured and compiled functions, without cutting the graph: when the program has run, and in the
    order of the program. Tensors without dimensions are numbers in the format."""
    _hand([*args, *kwargs.values()], looks.Printed, form, tuple(kwargs))


def check(condition: Tensor, message: str) -> None:
    """RuntimeError(message) where the program is found to have run with a condition (of any shape)
    that is not true everywhere; several that fail are one error."""
    _hand([condition], _Checked, message)


def callback(function: Callable[..., None], *tensors: Tensor) -> None:
    """Call `function` with the values of these tensors, on the CPU, when the program has run. As
    `print`."""
    # Dynamo guards on what an id is asked of: it takes equal code for equal functions otherwise
    _hand(tensors, _itself, function, _owner(function))


def breakpoint(**values: Tensor | float) -> None:
    """Compute all that is recorded, and open Python's debugger at the caller's line. Given values,
    it opens when they are there, as variables of these names. So it does in a graph of
    torch.compile, and in each turn of a loop or a branch, by default with all variables that are
    tensors."""
    if torch.compiler.is_compiling():
        return _hand([*values.values()], looks.Stopped, tuple(values))
    frame = sys._getframe(1)
    if generator.default.inside and not values:
        values = {k: v for k, v in frame.f_locals.items() if isinstance(v, HloTensor)}
    if values:
        stop = looks.Stopped(tuple(values), frame.f_code.co_filename, frame.f_lineno)
        return _hand([*values.values()], _itself, stop, _owner(stop))
    session.engine().sync()
    pdb.Pdb().set_trace(frame)


def _owner(function: Callable[..., None]) -> int:
    return id(getattr(function, "__self__", function))


def _itself(function: Callable[..., None], owner: int) -> Callable[..., None]:
    holds = hasattr(function, "__self__") or getattr(function, "__closure__", None)
    if _owner(function) != owner and holds:  # Dynamo's copy, and so is what it holds
        raise RuntimeError(
            f"torch_hlo.debug.callback: {function} is made in the compiled function, or is a method"
            " of what it has changed: define the function outside"
        )
    return function


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number(make: Callable[..., Callable[..., None]], *args: Any, count: int) -> int:
    _surface_at_exit()
    return looks.number(make(*args), count)


def _hand(
    values: Sequence[Tensor | float], make: Callable[..., Callable[..., None]], *args: Any
) -> None:
    """Call `make(*args)` with these values when they are there."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    device = tensors[0].device if tensors else torch.device("hlo")
    given = [v if isinstance(v, Tensor) else torch.tensor(v, device=device) for v in values]
    if torch.compiler.is_compiling():
        number = _number(make, *args, count=len(given))
        for value in given or [torch.tensor(0)]:
            looks.look(value.to(device) if given else value, number)
    else:
        _surface_at_exit()
        conditions.hand(make(*args), given)


@functools.cache
def _surface_at_exit() -> None:
    atexit.register(lambda: session.engine().sync())
