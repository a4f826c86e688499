"""What runs at the end of a step: functions that look at its tensors."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch_hlo import config


class AsyncClosureHandler:
    """Runs functions one after another on a thread. What one raises is raised by the next
    `run`."""

    def __init__(self, max_queue_size=100):
        size = int(config.variable("XLA_MAX_ASYNC_QUEUE", max_queue_size))
        self._closure_queue: queue.Queue[Callable[[], Any]] = queue.Queue(size)
        self._closure_exception: queue.Queue[Exception] = queue.Queue()
        self._closure_event_loop: threading.Thread | None = None
        self._closure_event_loop_finished = threading.Event()
        self._closure_lock = threading.Lock()

    def run(self, closure):
        with self._closure_lock:
            self._closure_queue.put(closure)
            thread = self._closure_event_loop
            if thread is not None and thread.is_alive():
                return
            if not self._closure_exception.empty():
                raise RuntimeError(
                    "Cannot run asynchronous closure due to previously raised exception"
                ) from self._closure_exception.get()
            self.start_event_loop()

    def run_all(self, closures):
        for closure in closures:
            self.run(closure)

    def start_event_loop(self):
        self._closure_event_loop_finished.clear()
        # not a daemon: what was asked for is done before the process ends
        self._closure_event_loop = threading.Thread(target=self._work)
        self._closure_event_loop.start()

    def _work(self):
        while True:
            try:
                self._closure_queue.get(timeout=3)()
                self._closure_queue.task_done()
            except queue.Empty:
                with self._closure_lock:
                    if self._closure_queue.empty():
                        self._closure_event_loop_finished.set()
                        self._closure_event_loop = None
                        return
            except Exception as error:
                self._closure_exception.put(error)
                return


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
