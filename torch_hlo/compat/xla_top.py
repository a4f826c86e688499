"""The package torch_xla itself."""

import contextlib

import torch_hlo
from torch_hlo import metrics

from . import xla_model
from .experimental_names import eager_mode_context
from .xla_model import sync

__version__ = torch_hlo.__version__


def device(index=None):
    """The device, "xla:0"."""
    return xla_model.xla_device(index)


def devices():
    return [device()]


def real_devices():
    return xla_model.xla_real_devices()


def device_count():
    return 1


def manual_seed(seed, device=None):
    xla_model.set_rng_state(seed)


@contextlib.contextmanager
def _whole(full_graph):
    sync()
    before = metrics.counter_value("MarkStep")
    with eager_mode_context(False):
        try:
            yield
        finally:
            cut = metrics.counter_value("MarkStep") != before
            sync()
    if full_graph and cut:
        raise RuntimeError(
            "Unexpected execution happens inside the compiled function, exiting: a value was needed"
            " there; TORCH_HLO_LOG=1 says where"
        )


def compile(
    f=None,
    full_graph=False,
    name=None,
    max_different_graphs=None,
    custom_compile_options=None,
):
    """A block or a function whose work is a step of its own. (`torch_hlo.compile` captures it.)"""
    if max_different_graphs is not None:
        raise NotImplementedError(
            "torch_xla.compile(max_different_graphs=): count with metrics.counter_value"
            '("UncachedCompile")'
        )
    if custom_compile_options:
        set_custom_compile_options(custom_compile_options)
    block = _whole(bool(full_graph))
    return block if f is None else block(f)


def step():
    return compile()


def set_custom_compile_options(options):
    """Raises NotImplementedError unless empty."""
    if options:
        raise NotImplementedError(
            f"options of XLA's compiler ({', '.join(options)}): torch_hlo.config has ours"
        )
