"""Python's garbage collector, which looks at all objects again and again while many are made that
stay."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.RLock()  # a finalizer may ask, too
_pauses = 0  # under way, of all threads
_enabled = False  # before the first of them
_wanted = False


def pause() -> None:
    """No garbage collection until `resume`."""
    global _pauses, _enabled
    with _lock:
        if not _pauses:
            _enabled = gc.isenabled()
            gc.disable()
        _pauses += 1


def resume() -> None:
    """The end of a `pause`: after the last one collections go on, if there were any."""
    global _pauses
    with _lock:
        _pauses -= 1
        if not _pauses and _enabled:
            gc.enable()


def settle() -> None:
    """Take what is there for old, as modules are that have just been imported: being so many new
    objects they would bring on a collection of everything, in the middle of the first step."""
    if not gc.get_freeze_count():  # else the user has frozen some, which stay so
        gc.freeze()
        gc.unfreeze()


def want() -> None:
    """Something has left tensors in circles of objects: see `collect_wanted`."""
    global _wanted
    _wanted = True


def collect_wanted() -> None:
    """Free what was left behind, if there may be something. A step would compute, and keep, what
    only such tensors hold, and be another program than without them."""
    global _wanted
    if _wanted:
        _wanted = False
        gc.collect()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No garbage collection in the block: a third of the compiler's time, half of the time of
    importing this package after PyTorch."""
    pause()
    try:
        yield
    finally:
        resume()
