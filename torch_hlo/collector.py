"""Python's garbage collector, which looks at all objects again and again while many are made that stay."""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No garbage collection in the block: a third of the compiler's time, half of the time of importing this package after PyTorch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
