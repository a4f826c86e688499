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


class Allowance:
    """Lets Python's collector overlook the objects of recorded operations. They are many, all
    alive, and gone with their step: counted as young ones, they would have everything that there
    is looked at every few dozen steps, which takes as long as recording several."""

    OBJECTS = 10  # of an operation, with its tensors

    def __init__(self) -> None:
        self.young = self.set = 0  # the threshold that others have chosen, and what it is now

    def step(self, operations: int) -> None:
        """A step of so many operations has been cut. Collects, as Python would have, what else is
        young; of steps, this one and what is recorded beside it are alive."""
        threshold, *older = gc.get_threshold()
        if threshold != self.set:
            self.young = threshold
        if not self.young:
            return
        own = self.OBJECTS * operations
        if gc.get_count()[0] > self.young + own:
            gc.set_threshold(self.young, *older)
            Allowance()  # the next object to be made has Python look
        self.set = self.young + 2 * own
        if self.set != gc.get_threshold()[0]:
            gc.set_threshold(self.set, *older)
