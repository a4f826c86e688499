"""What evaluates recorded graphs: the interface. The device's own is run/device_engine.py; others
stand in for it while a function is captured, traced or simulated, and in tests (`session.use`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Engine(ABC):
    """Tensors are hlo tensors; what an engine does not say for itself follows from `materialize`
    and `mark_step`."""

    # whether a graph is recorded to be started again, on other data
    captures = False

    @abstractmethod
    def upload(self, tensor: Tensor) -> Any:
        """A device value: a copy of a contiguous tensor of the CPU."""

    @abstractmethod
    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fresh contiguous copies on the CPU of the tensors' logical values."""

    @abstractmethod
    def mark_step(self, wait: bool = False) -> None:
        """Evaluate every pending storage, in the background unless `wait`."""

    def sync(self, tensors: Sequence[Tensor] | None = None) -> None:
        """`mark_step`, and wait: for all of it, or until `tensors` are there."""
        self.mark_step(wait=True)

    def make_room(self) -> None:
        """Evaluate, because much is recorded."""
        self.mark_step()

    def start_collectives(self) -> None:  # noqa: B027 - others than the device's record none
        """Start recorded collectives, before processes wait for each other."""

    def synchronize(self) -> None:
        """Wait for everything under way."""
        self.sync()

    def has_ended(self, since: int) -> bool:
        """Whether all has run that was recorded before that time (of perf_counter_ns); starts
        it."""
        self.synchronize()
        return True

    def base(self) -> Engine:
        """The engine that computes, below those that only watch."""
        return self

    def evaluate(self, storages: Sequence[Any]) -> None:
        """Run what these storages need, and overwrite nothing."""
        self.mark_step()

    def run_again(self, *launch: Any) -> bool:
        """Launch a graph that ran before (see run/device_engine.py); False, and nothing done, where
        it has to be recorded."""
        return False

    def lease(self, storage: Any) -> Any:
        """The storage's value in memory that no step overwrites until the lease is closed."""
        raise BufferError(f"{type(self).__name__} has no memory that others could read")

    def pending_step(self) -> tuple[Any, list]:
        """The module that `mark_step` would run now, and the arrays that it takes."""
        raise ValueError(f"{type(self).__name__} makes no programs")

    def clear_cache(self) -> None:  # noqa: B027 - others than the device's have none
        """Forget what was compiled."""

    # ---- numbers that Python asks for

    def number(self, tensor: Tensor) -> Any:
        """The value of a tensor with one element, for code that computes with it."""
        return self.materialize([tensor])[0].item()

    def values(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, for an error that ends what is recorded."""
        return self.materialize([tensor])[0]

    def symbolic(self, value: torch.SymFloat) -> Any:
        """The lifted number of a float that is followed. Raises TypeError where none is."""
        raise TypeError(f"the hlo device cannot record the symbolic value {value}")

    def stepping(self, step: Any) -> None:  # noqa: B027 - others do not record graphs
        """An optimizer steps as a call in a graph (dynamo/optimizers.py)."""

    def releasing(self, parameters: Sequence[Tensor]) -> None:  # noqa: B027
        """A graph drops the gradients of these (dynamo/released.py)."""

    def looks(self, reason: str) -> None:  # noqa: B027 - others do not record graphs
        """What is recorded depends on data: `reason`."""

    def later(self, tensor: Tensor, check: Callable[[Tensor], None]) -> None:
        """Call `check` with the value on the CPU, now or once it has been computed."""
        check(self.materialize([tensor])[0])


class Watcher(Engine):
    """An engine that stands in front of another, which does what the watcher does not."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def base(self) -> Engine:
        return self.inner.base()

    def upload(self, tensor: Tensor) -> Any:
        return self.inner.upload(tensor)

    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.inner.materialize(tensors)

    def mark_step(self, wait: bool = False) -> None:
        self.inner.mark_step(wait)

    def sync(self, tensors: Sequence[Tensor] | None = None) -> None:
        self.inner.sync(tensors)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def evaluate(self, storages: Sequence[Any]) -> None:
        self.inner.evaluate(storages)

    def run_again(self, *launch: Any) -> bool:
        return self.inner.run_again(*launch)

    def lease(self, storage: Any) -> Any:
        return self.inner.lease(storage)

    def clear_cache(self) -> None:
        self.inner.clear_cache()

    def later(self, tensor: Tensor, check: Callable[[Tensor], None]) -> None:
        self.inner.later(tensor, check)

    def looks(self, reason: str) -> None:
        self.inner.looks(reason)
