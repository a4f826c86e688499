"""torch_xla.debug: named blocks in torch.profiler's traces, and our counters with times in
nanoseconds, as PyTorch/XLA has them."""

import atexit
import contextlib
import os
import threading
import time
from typing import Any

import torch
import torch.profiler

from torch_hlo import metrics

from . import closures, xla_model


class Trace(torch.profiler.record_function):
    """A named block."""

    def __init__(self, name, **kwargs):
        super().__init__(name)


class StepTrace(Trace):
    """A named block that is a step: what it recorded runs at its end."""

    def __exit__(self, *error):
        xla_model.sync()
        super().__exit__(*error)


@contextlib.contextmanager
def trace_me(scope):
    """A block, or decorator: calls are named blocks."""
    with Trace(scope):
        yield


class _Running:
    lock = threading.Lock()
    profile: Any = None
    folder = ""


def start_trace(log_dir):
    """Trace until `stop_trace`. Raises RuntimeError if that is under way."""
    with _Running.lock:
        if _Running.profile is not None:
            raise RuntimeError(
                "Profile has already been started. Only one profile may be run at a time."
            )
        _Running.folder = str(log_dir)
        _Running.profile = torch.profiler.profile()
        _Running.profile.start()


def stop_trace():
    """Write the trace to the folder, as a file that Chrome and TensorBoard read."""
    with _Running.lock:
        if _Running.profile is None:
            raise RuntimeError("No profile started")
        _Running.profile.stop()
        os.makedirs(_Running.folder, exist_ok=True)
        name = f"{os.getpid()}.pt.trace.json"
        _Running.profile.export_chrome_trace(os.path.join(_Running.folder, name))
        _Running.profile = None


def start_server(port, only_on_master=True):
    """Nothing listens: traces are asked for in the process, with `start_trace`."""
    if not 0 < port < 65536:
        raise RuntimeError(f"port {port} is invalid")


def trace_detached(service_addr, logdir, duration_ms=1000, **options):
    """Trace until a step ends after `duration_ms`, or the process does."""
    start_trace(logdir)
    end = time.monotonic() + duration_ms / 1000

    def look():
        if time.monotonic() < end:
            closures.add_step_closure(look)
        else:
            atexit.unregister(stop_trace)
            stop_trace()

    atexit.register(stop_trace)
    look()


def metric_data(name):
    """(samples, total, [(when, value), …]); times in nanoseconds."""
    found = metrics.metric_data(name)
    if found is None:
        return None
    count, total, samples = found
    unit = 1e9 if name.endswith(("Time", "Tracing", "Wait")) else 1
    return count, total * unit, [(when, value * unit) for when, value in samples]
