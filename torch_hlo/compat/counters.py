"""torch_xla.debug.metrics: our counters, with times in nanoseconds as PyTorch/XLA has them."""

from __future__ import annotations

from torch_hlo import metrics


def metric_data(name):
    """(samples, total, [(when, value), …]); times in nanoseconds."""
    found = metrics.metric_data(name)
    if found is None:
        return None
    count, total, samples = found
    unit = 1e9 if name.endswith(("Time", "Tracing", "Wait")) else 1
    return count, total * unit, [(when, value * unit) for when, value in samples]
