"""The package torch_xla itself."""

import contextlib
import itertools

import torch_hlo
from torch_hlo import debug, metrics

from . import xla_model
from .experimental_names import eager_mode_context
from .xla_model import sync

__version__ = torch_hlo.__version__


device, real_devices = xla_model.xla_device, xla_model.xla_real_devices
manual_seed = xla_model.set_rng_state


def devices():
    return [device()]


def device_count():
    return 1


@contextlib.contextmanager
def _whole(full_graph, limit, graphs):
    sync()
    before = metrics.samples("TensorsGraphSize")  # of each graph, also for a value that is read
    with eager_mode_context(False):
        try:
            yield
            if limit is not None:
                _count(graphs, limit)
        finally:
            cut = metrics.samples("TensorsGraphSize") != before
            sync()
    if full_graph and cut:
        raise RuntimeError(
            "Unexpected execution happens inside the compiled function, exiting: a value was needed"
            " there; TORCH_HLO_LOG=1 says where"
        )


def _count(graphs, limit):
    """Add what was recorded to the graphs of a function. Raises RuntimeError beyond the limit."""
    try:
        graph = str(debug.module()).splitlines()
    except ValueError:  # nothing is recorded
        graph = []
    if graph in graphs:
        return
    if len(graphs) >= limit:
        pairs = itertools.zip_longest(graph, *graphs[-1:], fillvalue="nothing")
        different = ["\nExpected: ".join(pair) for pair in pairs if len({*pair}) > 1]
        raise RuntimeError(
            f"Maximum number of different graphs allowed per function exceeded: {limit}\n"
            f"Got: {different[0]}"
        )
    graphs.append(graph)


def compile(
    f=None,
    full_graph=False,
    name=None,
    max_different_graphs=None,
    custom_compile_options=None,
):
    """A block or a function whose work is a step of its own. (`torch_hlo.compile` captures it.)
    Raises RuntimeError when a function has recorded more than `max_different_graphs`."""
    if custom_compile_options:
        set_custom_compile_options(custom_compile_options)
    graphs = getattr(f, "__dict__", {}).setdefault("_torch_xla_graphs", [])
    block = _whole(bool(full_graph), max_different_graphs, graphs)
    return block if f is None else block(f)


step = compile


def set_custom_compile_options(options):
    """Raises NotImplementedError unless empty."""
    if options:
        raise NotImplementedError(
            f"options of XLA's compiler ({', '.join(options)}): torch_hlo.config has ours"
        )
