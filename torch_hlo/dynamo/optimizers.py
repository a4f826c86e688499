"""Steps of PyTorch's optimizers in captured functions.

Dynamo does not look into them: a step is one call in the graph, with the parameters, their
gradients and every option as arguments. So an option that Python changes is seen as any other
number is. When the graph is recorded, the optimizer itself steps; what it reads and writes of its
state is known to whoever records (`Stepped`)."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from torch_hlo.lazy.record import HloTensor, from_cpu, session
from torch_hlo.pytorch import guards, steps

from .released import release


def traced_step(
    optimizer: torch.optim.Optimizer, token: int, names: Sequence[str], closure: Any = None
) -> Any:
    """What Dynamo traces for `optimizer.step(closure)`."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooks or closure is not None:
        return _as_it_is(optimizer, closure)
    parameters = []
    gradients = []
    options = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters.append(parameter)
            gradients.append(parameter.grad)
        for name in names:
            options.append(group[name])
    step(token, parameters, gradients, names, options)


@torch.compiler.disable
def _as_it_is(optimizer: torch.optim.Optimizer, closure: Any) -> Any:
    return optimizer.step() if closure is None else optimizer.step(closure)


def traced_zero_grad(
    owner: torch.optim.Optimizer | torch.nn.Module, set_to_none: bool = True
) -> None:
    """What Dynamo traces for `owner.zero_grad(set_to_none)`."""
    if isinstance(owner, torch.nn.Module):
        parameters = list(owner.parameters())
    else:
        parameters = [p for group in owner.param_groups for p in group["params"]]
    if set_to_none:  # what they were does not matter, so nothing is guarded
        for parameter in parameters:
            parameter.grad = None
        release(parameters)
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


class Stepped:
    """What a step in a graph reads besides the graph's inputs: the optimizer's state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = ref(optimizer)
        self.hooks = bool(
            optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        )
        state = optimizer.state
        self.keys = list(map(id, state))
        self.entries = list(state.values())
        self.values = list(map(id, self.entries))
        self.kept = list(map(dict, self.entries))
        self.sizes = list(map(len, self.entries))
        self.names: list[tuple[dict, str]] = []
        self.others: list[tuple[dict, str, Any]] = []  # state that is no tensor
        for values in self.entries:
            for name, value in values.items():
                if type(value) is HloTensor:
                    self.names.append((values, name))
                else:
                    self.others.append((values, name, value))

    def undo(self) -> None:
        """The state has the entries that it had."""
        optimizer = self.optimizer()
        for parameter in list(optimizer.state):
            if id(parameter) not in self.keys:
                del optimizer.state[parameter]
        for entry, kept in zip(self.entries, self.kept):
            entry.clear()
            entry.update(kept)

    def tensors(self) -> list[HloTensor] | None:
        """The state as it is now; None if it is kept elsewhere, has other names, or other values
        that are no tensors of the device."""
        optimizer = self.optimizer()
        if optimizer is None or self.hooks:
            return None
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return None
        state = optimizer.state
        if list(map(id, state)) != self.keys or list(map(len, self.entries)) != self.sizes:
            return None
        if list(map(id, state.values())) != self.values:
            return None
        try:
            if self.others and any(d[name] != value for d, name, value in self.others):
                return None
            return [values[name] for values, name in self.names]
        except KeyError:
            return None


def step(
    token: int,
    parameters: Sequence[HloTensor],
    gradients: Sequence[HloTensor | None],
    names: Sequence[str],
    options: Sequence[Any],
) -> None:
    """In a graph: the optimizer of this number steps, with these gradients and options."""
    if steps.is_fake(parameters[0]):
        return
    optimizer = steps.OPTIMIZERS[token]
    engine = session.engine()
    before = [p.grad for p in parameters]
    groups = [group for group in optimizer.param_groups for _ in names]
    kept = [group[name] for group, name in zip(groups, names * len(optimizer.param_groups))]
    places = list(zip(groups, names * len(optimizer.param_groups), options, kept))
    _bring_counters(optimizer)
    engine.stepping(Stepped(optimizer))
    try:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        for group, name, value, _ in places:
            group[name] = value
        with _Fused():
            optimizer.step()
    finally:
        for group, name, _, value in places:
            group[name] = value
        for parameter, gradient in zip(parameters, before):
            parameter.grad = gradient


def _bring_counters(optimizer: torch.optim.Optimizer) -> None:
    """Move the numbers that an optimizer counts on the CPU to the device: a launch would leave them
    as they are."""
    for values in optimizer.state.values():
        for name, value in values.items():
            if type(value) is torch.Tensor and value.device.type == "cpu":
                values[name] = from_cpu(value)


class _Fused(torch.overrides.TorchFunctionMode):
    """The fused operators of optimizers take options as plain numbers. Here they are recorded with
    numbers that are followed."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        followed = any(isinstance(v, torch.SymFloat) for v in (*args, *kwargs.values()))
        if not followed or not name.startswith("_fused_"):
            return function(*args, **kwargs)
        op = getattr(torch.ops.aten, name).default
        written = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
        torch.autograd.graph.increment_version([t for x in written for t in x])
        # as the dispatcher passes them: in the schema's order, without those left at their default
        named = {
            a.name: kwargs[a.name]
            for a in op._schema.arguments
            if a.name in kwargs and (not a.has_default_value() or kwargs[a.name] is not None)
        }
        return HloTensor.__torch_dispatch__(op, (), args, named)


@functools.cache
def register() -> None:
    """Let Dynamo trace these steps."""
    guards.complete()
    steps.constants_apart()
    steps.trace_gradients()
    steps.without_streams()
    steps.graph_call(step)
    steps.graph_call(release)
    steps.trace_file(str(Path(__file__).parents[1] / "debug.py"))
    steps.trace_file(str(Path(__file__).parent / "step.py"))
    steps.trace_optimizers(HloTensor, traced_step, traced_zero_grad)
    steps.trace_modules(HloTensor, traced_zero_grad)
