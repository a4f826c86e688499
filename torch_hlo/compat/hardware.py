"""torch_xla.runtime: which devices there are, who of several processes this is, SPMD."""

from torch_hlo import config
from torch_hlo.device import multi_device

from . import spawning


class _Mode:
    kind = None


def device_type():
    """ "CPU", as PyTorch/XLA spells it; PJRT_DEVICE wins."""
    return _Mode.kind or str(config.variable("PJRT_DEVICE", "CPU")).split("_")[0]


def set_device_type(pjrt_device):
    """Accepts the kind that there is."""
    if pjrt_device.split("_")[0] != "CPU":
        raise NotImplementedError(
            f"set_device_type({pjrt_device!r}): the device is chosen by TORCH_HLO_DEVICE"
        )
    _Mode.kind = "CPU"


def use_spmd(auto=False):
    """Tensors may be sharded over all devices. (They may without; world_size becomes 1.)"""
    if auto:
        raise NotImplementedError(
            "use_spmd(auto=True): choose a plan of torch_hlo.distributed with compare()"
        )
    config.suggest("XLA_USE_SPMD", "1")


def is_spmd():
    return config.variable("XLA_USE_SPMD", "0") in ("1", "true")


def world_size():
    """Processes that work together; 1 under SPMD."""
    return 1 if is_spmd() else spawning.place()[1]


def global_ordinal():
    return 0 if is_spmd() else spawning.place()[0]


def process_count():
    return spawning.place()[1]


def process_index():
    return spawning.place()[0]


def global_runtime_device_count():
    """Devices that a mesh can span."""
    return max(multi_device.device_count(), process_count())


def addressable_runtime_device_count():
    return global_runtime_device_count() // process_count()


def addressable_device_count():
    """Devices of this process: one."""
    return 1


def _none(*args):
    """The number of the only host; how many chips of a TPU there are."""
    return 0


def runtime_device_attributes(device):
    return {"name": device}


def global_runtime_device_attributes():
    return [{"name": f"{device_type()}:{i}"} for i in range(global_runtime_device_count())]


def get_num_cached_compilation_graph():
    """Programs in memory."""
    from torch_hlo.lazy.record import session

    return len(session.engine().base().programs.programs)


def initialize_cache(path, readonly=False):
    """Where compiled programs are kept on disk: TORCH_HLO_CACHE."""
    if readonly:
        raise NotImplementedError("initialize_cache(readonly=True): copy the directory instead")
    config.assign("CACHE", path)


def get_master_ip():
    raise RuntimeError(f"IP discovery not supported for device: {device_type()}")


def _always():
    return True


def version():
    """Of the TPU. Lightning asks so whether there is one."""
    raise OSError("there is no TPU")


global_device_count = local_device_count = process_count
local_ordinal = global_ordinal
local_process_count = process_count
local_process_rank = process_index
is_bf16_supported = using_pjrt = _always
host_index = worker_id = available = num_available_chips = _none
