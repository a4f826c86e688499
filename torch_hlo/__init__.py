"""torch_hlo: PyTorch on a lazy "hlo" device with its own compiler.

import torch, torch_hlo
model.to("hlo"); loss = model(x.to("hlo")); loss.backward(); optimizer.step()
torch_hlo.mark_step()        # what was recorded becomes one compiled program
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_hlo import collector, config, metrics
from torch_hlo.device.cpu import trim

if TYPE_CHECKING:
    from torch_hlo.hlo.ir import Module

__version__ = "0.1.0"


def _complete(torch: ModuleType, name: str) -> bool:
    """PyTorch has come after JAX: run this file again."""
    importlib.reload(sys.modules[__name__])
    return True


def _recorded() -> contextlib.AbstractContextManager[Any]:
    """For PyTorch's profiler; ours takes long to import."""
    from torch_hlo.profiler import recorded

    return recorded.record_if_used()


if "torch" not in sys.modules and getattr(sys.modules.get("torch_hlo_jax"), "loading", False):
    # JAX wants the compiler alone: PyTorch, and the device with it, may come later
    from torch_hlo.frameworks import hook

    hook.install((hook.Row("torch", "Tensor", _complete),))
else:
    import torch

    trim.release_code()  # PyTorch's, before LLVM comes
    with collector.paused():
        from torch_hlo.buckets import pad_to_bucket
        from torch_hlo.frameworks import table
        from torch_hlo.lazy import install
        from torch_hlo.lazy.run import executor
        from torch_hlo.pytorch import patches
        from torch_hlo.pytorch.registration import PLACE

        install.register()
        table.register()
        patches.follow_profiler(_recorded)
    executor.prepare_compiler()
    if config.get("NAN") or config.get("DUMP"):
        torch.autograd.set_detect_anomaly(True, check_nan=False)
    if config.get("DUMP"):
        from torch_hlo.lazy.record import session
        from torch_hlo.profiler.timeline import Modules

        session.current().modules = Modules()
    if config.get("PROFILE"):
        from torch_hlo import profiler

        profiler.report_at_exit()


def device(index: int | None = None) -> torch.device:
    """The hlo device. Raises RuntimeError for an index that does not exist."""
    from torch_hlo.lazy import device_module

    return torch.device(PLACE.name, device_module.device_index(index))


def is_available() -> bool:
    """True: the device is this package's own."""
    return True


def mark_step(wait: bool = False) -> None:
    """Compile (if not seen before) and run everything recorded; in the background unless `wait`."""
    from torch_hlo.lazy.record import session

    session.engine().mark_step(wait)


def sync(tensors: Sequence[torch.Tensor] | None = None) -> None:
    """`mark_step` and wait: for everything, or until `tensors` are there."""
    from torch_hlo.lazy.record import session

    session.engine().sync(tensors)


@contextlib.contextmanager
def step() -> Iterator[None]:
    """A training step: `with torch_hlo.step(): ...` marks it at the end of the block (not when the
    block raises)."""
    yield
    mark_step()


def eager_mode(on: bool = True) -> None:
    """Run every op when it is called, as a debugger wants it (True), or record again (False)."""
    from torch_hlo.lazy.aten import dispatch

    dispatch.set_eager(on)


def compile(fn: Callable[..., Any] | None = None, *, full_graph: bool = False) -> Any:
    """Decorator, with or without arguments: the function's work on hlo tensors is captured, and
    later calls start its program.

    `full_graph`: what one program cannot hold is an error (RuntimeError), and does not run in
    parts. See dynamo/step.py."""
    from torch_hlo.dynamo import step

    return step.compile(fn, full_graph=full_graph)


def cond(
    predicate: torch.Tensor,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    """`true_fn(*operands)` or `false_fn(*operands)`, chosen when the program runs; `predicate` has
    one element. Both must give tensors of the same shapes and dtypes. See lazy/ops/control.py."""
    from torch_hlo.lazy.ops import control

    return control.cond(predicate, true_fn, false_fn, operands)


def while_loop(
    cond_fn: Callable[..., torch.Tensor],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
) -> Any:
    """`carried = body_fn(*carried)` while `cond_fn(*carried)`, as one loop of the program: shapes
    and dtypes of `carried` stay. See lazy/ops/control.py."""
    from torch_hlo.lazy.ops import control

    return control.while_loop(cond_fn, body_fn, carried)


def scan(fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> tuple[Any, Any]:
    """`carry, y = fn(carry, x)` along dimension 0 of `xs`, as one loop of the program; returns the
    last carry and the ys, stacked along dimension 0. Gradients compute `fn` again. See
    lazy/ops/control.py."""
    from torch_hlo.lazy.ops import scan_gradient

    return scan_gradient.scan(fn, init, xs)


def manual_seed(seed: int) -> None:
    """Seed the device's default generator. `torch.manual_seed` does this too."""
    from torch_hlo.lazy import device_module

    device_module.manual_seed(seed)


def from_dlpack(x: Any) -> torch.Tensor:
    """A tensor of the hlo device over the memory of another library's array, not copied. See
    lazy/record/exchange.py."""
    from torch_hlo.lazy.record import exchange

    return exchange.from_dlpack(x)


def parse_text(text: str | bytes) -> Module:
    """HLO or StableHLO text, or the bytes of an `.mlirbc` file -> `hlo.ir.instruction.Module`.
    Raises a ParseError with the line, or the offset."""
    from torch_hlo.hlo import read

    return read.parse_text(text)


def run_text(text: str | bytes, *inputs: Any, devices: int | None = None) -> Any:
    """Compile and run HLO text, StableHLO text or bytecode on tensors or arrays, on one device or
    on `devices`; returns its results."""
    from torch_hlo.tools import text_api

    return text_api.run_text(text, *inputs, devices=devices)


def partition_text(text: str, update_axes: Sequence[str] = ()) -> str:
    """The HLO text of the program that each device runs, from HLO or StableHLO text with sharding
    annotations. `update_axes`: mesh axes over which updates of weights are split."""
    from torch_hlo.tools import text_api

    return text_api.partition_text(text, update_axes)


def __getattr__(name: str) -> Any:
    """Submodules that are imported when they are first used."""
    if name in ("aot", "debug", "distributed", "export"):
        return importlib.import_module(f"torch_hlo.{name}")
    if name == "tf":
        return importlib.import_module("torch_hlo.frameworks.tensorflow")
    if name == "pad_to_bucket":  # where JAX came first
        importlib.import_module("torch")
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "compile", "cond", "config", "device", "eager_mode", "from_dlpack", "is_available",
    "manual_seed", "mark_step", "metrics", "pad_to_bucket", "parse_text", "partition_text",
    "run_text", "scan", "step", "sync", "while_loop",
]  # fmt: skip
