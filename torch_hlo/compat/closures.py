"""What runs at the end of a step: functions that look at its tensors."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch_hlo import config


class AsyncClosureHandler:
    """Runs functions one after another on a thread; at most `max_queue_size` wait. What one raises
    is raised by the next `run`, and those behind it do not run."""

    def __init__(self, max_queue_size=100):
        size = int(config.variable("XLA_MAX_ASYNC_QUEUE", max_queue_size))
        # its thread ends what was asked for before the process does
        self._thread, self._free = ThreadPoolExecutor(1), threading.Semaphore(size)
        self._raised: Exception | None = None

    def run(self, closure):
        if self._raised:
            raised, self._raised = self._raised, None
            raise RuntimeError(
                "Cannot run asynchronous closure due to previously raised exception"
            ) from raised
        self._free.acquire()
        self._thread.submit(self._run, closure)

    def run_all(self, closures):
        for closure in closures:
            self.run(closure)

    def _run(self, closure):
        try:
            if not self._raised:
                closure()
        except Exception as error:
            self._raised = error
        finally:
            self._free.release()


def on_ready_callback(tensor, callback):
    """Call `callback(tensor)` on another thread when the tensor is computed."""

    def wait():
        tensor.cpu()
        callback(tensor)

    threading.Thread(target=wait).start()


def on_ready_event(tensor):
    """An event that is set when the tensor is computed."""
    ready = threading.Event()
    on_ready_callback(tensor, lambda _: ready.set())
    return ready


class _Step:
    """Functions that wait for the end of the step."""

    now: list[Callable[[], Any]] = []
    later: list[Callable[[], Any]] = []
    handler: AsyncClosureHandler | None = None


def add_step_closure(closure, args=(), run_async=False):
    """Call `closure(*args)` at the end of the step; on another thread if `run_async`."""
    (_Step.later if run_async else _Step.now).append(lambda: closure(*args))


def run_step_closures():
    """The step has ended."""
    now, later = _Step.now, _Step.later
    _Step.now, _Step.later = [], []
    if later:
        _Step.handler = _Step.handler or AsyncClosureHandler()
        _Step.handler.run_all(later)
    for closure in now:
        closure()
