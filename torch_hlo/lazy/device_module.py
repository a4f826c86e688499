"""`torch.hlo`: the device's module, with the verbs of `torch.cuda`. There is one device per
process."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from torch_hlo.device import multi_device, runtime
from torch_hlo.lowering.core import TORCH_TO_HLO
from torch_hlo.pytorch.registration import PLACE

from .record import generator, session

Device = torch.device | str | int | None  # None: the current one
# torch.utils.checkpoint looks at this before it saves the state of the generator
_initialized = True

# ---- devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing to do: the device is ready after import."""


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def device_index(device: Device = None) -> int:
    """The index that `device` (None, int, str, torch.device) means. Raises for one that does not
    exist."""
    if device is None:
        return 0
    if isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        if device.type not in PLACE.names:
            raise ValueError(f"Expected an hlo device, but got: {device}")
        index = device.index or 0
    if index != -1 and not multi_device.is_own_index(index):
        raise RuntimeError(multi_device.ORDINAL.format(index))
    return 0


def set_device(device: Device) -> None:
    device_index(device)


set_device_index = set_device_idx = set_device
current_device_index = current_device_idx = current_device


class device(contextlib.nullcontext):
    """Context manager that makes a device current; there is only one."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.idx = device_index(device) if device is not None else -1


class device_of(device):
    def __init__(self, obj: Tensor) -> None:
        super().__init__(0 if PLACE.has(obj) else None)


def get_device_name(device: Device = None) -> str:
    device_index(device)
    return f"hlo ({runtime.backend_name()})"


def get_device_properties(device: Device = None) -> types.SimpleNamespace:
    """Name and memory of the device."""
    major, minor = get_device_capability(device)
    return types.SimpleNamespace(
        name=get_device_name(),
        total_memory=mem_get_info()[1],
        multi_processor_count=os.cpu_count() or 1,
        major=major,
        minor=minor,
    )


def get_device_capability(device: Device = None) -> tuple[int, int]:
    device_index(device)
    return (1, 0)


def accelerator_capability(device: Device = None) -> dict[str, set[torch.dtype]]:
    device_index(device)
    return {"supported_dtypes": set(TORCH_TO_HLO)}


def can_device_access_peer(device: Device, peer: Device) -> bool:
    return device_index(device) == device_index(peer)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Nothing to do."""


def _lazy_call(function: Callable[[], object], **kwargs: object) -> None:
    function()


# ---- order of execution


def synchronize(device: Device = None) -> None:
    """Evaluate everything recorded and wait for it."""
    device_index(device)
    session.engine().synchronize()


def ask(question: str, *given: object) -> bool:
    """What a method of the engine says, for callers in C++, through which no error comes: the next
    step or read raises it."""
    try:
        return bool(getattr(session.engine(), question)(*given))
    except BaseException as error:  # noqa: B036 - see above
        failed = error

        def check(value: Tensor) -> None:
            raise failed

        known = torch.zeros(()).to(PLACE.device)
        session.engine().evaluate([known._storage])
        session.engine().later(known, check)
        return True


def Stream(device: Device = None, *args: object, **kwargs: object) -> torch.Stream:
    """Work on the device runs in order; every stream is the same one."""
    device_index(device)
    return torch.Stream(device=PLACE.device)


def Event(enable_timing: bool = False, *args: object, **kwargs: object) -> torch.Event:
    """A point in the order of execution; with `enable_timing`, `record` waits for the work before
    it."""
    return torch.Event(device=PLACE.device, enable_timing=enable_timing)


current_stream = default_stream = Stream


def set_stream(stream: torch.Stream) -> None:
    """Every stream is the same one."""


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    yield stream


StreamContext = stream


def is_current_stream_capturing() -> bool:
    return False


# ---- random numbers


def default_generator(device: Device = None) -> generator.HloGenerator:
    return generator.default


def manual_seed(seed: int) -> None:
    generator.default.manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    generator.default.seed()


seed_all = seed


def initial_seed() -> int:
    return generator.default.initial_seed()


def get_rng_state(device: Device = None) -> Tensor:
    device_index(device)
    return generator.default.get_state()


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    device_index(device)
    generator.default.set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- memory


def memory_stats(device: Device = None) -> dict[str, int]:
    """Counts of bytes with torch.cuda's names."""
    return {
        "allocated_bytes.all.current": memory_allocated(),
        "allocated_bytes.all.peak": max_memory_allocated(),
        "reserved_bytes.all.current": memory_reserved(),
        "reserved_bytes.all.peak": max_memory_reserved(),
    }


def memory_allocated(device: Device = None) -> int:
    """Bytes of device arrays that are alive."""
    return runtime.memory_stats()["bytes"]


def max_memory_allocated(device: Device = None) -> int:
    return runtime.memory_stats()["peak_bytes"]


def memory_reserved(device: Device = None) -> int:
    """Bytes taken from the system, including pooled free blocks."""
    stats = runtime.memory_stats()
    return stats["bytes"] + stats["cached_bytes"]


def max_memory_reserved(device: Device = None) -> int:
    return max(memory_reserved(), max_memory_allocated())


def reset_peak_memory_stats(device: Device = None) -> None:
    runtime.reset_peak()


reset_accumulated_memory_stats = reset_max_memory_allocated = reset_peak_memory_stats


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes of the memory the device uses."""
    driver = runtime.driver()
    if driver is not None and (found := driver.memory_info()) is not None:
        return found
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


get_memory_info = mem_get_info


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    return runtime.memory_summary()


def empty_cache() -> None:
    """Give pooled free blocks back to the system."""
    runtime.empty_cache()


empty_host_cache = empty_cache


def ipc_collect() -> None:
    """Nothing is shared between processes."""
