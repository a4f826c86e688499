"""What a program runs in: helpers, Python state, a small module with its optimizer."""

from __future__ import annotations

import copy
import functools
import io
import threading
from typing import Any

import torch

import torch_hlo

# numbers on a grid of eighths: sums and products of few of them are exact in every dtype
GRID = 8
SEEDING = threading.Lock()  # threads share PyTorch's generator


def values(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, odd: bool = False
) -> torch.Tensor:
    """A CPU tensor of small numbers on a grid. `odd`: also infinities, NaN and -0.0."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-3 * GRID, 3 * GRID + 1, shape, generator=generator)
    if dtype == torch.bool:
        return whole > 0
    if not dtype.is_floating_point and not dtype.is_complex:
        whole = whole // (GRID // 2)
        return (whole if dtype.is_signed else whole.abs()).to(dtype)
    result = (whole / GRID).to(dtype)
    if dtype.is_complex:
        result = result + 1j * (result.real.flip(0) if shape else result.real)
    elif odd:
        kinds = torch.randint(0, 12, shape, generator=generator)
        for kind, special in enumerate((torch.inf, -torch.inf, torch.nan, -0.0)):
            result[kinds == kind] = special
    return result.to(dtype)


class Inner:
    """Nested attributes of the state."""

    def __init__(self, device: str) -> None:
        self.value = torch.ones(2, 3, device=device)
        self.scale = 2.0


class State:
    """Python's side of a program: counters, containers, attributes of attributes."""

    def __init__(self, device: str) -> None:
        self.count = 0
        self.table: dict[str, Any] = {}
        self.history: list[Any] = []
        self.total = torch.zeros((), device=device)
        self.inner = Inner(device)
        self.weights = [1.0, 2.0]
        self.names = {"a"}
        self.mode, self.ema, self.pair = "train", 1.0, ()
        self.act = torch.relu


@functools.cache
def _network(kind: int) -> torch.nn.Module:
    with SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(kind)
        nn = torch.nn
        last = [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Tanh(), nn.Sigmoid()][kind % 4]
        return nn.Sequential(nn.Linear(3, 4), last, nn.Linear(4, 2))


class Module:
    """A small network with an optimizer, made when it is first used."""

    def __init__(self, device: str, kind: int) -> None:
        self.device, self.kind = device, kind

    def __getattr__(self, name: str) -> Any:
        if name not in ("net", "optimizer"):
            raise AttributeError(name)
        self.net = copy.deepcopy(_network(self.kind)).to(self.device)
        self.restart()
        return self.__dict__[name]

    def restart(self) -> None:
        optimizers = torch.optim
        kinds = [
            lambda p: optimizers.SGD(p, lr=0.125),
            lambda p: optimizers.SGD(p, lr=0.125, momentum=0.5, weight_decay=0.25),
            lambda p: optimizers.Adam(p, lr=0.125, eps=0.1),
            lambda p: optimizers.AdamW(p, lr=0.125, eps=0.1, amsgrad=True),
            lambda p: optimizers.RMSprop(p, lr=0.125, eps=0.1),
        ]
        self.optimizer = kinds[self.kind % 5](self.net.parameters())

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1)[:6].float()
        rows = torch.nn.functional.pad(rows, (0, 6 - rows.numel())).reshape(2, 3)
        if any(group.get("amsgrad") for group in self.optimizer.param_groups):
            rows = rows.nan_to_num(1).clamp(
                -99, 99
            )  # the CPU's kernels differ in the maximum of NaN
        return self.net(rows).square().mean()

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()

    def rates(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def load(self, saved: dict) -> None:
        self.net.load_state_dict(saved)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def __deepcopy__(self, memo: dict) -> Module:
        new = Module(self.device, self.kind)
        new.net = copy.deepcopy(self.net, memo)
        new.restart()
        return new


BUMP = """def bump(tensor, by=2.0):
    return tensor * by + gain"""


def new_scope(device: str, kind: int) -> dict[str, Any]:
    """The global variables of a program that runs on `device`."""

    def make(seed: int, shape: tuple[int, ...], dtype: torch.dtype, odd: bool = False):
        return values(seed, shape, dtype, odd).to(device)

    def ints(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    def indices(like: torch.Tensor, dim: int) -> torch.Tensor:
        """A different index for every element along `dim`, in the shape of `like`."""
        line = torch.arange(like.shape[dim] if like.dim() else 1, device=device).flip(0)
        if not like.dim():
            return line[0]
        shape = [1] * like.dim()
        shape[dim] = -1
        return line.reshape(shape).expand(like.shape)

    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    def pickled(tensor: torch.Tensor) -> torch.Tensor:
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        return torch.load(file)

    def num(seed: int) -> float:
        """A number, often that of the next seed."""
        return (2, 0.5, -1, 3.0, 1.5, 0, -0.25, 7)[seed // 3 % 8]

    state = type("State", (State,), {"kind": 2.0})(device)

    def closure(tensor: torch.Tensor) -> torch.Tensor:
        state.count += 1
        return tensor + state.count

    mark = torch_hlo.mark_step if device == "hlo" else lambda: None
    scope = {
        "torch": torch, "copy": copy, "dev": device, "log": [], "state": state, "make": make,
        "ints": ints, "indices": indices, "empty": empty, "pickled": pickled, "closure": closure,
        "mark": mark, "module": Module(device, kind), "num": num, "gain": 2.0,
    }  # fmt: skip
    exec(BUMP, scope)
    return scope


class _Found(dict):
    """What was found, by name. `gradients`: those of tensors, too."""

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self[name] = value
            if self.gradients and (value.requires_grad and value.is_leaf or value.retains_grad):
                if value.grad is not None:
                    self[name + ".grad"] = value.grad
        elif isinstance(value, dict):
            for key, entry in value.items():
                self.add(f"{name}[{key!r}]", entry)
        elif isinstance(value, (list, tuple)):
            self[name + ".length"] = len(value)
            for i, entry in enumerate(value):
                self.add(f"{name}[{i}]", entry)
        elif isinstance(value, (bool, int, float, complex, str, type(None))):
            self[name] = value


def found(scope: dict[str, Any], gradients: bool = True) -> dict[str, Any]:
    """All that a program left, by name: tensors, their gradients, numbers, what was logged."""
    result = _Found(gradients)
    for name, value in scope.items():
        if name[0] in "vn" and name[1:].isdigit():
            result.add(name, value)
    state = scope["state"]
    for name, value in (("log", scope["log"]), ("state", vars(state) | vars(state.inner))):
        result.add(name, value)
    module = scope["module"]
    if "net" in vars(module):
        result.add("net", module.net.state_dict())
        # the device chooses other implementations ("fused") than the CPU
        result.add("optimizer", module.optimizer.state_dict()["state"])
    return result
