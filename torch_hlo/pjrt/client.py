"""The client, its devices, their memory, the topology."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch_hlo import collector, config
from torch_hlo.compiler.cache import fingerprint
from torch_hlo.compiler.llvm.target import host
from torch_hlo.device import runtime

from .functions import implements, table
from .objects import Object, PluginError, named_values

PLATFORM = "hlo"
KINDS = ("device", "pinned_host", "unpinned_host")  # of memory: all of it is the host's
# The version that JAX writes for us: any that the reader knows; and the oldest.
STABLEHLO = {
    "stablehlo_current_version": [1, 17, 0],
    "stablehlo_minimum_version": [1, 0, 0],
}


class Client:
    """One for the process: virtual devices over the same processor. Where JAX runs several
    processes there are those of all of them, of which `mine` are here."""

    compiling = False  # a program, or one has been compiled
    asked: Callable[[], int] = staticmethod(lambda: 1)  # how many devices JAX's settings say
    # the number of this process, which has so many devices, and how many each process has
    processes: Callable[[int], tuple[int, list[int]]] = staticmethod(lambda count: (0, [count]))
    connect: Callable[[], None]  # them, by torch.distributed
    inspect: Callable[..., None]  # tells who asked, by its key, a sharding

    def __init__(self) -> None:
        count = max(config.get("CPU_DEVICES"), self.asked())
        own, counts = self.processes(count)
        self.owners = [process for process, n in enumerate(counts) for _ in range(n)]
        first = self.owners.index(own)
        self.mine = range(first, first + count)
        count = len(self.owners)
        self.ready = Object("event", is_ready=1, listeners=1, holders=1 << 60)  # of what is there
        # JAX looks up compiled programs by it, maybe on another machine
        version = f"torch_hlo 0.1.0 {fingerprint('', host().cache_key, config.code_flags())}"
        self.topology = Object("topology", platform_name=PLATFORM, platform_version=version)
        self.devices = [Object("device") for _ in range(count)]
        self.memories = [Object("memory") for _ in range(count * len(KINDS))]
        self.object = Object(
            "client",
            platform_name=PLATFORM,
            platform_version=version,
            topology=self.topology.address,
            process_index=own,
            devices=_addresses(self.devices),
            addressable_devices=_addresses([self.devices[i] for i in self.mine]),
            addressable_memories=[a for i in self.mine for a in _addresses(self._memories(i))],
        )
        self.topology.set(descriptions=_addresses(self.devices))
        self.places = {memory.address: i for i, memory in enumerate(self.memories)}
        for i, device in enumerate(self.devices):
            self._describe(i, device)
            self.places[device.address] = i * len(KINDS)

    def _memories(self, i: int) -> list[Object]:
        return self.memories[i * len(KINDS) : (i + 1) * len(KINDS)]

    def _describe(self, i: int, device: Object) -> None:
        memories = self._memories(i)
        device.set(
            id=i,
            device_kind="cpu",
            debug_string=f"{PLATFORM}:{i}",
            to_string=f"HloDevice(id={i})",
            device_description=device.address,
            is_addressable=int(i in self.mine),
            process_index=self.owners[i],
            local_hardware_id=i - self.mine.start if i in self.mine else -1,
            memories=_addresses(memories),
            memory=memories[0].address,
            attributes_deleter=table().nothing,
        )
        for number, (kind, memory) in enumerate(zip(KINDS, memories)):
            name = f"HLO_{kind.upper()}_{i}"
            memory.set(
                id=i * len(KINDS) + number,
                kind=kind,
                kind_id=number,
                debug_string=name,
                to_string=name,
                devices=[device.address],
            )

    def device(self, number: int) -> Object:
        if not 0 <= number < len(self.devices):
            raise PluginError(
                f"there is no device {number}, only {len(self.devices)};"
                " TORCH_HLO_CPU_DEVICES or JAX_NUM_CPU_DEVICES sets how many",
            )
        return self.devices[number]

    def place(self, address: int | None) -> int:
        """The number of a memory, named by its address or by that of its device."""
        return self.places[address] if address else 0


def _addresses(objects: Sequence[Object]) -> list[int]:
    return [o.address for o in objects]


client = cache(Client)


@cache
def _attributes() -> tuple[Object, int]:
    owner = Object("event")
    return owner, named_values(owner, STABLEHLO)


@implements("Plugin_Attributes")
def _plugin_attributes(args: Any) -> None:
    args.attributes, args.num_attributes = _attributes()[1], len(STABLEHLO)


@implements("Client_Create")
def _create(args: Any) -> None:
    args.client = client().object.address
    # Python waits for it before it ends: it may be inside LLVM
    threading.Thread(target=_prepare, name="torch_hlo preparations").start()


def _prepare() -> None:
    """What the first compile would do first, while JAX makes arrays and traces."""
    with collector.paused():
        runtime.prepare(lambda: not Client.compiling)
        collector.settle()


@implements("TopologyDescription_Create")
def _topology(args: Any) -> None:
    args.topology = client().topology.address


@implements("Client_LookupDevice")
def _lookup(args: Any) -> None:
    args.device = client().device(args.id).address


@implements("Client_LookupAddressableDevice")
def _lookup_local(args: Any) -> None:
    here = client()
    args.addressable_device = here.device(here.mine.start + args.local_hardware_id).address


@implements("Client_DefaultDeviceAssignment")
def _default_assignment(args: Any) -> None:
    count = args.num_replicas * args.num_partitions
    client().device(count - 1)
    table = (ctypes.c_int * args.default_assignment_size).from_address(args.default_assignment)
    table[:count] = list(range(count))
