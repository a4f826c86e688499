"""Which operation of a step made the first NaN.

    with torch_hlo.debug.nan_checks():
        train()     # FloatingPointError: log makes 2 NaN of 8 numbers at train.py:31 ...

Steps run as they always do, but overwrite nothing. When a step has a NaN among its results, a
second program says of each of its operations which results have one: the first operation that makes
one of operands without is what is looked for. So it is with infinities, but those that Python has
written (masks) are results like others. Loops and branches are run again, a turn at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torch_hlo import config
from torch_hlo.hlo.ir import Shape
from torch_hlo.lowering.core import HLO_TO_TORCH, TORCH_TO_HLO, Node, Out, looks
from torch_hlo.lowering.random.threefry import turn_seed
from torch_hlo.pytorch.registration import PLACE

from ..record import Array, HloTensor, Number, fresh, meta as metas, read, session
from ..record.recording import copied
from .fingerprint import collect

if TYPE_CHECKING:
    from torch_hlo.lowering.fx.fx_graph import FxGraph

Value = Out | Array
Judge = Callable[[torch.Tensor], torch.Tensor]
Judges = Mapping[str, Judge]


def wanted() -> Judges:
    """What is looked for."""
    return {"NaN": torch.isnan} | ({"infinities": torch.isinf} if config.get("NAN") == 1 else {})


class Step:
    """A step that is about to run: its operations, in order, and its results."""

    def __init__(self, values: Sequence[Value], where: str = "in this step") -> None:
        self.results = [x for x in values if type(x) is Out and x.array is None]
        self.nodes, self.where = collect(self.results).nodes, where

    def check(self, judges: Judges | None = None) -> None:
        """Raise FloatingPointError if a result is NaN or infinite. The step has run."""
        judges = wanted() if judges is None else judges
        floats = {x: t for x in self.results if (t := _tensor(x)) is not None}
        for what, judge in judges.items() if floats else ():
            bad = {x.node for x, is_bad in zip(floats, _any([*floats.values()], judge)) if is_bad}
            if bad and (reason := self._reason(what, judge, bad)):
                raise FloatingPointError(reason)

    def _reason(self, what: str, judge: Judge, ends: set[Node]) -> str:
        if session.current().journal is not None:
            return f"a result has {what}; run it in one process to see which operation made it"
        of = [(node, i) for node in self.nodes for i in range(len(node.outs))]
        made = {(id(n), i): t for n, i in of if (t := _tensor(Out(n, i))) is not None}
        bad = dict(zip(made, _any([*made.values()], judge)))
        # infinite gradients in f16 are what torch.amp.GradScaler looks for
        scaled = any(name(n) == "_amp_foreach_non_finite_check_and_unscale" for n in self.nodes)
        for node in self._leading_to(ends):
            results = [made[id(node), i] for i in range(len(node.outs)) if bad.get((id(node), i))]
            if results and not any(_has(x, bad, judge) for x in operands(node)):
                for where, values in turns(node):
                    kept = [*map(computed, values)]  # whatever is right is computed, too
                    Step(values, where).check({what: judge})
                    del kept
                before = self._infinity(node, made)
                if scaled and _overflows(before or node):
                    continue
                if judge is torch.isnan or not writes_infinity(node.args):
                    return self._describe(node, what, judge(results[0]), before)
        if judge is torch.isnan:  # an infinity is Python's, or was there before
            leaves = ((n, x) for n in self.nodes for x in operands(n) if type(x) is Array)
            for node, leaf in leaves:
                if _has(leaf, {}, judge):
                    return (
                        f"{describe(leaf)}, which the step reads, was NaN before it; first used by"
                        f" {name(node)}{_at(node)}"
                    )
        return ""

    def _describe(self, node: Node, what: str, bad: torch.Tensor, before: Node | None) -> str:
        lines = [
            f"{name(node)} makes {int(bad.sum())} {what} of {bad.numel()} numbers{_at(node)}"
            f" (operation {self.nodes.index(node) + 1} of {len(self.nodes)} {self.where})"
        ]
        lines += [f"  given {_statistics(x)}" for x in operands(node)]
        if before is not None:
            lines += [f"  after {name(before)} made an infinity{_at(before)}"]
            lines += [f"    given {_statistics(x)}" for x in operands(before)]
        return "\n".join(lines)

    def _leading_to(self, nodes: set[Node]) -> Iterator[Node]:
        needed = {*nodes}
        for last in reversed(self.nodes):
            if last in needed:
                needed.update(x.node for x in operands(last) if type(x) is Out)
        return filter(needed.__contains__, self.nodes)

    def _infinity(self, node: Node, made: dict) -> Node | None:
        """The first operation that makes an infinity of finite numbers, of those on the way to a
        node that is given one."""
        infinite = dict(zip(made, _any([*made.values()], torch.isinf)))

        def given(n: Node) -> bool:
            return any(_has(x, infinite, torch.isinf) for x in operands(n))

        for before in self._leading_to({node}) if given(node) else ():
            if any(infinite.get((id(before), i)) for i in range(len(before.outs))):
                if not given(before):
                    return before
        return None


def _overflows(node: Node) -> bool:
    narrow = any(str(x).startswith("f16") for x in node.outs)
    return narrow and "in the backward pass" in node.source


def writes_infinity(args: Any) -> bool:
    """Whether a number among arguments is infinite."""
    numbers = (x.value if type(x) is Number else x for x in pytree.tree_leaves(args))
    return any(isinstance(x, float) and math.isinf(x) for x in numbers)


def _tensor(value: Value) -> HloTensor | None:
    """A tensor of a value; None if it cannot be NaN, or holds no numbers."""
    form = shape(value)
    if form is None or not form.nbytes or not can_be_nan(HLO_TO_TORCH[form.dtype]):
        return None
    return computed(value)


def computed(value: Value) -> HloTensor:
    """The tensor of a value."""
    form = shape(value)
    array = value.array if type(value) is Out else value
    meta = metas.contiguous(form.dims, HLO_TO_TORCH[form.dtype])
    return fresh(meta, value if array is None else array)


def turns(node: Node) -> Iterator[tuple[str, list[Value]]]:
    """The results of each run of a function in a loop or a branch, and which run it is."""
    what = name(node)
    args = node.args
    drawn = [_number(x) for k, x in node.kwargs.items() if k in ("seed", "offset")]

    def run(graph: FxGraph, given: Sequence[Value], turn: int, stream: int = 0) -> list[Value]:
        return _applied(graph, given, turn_seed(*drawn, turn, stream) if drawn else 0)

    if what == "cond":
        chosen = args[1 if computed(args[0]).item() else 2]
        yield f"in a branch of cond{_at(node)}", run(chosen, args[3], 0)
    elif what == "while_loop":
        test, body, state, more = args
        for turn in itertools.count(1):
            if not computed(run(test, [*state, *more], turn - 1, 1)[0]).item():
                return
            state = run(body, [*state, *more], turn - 1)
            yield f"in turn {turn} of while_loop{_at(node)}", state
    elif what == "scan":
        body, state, xs, more, *reverse = args
        turns = range(shape(xs[0]).dims[0])
        for turn in reversed(turns) if any(reverse) else turns:
            at = torch.tensor([turn]).to(PLACE.device)  # one program for all turns
            slices = [read(computed(x).index_select(0, at).squeeze(0)) for x in xs]
            results = run(body, [*state, *slices, *more], turn)
            yield f"in turn {turn + 1} of scan{_at(node)}", results
            state = results[: len(state)]


def _number(value: Value | Number) -> int:
    return int(value.value if type(value) is Number else computed(value).item())


def _applied(graph: FxGraph, given: Sequence[Value], seed: int) -> list[Value]:
    """A recorded function's results for these operands. What is looked at goes nowhere."""
    values: dict[int, Value | Number] = {
        id(x.leaf): Number(seed, "s64") if x.source is None else given[x.source]
        for x in graph.inputs
    }
    if graph.tokens:
        token = torch.zeros(looks.TOKEN.dims, dtype=torch.int64, device=PLACE.device)
        values[id(graph.tokens[0])] = read(token)
    made: dict[Node, Node] = {}
    outs: dict[tuple[Node, int], Out] = {}  # one of each: all see that it has been computed

    def value(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [*map(value, x)]
        if type(x) is not Out:
            return values.get(id(x), x)
        return outs.setdefault((x.node, x.index), Out(made[x.node], x.index))

    for n in graph.nodes:
        made[n] = copied(n, value)
    return [value(x) for x, _ in graph.outputs]


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
        low = finite.min().item()
        high = finite.max().item()
        parts = [f"{low:.4g} to {high:.4g}, mean {finite.mean().item():.4g}"]
    counts = {
        "zeros": (tensor == 0).sum().item(),
        "infinities": tensor.isinf().sum().item(),
        "NaN": tensor.isnan().sum().item(),
    }
    parts += [f"{n} {what}" for what, n in counts.items() if n]
    return f"{text}: {', '.join(parts)}"
