"""What evaluates recorded graphs: `lazy.step`, or a test oracle put in its place with `use`.

An engine has
* `mark_step(wait=False)`: evaluate every pending storage (in the background unless `wait`);
* `materialize(tensors) -> list[torch.Tensor]`: fresh contiguous CPU copies of the logical values of hlo tensors;
* `upload(cpu_tensor) -> device value`: copies a contiguous CPU tensor to the device;
* `synchronize()`: wait for everything under way;
* `later(tensor, check)`, optional: call `check(value on the CPU)` once the tensor has been computed, without waiting for it now;
* `item(tensor)`, optional: what `tensor.item()` returns; `items(tensors)`, optional: those of several, at once.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator

_current = None


class _Here(threading.local):
    """What a thread uses for itself."""

    engine = None


_here = _Here()


def current():
    """The engine in use."""
    global _current
    if _here.engine is not None:
        return _here.engine
    if _current is None:
        _current = importlib.import_module("torch_hlo.lazy.step")
    return _current


@contextlib.contextmanager
def use(engine, everywhere: bool = True) -> Iterator[None]:
    """Evaluate with `engine` within a `with` block, in all threads or in this one. Tensors made inside must not be used outside."""
    global _current
    before = _current if everywhere else _here.engine
    if everywhere:
        _current = engine
    else:
        _here.engine = engine
    try:
        yield
    finally:
        if everywhere:
            _current = before
        else:
            _here.engine = before
