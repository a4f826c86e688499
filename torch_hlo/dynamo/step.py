"""`torch_hlo.compile`: a function whose work on hlo tensors is started with one call.

    @torch_hlo.compile
    def train(x, y):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

It is torch.compile with what a whole training step needs. The first call runs the function as it
is: optimizers make their state, and programs are compiled without waiting for Dynamo. From the
second call on Dynamo traces it, backward pass and optimizer included (pytorch/steps.py), and what
the function reads of Python's variables becomes guards that are looked at in every call. The graph
is recorded once more and then only launched (device_graph.py).

Where Python asks for a value (`.item()`, `if loss.isnan():`, `print`) or does what Dynamo cannot
trace, the function falls into several graphs, and what is between them is run by Python. With
`full_graph=True` that is an error which names the line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_hlo import log, metrics
from torch_hlo.lazy.record import session
from torch_hlo.lowering.core import SERIALS


def compile(fn: Callable | None = None, *, full_graph: bool = False) -> Callable:
    """Decorate `fn`; also usable as `@torch_hlo.compile(full_graph=True)`. Raises RuntimeError in
    the second call if `fn` is not one graph and `full_graph` is set."""
    if fn is None:
        return functools.partial(compile, full_graph=full_graph)
    step = Step(fn, full_graph)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        return step(args, kwargs)

    return call


def _autocasts() -> int:
    """How many autocasts are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Step:
    """A function that is captured, and where it stands."""

    def __init__(self, fn: Callable, full_graph: bool) -> None:
        self.fn = fn
        self.full_graph = full_graph
        self.name = getattr(fn, "__qualname__", repr(fn))
        self.traced: Callable | None = None
        self.direct: Any = None  # pytorch/steps.py: graphs that are reached without Dynamo

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        if self.traced is None:
            return self._first(args, kwargs)
        here = session.current().here
        outer, here.started = here.started, True
        gradients = torch.is_grad_enabled()
        casts = torch.is_autocast_enabled("hlo")
        depth = _autocasts()
        try:
            run = self.direct.find(args) if self.direct is not None and not kwargs else None
            result = self._traced(args, kwargs) if run is None else run(*args)
        except BaseException:  # Dynamo's bytecode does not leave `with torch.no_grad():`
            torch.set_grad_enabled(gradients)
            torch.set_autocast_enabled("hlo", casts)
            # else autocast would keep what it has cast, weights that change later among it
            while _autocasts() > depth:
                torch.autocast_decrement_nesting()
            raise
        finally:
            here.started = outer
        if session.current().pending:
            session.engine().mark_step()
        return result

    def _first(self, args: tuple, kwargs: dict) -> Any:
        """Run the function as it is."""
        before = next(SERIALS)
        result = self.fn(*args, **kwargs)
        if next(SERIALS) > before + 1:
            session.engine().mark_step()
        self.traced = self._later
        return result

    def _later(self, *args: Any, **kwargs: Any) -> Any:
        """Import Dynamo, and call the function through it from now on."""
        from torch_hlo.pytorch import steps

        from . import backend

        self.traced = steps.compiled(self.fn, backend.hlo, self.full_graph, self._why)
        self.direct = steps.Direct.of(self.fn, backend.hlo)
        return self.traced(*args, **kwargs)

    def _traced(self, args: tuple, kwargs: dict) -> Any:
        """Call the function through Dynamo. If it found while tracing, which has no effects, that
        the function raises, the function is called to raise its error."""
        try:
            return self.traced(*args, **kwargs)
        except RuntimeError as error:
            if getattr(error, "gb_type", None) == "Observed exception":
                self.fn(*args, **kwargs)
            raise

    def _why(self, reason: str) -> None:
        text = f"{self.name} is traced again: {reason}"
        metrics.explained(
            metrics.Compile(
                text,
                kind="traced again",
                advice="What the function reads of Python has changed. Keep it the same from call"
                " to call, or pass it as a tensor.",
            )
        )
        log.say(1, text)
