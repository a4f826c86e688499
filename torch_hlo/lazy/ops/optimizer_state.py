"""Optimizers on hlo parameters: which of PyTorch's implementations they use, and what their first
step creates.

PyTorch's default on a device it does not know is the "foreach" implementation: ten recorded ops per
group, with a list of numbers computed in Python from the number of the step, so that no two steps
are the same. Where the user left the choice open, Adam takes the fused implementation instead: one
op. The others that count steps have none and take the capturable one: the count is a tensor, as are
the numbers made from it.

State that the first step creates becomes an input of that step's program: `exp_avg =
torch.zeros_like(p)` is part of the first step only. Recorded as it is, the first step of a training
loop would be a program of its own, compiled for a single run. With the zeros in memory before the
program starts, it is the program of all later steps."""

from weakref import ref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_hlo.lowering.core import HLO_TO_TORCH, RECORDING, TAPE, Out

from ..record import Array, HloTensor, Number, session
from ..record.filled import FILLS

# Optimizers whose step depends on its number -> the option of their groups that keeps the number on
# the device.
IMPLEMENTATIONS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "fused",  # and AdamW, a subclass
    torch.optim.NAdam: "capturable",
    torch.optim.RAdam: "capturable",
    torch.optim.Adamax: "capturable",
    torch.optim.ASGD: "capturable",
    torch.optim.Adafactor: "",  # has no such option
}


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Set the implementation where the user left it open, and keep counts of steps on the
    device."""
    for group in optimizer.param_groups:
        kinds = set(map(type, group["params"]))
        # DTensors beside plain parameters, as tensor parallelism leaves norms: one at a time
        if HloTensor in kinds and len(kinds) > 1 and group.get("foreach", 0) is None:
            group["foreach"] = False
    option = next((o for kind, o in IMPLEMENTATIONS.items() if isinstance(optimizer, kind)), None)
    if option is None:
        return
    for group in optimizer.param_groups:
        parameters = group["params"]
        if (
            not parameters
            or group.get("fused")
            or group.get("capturable")
            or group.get("differentiable")
            or not all(type(p) is HloTensor for p in parameters)
        ):
            continue
        if option in group:
            # Where the user chose an implementation, that one counts on the device; complex numbers
            # are not fused.
            left_open = group.get("foreach") is None and group.get("fused") is None
            group[
                (
                    option
                    if left_open and all(p.is_floating_point() for p in parameters)
                    else "capturable"
                )
            ] = True
        for p in parameters:  # state from a checkpoint, or from before the model moved
            for name in _COUNTS & optimizer.state.get(p, {}).keys():
                optimizer.state[p][name] = torch.as_tensor(
                    optimizer.state[p][name], dtype=torch.float32
                ).to(p.device)


# state that PyTorch keeps on the CPU unless an option says otherwise
_COUNTS = {"step", "mu_product", "eta", "mu"}


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    with RECORDING:  # another thread may be cutting the graph
        _give_values(optimizer)


def _give_values(optimizer: torch.optim.Optimizer) -> None:
    sizes = session.current().state_sizes
    begun = session.current().filled
    if not begun or sizes.get(optimizer) == len(optimizer.state):
        return
    sizes[optimizer] = len(optimizer.state)
    states = {
        id(t._storage)
        for s in optimizer.state.values()
        if isinstance(s, dict)
        for t in s.values()
        if type(t) is HloTensor
    }
    for storage, out in ((owner(), out) for owner, out in begun):
        if (
            storage is not None
            and id(storage) in states
            and storage.value is not out
            and out.array is None
        ):
            number = torch.full(
                (),
                _number(out),
                dtype=HLO_TO_TORCH[storage.shape.dtype],
                device="cpu",
            )
            out.array = Array(
                storage.shape,
                session.engine().upload(number.expand(storage.shape.dims)),
            )
            out.array.owners += (ref(storage),)
            TAPE.exact = False


def _number(out: Out) -> float:
    where = FILLS[out.node.target]
    value = out.node.args[where[0]] if isinstance(where, list) else where
    return value.value if isinstance(value, Number) else value


def register() -> None:
    """Watch every optimizer."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
