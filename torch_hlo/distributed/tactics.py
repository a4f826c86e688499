"""Ways to spread a model over a mesh, applied one after another (as in PartIR,
https://arxiv.org/abs/2401.11202): each adds axes where none is yet.

    plan = Plan(model, mesh, [megatron("model"), fsdp("data")])
    plan.mark(model)                  # parameters, and what hooks mark in the forward pass
    plan.mark_optimizer(optimizer)    # states, when they come to be
    x, y = plan.mark_batch(x, y)
The model stays as it is; a tactic is a function of the Plan, so a model with other needs gets one
of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .annotate import mark_sharding
from .mesh import Dim, Entry, Mesh

Spec = list[tuple[str, ...]]  # per dimension the axes, major first
SpecOfRank = Callable[[int], list[Entry]]


class Plan:
    """Which axes split which dimension of every parameter, optimizer state, batch and marked
    activation.

    parameters, states: name -> Spec. batch: the axes of dimension 0 of every input. activations:
    (module name, function of the rank -> spec)."""

    def __init__(self, model: nn.Module, mesh: Mesh, tactics: Sequence[Tactic] = ()) -> None:
        self.model = model
        self.mesh = mesh
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.parameters: dict[str, Spec] = {
            name: [()] * len(shape) for name, shape in self.shapes.items()
        }
        self.states: dict[str, Spec] = {}
        self.batch: tuple[str, ...] = ()
        self.activations: dict[str, SpecOfRank] = {}
        for tactic in tactics:
            tactic(self)

    def shard(self, name: str, dim: int, axis: str, table: dict[str, Spec] | None = None) -> bool:
        """Split dimension `dim` of parameter `name` over `axis` too; False where the axis is in use
        for it or does not divide the dimension."""
        spec = (self.parameters if table is None else table).get(name)
        if spec is None:  # tied to another one, which counts
            return False
        blocks = math.prod(self.mesh.shape[a] for a in (*spec[dim], axis))
        if any(axis in axes for axes in spec) or self.shapes[name][dim] % blocks:
            return False
        spec[dim] += (axis,)
        return True

    def shard_largest(self, name: str, axis: str, table: dict[str, Spec] | None = None) -> bool:
        """`shard` along the largest dimension for which that works, counted as it is split so
        far."""
        spec = (self.parameters if table is None else table)[name]
        left = [
            n / math.prod(self.mesh.shape[a] for a in axes)
            for n, axes in zip(self.shapes[name], spec)
        ]
        return any(
            self.shard(name, dim, axis, table)
            for dim in sorted(range(len(left)), key=lambda d: (-left[d], bool(spec[d]), d))
        )

    def mark(self, model: nn.Module | None = None) -> nn.Module:
        """Annotate the parameters of the model, and let its forward pass annotate activations;
        returns it."""
        model = self.model if model is None else model
        for name, p in model.named_parameters():
            # Data comes first: where both want an axis, values stay with their batch and parameters
            # are gathered.
            spec = [Dim(*axes, priority=1) for axes in self.parameters[name]]
            mark_sharding(p, self.mesh, spec, name=name)
        for name, of_rank in self.activations.items():
            model.get_submodule(name).register_forward_hook(self._hook(name, of_rank))
        return model

    def _hook(self, name: str, spec: SpecOfRank) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
            return mark_sharding(output, self.mesh, spec(output.dim()), name=f"output of {name}")

        return hook

    def mark_batch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Annotate dimension 0 of the inputs; returns them."""
        axes = self.batch or None
        return tuple(
            mark_sharding(t, self.mesh, (axes, *[None] * (t.dim() - 1)), name=f"input {i}")
            for i, t in enumerate(tensors)
        )

    def mark_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Annotate the optimizer's states when its first step has made them: like the parameter, or
        as the plan says."""
        names = {id(p): name for name, p in self.model.named_parameters()}

        def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            for p, states in optimizer.state.items():
                spec = self.states.get(names.get(id(p), ""))
                for key, t in states.items():
                    if spec is not None and isinstance(t, Tensor) and t.shape == p.shape:
                        mark_sharding(t, self.mesh, _entries(spec), name=f"{key} of {names[id(p)]}")
            handle.remove()

        handle = optimizer.register_step_post_hook(hook)


Tactic = Callable[[Plan], None]


def _entries(spec: Spec) -> tuple[Entry, ...]:
    return tuple(axes or None for axes in spec)


def _named(tactic: Tactic, name: str) -> Tactic:
    tactic.__name__ = name
    return tactic


def data_parallel(axis: str) -> Tactic:
    """Split the batch; gradients are summed over the axis."""

    def apply(plan: Plan) -> None:
        plan.batch += (axis,)

    return _named(apply, f"data_parallel({axis!r})")


def fsdp(axis: str, min_size: int = 0) -> Tactic:
    """Split the batch, and every parameter of at least `min_size` elements along its largest
    dimension: parameters are gathered where they are used, gradients scattered as they are summed
    (ZeRO stage 3, https://arxiv.org/abs/1910.02054)."""

    def apply(plan: Plan) -> None:
        plan.batch += (axis,)
        for name, shape in plan.shapes.items():
            if math.prod(shape) >= min_size:
                plan.shard_largest(name, axis)

    return _named(apply, f"fsdp({axis!r})")


def zero1(axis: str) -> Tactic:
    """Split the batch and the optimizer's states (ZeRO stage 1): each device updates its part of
    the parameters, which are then gathered."""

    def apply(plan: Plan) -> None:
        plan.batch += (axis,)
        for name in plan.shapes:
            plan.states[name] = list(plan.parameters[name])
            plan.shard_largest(name, axis, plan.states)

    return _named(apply, f"zero1({axis!r})")


# Linear layers whose outputs are split, and those whose inputs are; by the last part of the layer's
# name in common models.
COLUMN = re.compile(
    r"(q|k|v|qkv|query|key|value|[qkv]_proj|qkv_proj|query_key_value|c_attn|in_proj|Wqkv|up|gate"
    r"|up_proj|gate_proj|fc1|w1|w3|c_fc|lin1|wi|wi_\d|wq|wk|wv|q_lin|k_lin|v_lin|first)"
)
ROW = re.compile(
    r"(o|out|o_proj|out_proj|proj|c_proj|down|down_proj|fc2|w2|lin2|wo|out_lin|second"
    r"|dense_4h_to_h)"
)


def megatron(
    axis: str,
    column: re.Pattern[str] = COLUMN,
    row: re.Pattern[str] = ROW,
    vocabulary: bool = False,
) -> Tactic:
    """Tensor parallelism: the first of each pair of linear layers is split by outputs, the second
    by inputs (https://arxiv.org/abs/1909.08053), so that a pair costs one all-reduce forward and
    one backward. Layers are told by name, then by shape: wider outputs are split by column.
    `vocabulary`: embeddings are split by rows."""

    def apply(plan: Plan) -> None:
        for name, weight, transposed in _linears(plan.model):
            last = name.rpartition(".")[2]
            outputs, inputs = (1, 0) if transposed else (0, 1)
            shape = weight.shape
            by_column = (
                bool(column.fullmatch(last))
                or not row.fullmatch(last)
                and shape[outputs] > shape[inputs]
            )
            by_row = not by_column and (bool(row.fullmatch(last)) or shape[inputs] > shape[outputs])
            # the head: its outputs are the vocabulary
            if shape[outputs] > 8 * shape[inputs] and not column.fullmatch(last):
                by_column = vocabulary
            if (
                by_column
                and plan.shard(f"{name}.weight", outputs, axis)
                and f"{name}.bias" in plan.shapes
            ):
                plan.shard(f"{name}.bias", 0, axis)
            if by_row:
                plan.shard(f"{name}.weight", inputs, axis)
        if vocabulary:
            for name, module in plan.model.named_modules():
                if isinstance(module, nn.Embedding) and f"{name}.weight" in plan.shapes:
                    plan.shard(f"{name}.weight", 0, axis)

    return _named(apply, f"megatron({axis!r})")


def _linears(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, weight, whether the weight is inputs x outputs) of every linear layer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module.weight, False
        elif type(module).__name__ == "Conv1D":  # Hugging Face's GPT-2
            yield name, module.weight, True


def sequence_parallel(axis: str, dim: int = 1) -> Tactic:
    """Split what norms compute along the sequence (dimension `dim`), where tensor parallelism alone
    keeps copies (https://arxiv.org/abs/2205.05198)."""

    def spec_of(plan: Plan) -> SpecOfRank:
        def spec(rank: int) -> list[Entry]:
            entries: list[Entry] = [None] * rank
            if plan.batch:
                entries[0] = plan.batch
            if rank > dim:
                entries[dim] = (axis,)
            return entries

        return spec

    def apply(plan: Plan) -> None:
        for name, module in plan.model.named_modules():
            if isinstance(module, nn.LayerNorm) or "RMSNorm" in type(module).__name__:
                plan.activations[name] = spec_of(plan)

    return _named(apply, f"sequence_parallel({axis!r})")
