"""What evaluates recorded graphs: `lazy.step`, or a test oracle put in its place with `use`.

An engine has
* `mark_step(wait=False)`: evaluate every pending storage (in the background unless `wait`);
* `materialize(tensors) -> list[torch.Tensor]`: fresh contiguous CPU copies of the logical values of hlo tensors;
* `upload(cpu_tensor) -> device value`: copies a contiguous CPU tensor to the device;
* `synchronize()`: wait for everything under way;
* `later(tensor, check)`, optional: call `check(value on the CPU)` once the tensor has been computed, without waiting for it now;
* `item(tensor)`, optional: what `tensor.item()` returns.
"""
from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

_current = None


def current():
    """The engine in use."""
    global _current
    if _current is None:
        _current = importlib.import_module("torch_hlo.lazy.step")
    return _current


@contextlib.contextmanager
def use(engine) -> Iterator[None]:
    """Evaluate with `engine` within a `with` block. Tensors made inside must not be used outside."""
    global _current
    before, _current = _current, engine
    try:
        yield
    finally:
        _current = before
