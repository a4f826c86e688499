"""torch_xla.utils and torch_xla.test.test_utils: data, files, progress lines."""

import copy
import functools
import logging
import sys
import tempfile
from datetime import datetime
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_hlo import config
from torch_hlo.lazy.record import HloTensor

from . import hardware

# torch_xla.core.xla_env_vars: their own names
VARIABLES = (
    "CPU_NUM_DEVICES LOCAL_RANK LOCAL_WORLD_SIZE PJRT_DEVICE PJRT_LOCAL_PROCESS_COUNT"
    " PJRT_LOCAL_PROCESS_RANK PJRT_DIST_SERVICE_ADDR PJRT_CPU_ASYNC_CLIENT RANK WORLD_SIZE"
    " ACCELERATOR_TYPE CLOUD_TPU_TASK_ID PJRT_DYNAMIC_PLUGINS PJRT_SELECT_DEFAULT_DEVICE"
    " TPUVM_MODE TPU_ACCELERATOR_TYPE TPU_CHIPS_PER_HOST_BOUNDS TPU_CHIPS_PER_PROCESS_BOUNDS"
    " TPU_HOST_BOUNDS TPU_MESH_CTLER_ADDR TPU_MESH_CTLER_PORT TPU_NUM_DEVICES TPU_PROCESS_ADDRESSES"
    " TPU_PROCESS_BOUNDS TPU_PROCESS_PORT TPU_SKIP_MDS_QUERY TPU_VISIBLE_CHIPS TPU_WORKER_HOSTNAMES"
    " TPU_WORKER_ID WORKER_ID"
).split()
globals().update({name: name for name in VARIABLES})


class SampleGenerator:
    """`data`, `sample_count` times."""

    def __init__(self, data, sample_count):
        self._data, self._sample_count = data, sample_count

    def __iter__(self):
        return iter([self._data] * self._sample_count)

    def __len__(self):
        return self._sample_count


class FnDataGenerator:
    """`count` batches, each with `func` of it."""

    def __init__(self, func, batch_size, gen_tensor, dims=(1,), count=1):
        self._make = lambda: gen_tensor(batch_size, *dims)
        self._func, self._count = func, count

    def __iter__(self):
        batches = (self._make() for _ in range(self._count))
        return ((x, self._func(x)) for x in batches)

    def __len__(self):
        return self._count


class DataWrapper:
    """A structure that says which tensors it has, and is made again from others."""

    def get_tensors(self):
        raise NotImplementedError("The method is missing an implementation")

    def from_tensors(self, tensors):
        raise NotImplementedError("The method is missing an implementation")


class TmpFolder(tempfile.TemporaryDirectory):
    """A folder that goes with this object."""


def deprecated(module, new, old_name=None, extra_msg=""):
    """`new`, which warns at its first call that its name in `module` is another one."""
    text = (
        f"{module.__name__}.{old_name or new.__name__} is deprecated. Use"
        f" {new.__module__}.{new.__name__} instead. {extra_msg or ''}"
    )
    warn = functools.cache(lambda: logging.warning(text))

    @functools.wraps(new)
    def call(*args, **kwargs):
        warn()
        return new(*args, **kwargs)

    return call


def mark_deprecated(new, extra_msg=""):
    """Decorator: calls of the function are calls of `new`, and a warning."""
    return lambda f: deprecated(sys.modules[f.__module__], new, f.__name__, extra_msg)


def eprint(*args, **kwargs):
    print(*args, file=sys.stderr, **kwargs)


def as_list(t):
    return t if isinstance(t, (tuple, list)) else [t]


def getenv_as(name, type, defval=None):
    text = config.variable(name, None)
    if text is None:
        return defval
    return bool(int(text)) if type is bool else type(text)


def check_env_flag(name, default=""):
    text = str(config.variable(name, default))
    return text == "true" or (text.isdigit() and int(text) > 0)


def for_each_instance(value, select_fn, fn):
    """`fn` of each value in nested data that `select_fn` chooses, once."""
    for_each_instance_rewrite(value, select_fn, lambda x: (fn(x), x)[1], False)


def for_each_instance_rewrite(value, select_fn, fn, change=True):
    """Nested data with `fn(x)` in place of each x that `select_fn` chooses; tuples become lists,
    as in PyTorch/XLA."""
    made: dict[int, Any] = {}

    def walk(x):
        if id(x) in made:
            return made[id(x)]
        if select_fn(x):
            made[id(x)] = fn(x)
        elif isinstance(x, DataWrapper):
            made[id(x)] = x.from_tensors([*map(walk, x.get_tensors())])
        elif isinstance(x, dict):
            made[id(x)] = {}
            made[id(x)].update({walk(k): walk(v) for k, v in x.items()})
        elif isinstance(x, set):
            made[id(x)] = {*map(walk, x)}
        elif isinstance(x, (list, tuple)):
            made[id(x)] = []
            made[id(x)].extend(map(walk, x))
        elif hasattr(x, "__dict__") and not isinstance(x, type):
            made[id(x)] = copy.copy(x) if change else x
            found = {k: walk(v) for k, v in vars(x).items()}
            vars(made[id(x)]).update(found if change else {})
        return made.setdefault(id(x), x)

    return walk(value)


def to_cpu(data, convert=True):
    """Nested data with tensors of the device as CPU tensors."""
    if not convert:
        return data
    ours = (HloTensor, DTensor)
    kept = ToXlaTensorArena(lambda ts: [t.cpu() for t in ts], lambda v: isinstance(v, ours))
    return kept.transform(data)


class ToXlaTensorArena:
    """Converts the tensors of nested data that `select_fn` chooses, all at once."""

    def __init__(self, convert_fn, select_fn):
        self._convert, self._select = convert_fn, select_fn

    def transform(self, inputs):
        found: list[Any] = []
        for_each_instance(inputs, self._select, found.append)
        made = {id(x): y for x, y in zip(found, self._convert(found))} if found else {}
        return for_each_instance_rewrite(inputs, self._select, lambda x: made[id(x)])


def load(path):
    """What `save` wrote."""
    return torch.load(path, weights_only=False)


def save(data, file_or_path, master_only=True, global_master=False):
    """torch.save of CPU copies, by the first process alone unless `master_only` is False."""
    if not master_only or hardware.global_ordinal() == 0:
        torch.save(to_cpu(data), file_or_path)


def mp_test(func):
    """A test in a process of its own."""

    def run(*args, **kwargs):
        context = torch.multiprocessing.get_context("fork")
        process = context.Process(target=func, args=args, kwargs=kwargs)
        process.start()
        process.join()
        if process.exitcode:
            raise AssertionError(f"the process ended with {process.exitcode}")
        return process.exitcode

    return run


def now(format="%H:%M:%S"):
    return datetime.now().strftime(format)


def print_training_update(
    device,
    step,
    loss,
    rate,
    global_rate,
    epoch=None,
    summary_writer=None,
):
    """One line of progress."""
    _line(
        "Training", device, epoch,
        f"Step={step} Loss={float(loss):.5f} Rate={rate:.2f} GlobalRate={global_rate:.2f}",
    )  # fmt: skip
    write_to_summary(
        summary_writer,
        dict_to_write={"examples/sec": rate, "average_examples/sec": global_rate},
    )


def print_test_update(device, accuracy, epoch=None, step=None):
    shown = "" if accuracy is None else f"Accuracy={accuracy:.2f}"
    _line("Test", device, epoch, f"Step={step} {shown}")


def _line(what, device, epoch, text):
    where = f"Device={device}/{hardware.global_ordinal()}"
    print(f"| {what} {where} Epoch={epoch} {text} Time={now()}", flush=True)


def write_to_summary(
    summary_writer,
    global_step=None,
    dict_to_write=None,
    write_xla_metrics=False,
):
    """Numbers for TensorBoard."""
    for name, value in (dict_to_write or {}).items() if summary_writer else ():
        summary_writer.add_scalar(name, value, global_step)


def get_summary_writer(logdir):
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=logdir)


def close_summary_writer(summary_writer):
    if summary_writer is not None:
        summary_writer.close()
