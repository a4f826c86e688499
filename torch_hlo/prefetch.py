"""Something ahead of time: a thread makes the next values of a loop while the last one is in use.

for batch in Prefetcher(loader, lambda b: b.to("hlo"), 4): ...
"""

import atexit
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_END = object()


class Prefetcher:
    """`function` of each of `values`, in order, up to `ahead` of them before they are asked for.
    What the thread raises, the loop raises in its place."""

    def __init__(self, values: Iterable[Any], function: Callable[[Any], Any], ahead: int) -> None:
        self._values, self._function = values, function
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="torch_hlo prefetch")
        # C++ that returns to a Python that takes itself apart ends the process
        atexit.register(self.close)
        self._thread.start()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                for value in self._values:
                    if not self._put(self._function(value), None):
                        break
        except BaseException as found:
            error = found
        self._put(_END, error)
        atexit.unregister(self.close)

    def _put(self, value: Any, error: BaseException | None) -> bool:
        """Whether somebody still wants it."""
        while not self._closed.is_set():
            try:
                self._ready.put((value, error), timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def __iter__(self) -> Iterator[Any]:
        while True:
            value, error = self._ready.get()
            if error is not None:
                raise error
            if value is _END:
                return
            yield value

    def close(self) -> None:
        """Stop. What is ready is dropped. Values that never come are not waited for."""
        self._closed.set()
        self._thread.join(10)
