"""Programs on several devices: N virtual devices of this process, or one process per device.

    run_devices(program, [inputs of device 0, …], [outputs of device 0, …])    # of Buffers; blocks

Virtual devices have buffers of their own and run concurrently, each in a thread; collectives are
copies and sums between their memories (hlo/sharding/rendezvous.py). In a process that
torch.distributed made one of several, each process runs its own device (process_group.py)."""

import hashlib
import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from torch_hlo import config
from torch_hlo.hlo.evaluate.communication import collectives
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.sharding import collective
from torch_hlo.hlo.sharding.collective import Alone, Collective, Communicator
from torch_hlo.hlo.sharding.rendezvous import Rendezvous

from .cpu.workers import WORKERS
from .interfaces import Program
from .memory import Buffer


class Info:
    """collective.ProgramInfo of a module with this canonical text."""

    def __init__(self, module: Module, text: str) -> None:
        self.name, self.devices = (
            module.name,
            module.num_partitions * module.num_replicas,
        )
        self.first = next((str(Collective.of(x)) for x in collectives(module.entry)), "")
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._packed = zlib.compress(text.encode(), 1)

    def text(self) -> str:
        return zlib.decompress(self._packed).decode()


def device_count() -> int:
    """Devices that a sharded program runs on: processes of torch.distributed when there are
    several, else TORCH_HLO_CPU_DEVICES."""
    size = process_count()
    return size if size > 1 else max(config.get("CPU_DEVICES"), 1)


def process_count() -> int:
    """Processes that torch.distributed runs, 1 when it does not."""
    dist = _distributed()
    return dist.get_world_size() if dist is not None else 1


def local_rank() -> int:
    """Number of this process on its machine, 0 when it is the only one."""
    dist = _distributed()
    return dist.get_node_local_rank(fallback_rank=0) if dist is not None else 0


def is_own_index(index: int) -> bool:
    """True if `index` in a device's name means the device of this process: 0, or its rank on this
    machine as in "hlo:3" after torchrun.

    A Python back end has one index in PyTorch (its autograd engine knows no other), so tensors say
    "hlo:0"; virtual devices are addressed by meshes."""
    return (
        index == 0
        or process_count() > 1
        and index == _distributed().get_node_local_rank(fallback_rank=0)
    )


ORDINAL = (
    "hlo error: invalid device ordinal {}: this process has 1 hlo device; distributed.mark_sharding"
    " spreads tensors over the devices of a mesh"
)


def join() -> bool:
    """Meet the other processes that torchrun has started, if there are any; whether this process is
    the first of them (or the only one)."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_torchelastic_launched():
        return True
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank() == 0


def local_devices(devices: int) -> range:
    """Which of `devices` this process runs: all of them, or its own. Raises ValueError when there
    is another number of processes."""
    processes = process_count()
    if processes == 1:
        return range(devices)
    if devices != processes:
        raise ValueError(
            f"the program is for {devices} devices, torch.distributed runs {processes} processes"
        )
    rank = _distributed().get_rank()
    return range(rank, rank + 1)


def run_devices(
    program: Program,
    inputs: Sequence[Sequence[Buffer]],
    outputs: Sequence[Sequence[Buffer]],
    replicas: int = 1,
    links: Sequence[Communicator] = (),
) -> None:
    """Run a per-device program on every device of this process: on one per list of buffers, or in a
    torch.distributed process on its own. `links`: of the devices, where others of the program are
    in other processes.

    Blocks. Raises what a device raises, with a note that names it; CollectiveError when the devices
    do not meet within TORCH_HLO_COLLECTIVE_TIMEOUT."""
    n = len(inputs)
    if process_count() > 1 and n == 1 and not links:
        return program.run(inputs[0], outputs[0])
    if n > 1 and not program.virtual:
        raise ValueError(
            f"{program.name} is for {n} devices: virtual devices are the CPU's; on GPUs start one"
            " process per device with torchrun"
        )
    meeting = Rendezvous(
        collective.program_name(program.name),
        replicas,
        n // replicas,
        config.get("COLLECTIVE_TIMEOUT") or None,
        links,
    )
    with WORKERS.shared_by(n):
        meeting.run(lambda device: program.run(inputs[device], outputs[device]), _THREADS.submit)


def gathered(mine: list) -> list:
    """What every device has, in the order of the devices, from what the devices of this process
    have; for tools and tests (objects are pickled)."""
    if process_count() == 1:
        return mine
    everybody: list = [None] * process_count()
    _distributed().all_gather_object(everybody, mine)
    return [x for part in everybody for x in part]


def communicator() -> Communicator:
    """The link of this process to the other processes; that of an only device when there are
    none."""
    if process_count() > 1:
        from . import process_group

        return process_group.link()
    return _ALONE


_ALONE = Alone()
collective.set_default(communicator)


def _distributed() -> Any:
    """torch.distributed when it is in use."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


class _Threads:
    """Threads of devices, which are kept: starting one costs more than a small program."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def submit(self, call: Callable[[], None]) -> None:
        """Call it on one of them."""
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(
                target=self._work,
                args=(calls,),
                daemon=True,
                name="torch_hlo device",
            ).start()
        calls.put(call)

    def _work(self, calls: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            calls.get()()
            self._idle.append(calls)


_THREADS = _Threads()
