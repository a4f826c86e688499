"""Registration of "hlo" as a PyTorch device from Python alone: the name, the module `torch.hlo`,
and the guard that says which device is current. The same in 2.11 to 2.13."""

import ctypes
import os
import re
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import version

NAME = "hlo"
_Kind = torch._C._autograd.DeviceType


class Place:
    """What PyTorch calls the device: tensors are on `device`, whose type is `name`; all of `names`
    mean it; `key` is the name of its dispatch key."""

    key, kind = "PrivateUse1", _Kind.PrivateUse1
    # of the names only this one exists before registration
    device = torch.device("privateuseone", 0)
    names = frozenset({NAME, "privateuseone"})
    name = property(lambda self: self.device.type)

    def leads(self) -> bool:
        """Whether PyTorch takes the device for its accelerator."""
        found = torch.accelerator.current_accelerator()
        return found is not None and found.type in self.names

    def has(self, x: object) -> bool:
        """Whether it is a tensor of the device."""
        return isinstance(x, torch.Tensor) and x.device.type in self.names


PLACE = Place()


class _Guard(torch._C._acc.DeviceGuard):
    asked = 0

    def type_(self) -> object:  # see _answer_natively
        self.asked += 1
        return PLACE.kind


# Methods that PyTorch's guard for Python back ends answers by calling `type_`.
_METHODS = ("type", "exchangeDevice", "getDevice", "getStream", "getNewStream", "exchangeStream")
_GUARD_HEADER = "c10/core/impl/DeviceGuardImplInterface.h"
_TABLE = 64  # words that are copied; a virtual table has less
_WORD = ctypes.sizeof(ctypes.c_void_p)


def _answer_natively(guard: _Guard, answer: int, ask: Callable[..., bool]) -> None:
    """Let machine code say which device is current. PyTorch asks some five times for each node of
    backward, also in destructors while an exception is under way, where entering Python would be a
    SystemError and raising KeyboardInterrupt the end of the process.

    Every answer is one pair of words: a DeviceType is the first byte of a Device (type, index 0),
    which is the first word of a Stream (device, stream 0)."""
    guards, kind = _guards(), int(PLACE.kind)
    known = guards is not None and bool(_virtual_methods(_GUARD_HEADER))
    if known:
        table = ctypes.c_void_p.from_address(guards[kind])
        asks = ctypes.PYFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(
            ctypes.c_void_p.from_address(table.value).value
        )
        known = asks(guards[kind]) == kind and guard.asked == 1
    if not known:
        raise ImportError(
            f"torch_hlo does not know the device guard of PyTorch {torch.__version__} on this"
            " platform"
        )
    answers = dict.fromkeys(_METHODS, answer) | _times(ask)
    table.value = _answering(table.value, _GUARD_HEADER, answers)


_kept: list[object] = []  # in use until the process ends


def _answering(table: int, header: str, answers: Mapping[str, int]) -> int:
    """The address of a virtual table like the one at `table`, in which these methods are other
    functions. `header` has them in their order."""
    names = _virtual_methods(header)
    # two words belong to the table before its first method; a destructor there has two
    first = 2 - names.index("type") if "type" in names else 3
    words = (ctypes.c_void_p * _TABLE)(*(ctypes.c_void_p * _TABLE).from_address(table - 2 * _WORD))
    for name, answer in answers.items():
        words[first + names.index(name)] = answer
    _kept.append(words)
    return ctypes.addressof(words) + 2 * _WORD


def _times(ask: Callable[..., bool]) -> dict[str, int]:
    """What makes `torch.Event` and `torch.Stream` wait for the device, and ask it. All that C++
    knows of an event is one word: the time of its record, in nanoseconds."""

    def record(guard: int, event: Any, stream: int, index: int, timing: int) -> None:
        if timing:
            ask("synchronize")
        event[0] = time.perf_counter_ns()

    kind, address, number = ctypes.CFUNCTYPE, ctypes.c_void_p, ctypes.c_int8
    event = ctypes.POINTER(address)
    asks = kind(ctypes.c_bool, address, address)
    waits = kind(None, address, address)(lambda guard, place: ask("synchronize"))
    functions = {
        "record": kind(None, address, event, address, number, ctypes.c_int)(record),
        "elapsedTime": kind(ctypes.c_double, address, address, address, number)(
            lambda guard, first, second, index: (second - first) / 1e6
        ),
        "synchronizeEvent": waits,
        "synchronizeStream": waits,
        "queryEvent": asks(lambda guard, event: ask("has_ended", event)),
        "queryStream": asks(lambda guard, stream: ask("has_ended", time.perf_counter_ns())),
    }
    _kept.append(functions)
    return {name: ctypes.cast(f, address).value or 0 for name, f in functions.items()}


def _library(name: str = "c10") -> ctypes.CDLL | None:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    paths = [os.path.join(folder, f"lib{name}.{kind}") for kind in ("so", "dylib")]
    return next((ctypes.CDLL(path) for path in paths if os.path.exists(path)), None)


def _virtual_methods(header: str) -> list[str]:
    """The virtual methods that a header of PyTorch declares, in the order of their table; every
    wheel has the headers."""
    path = os.path.join(os.path.dirname(torch.__file__), "include", header)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return re.findall(r"virtual [^(]*?(\w+)\(", file.read())


def _share_memory(constant_function: Callable[[int, int], int]) -> None:
    """Where C++ asks for page-locked memory (`torch.empty(…, pin_memory=True)`, and
    DistributedDataParallel for what it counts) it gets the CPU's own: the device reads any."""
    header = "ATen/detail/AcceleratorHooksInterface.h"
    tensors, memory = _library("torch_cpu"), _library()
    if tensors is None or memory is None or not _virtual_methods(header):
        return
    hooks, allocator = (
        tensors._ZN2at6detail19getPrivateUse1HooksEv,
        memory._ZN3c1015GetCPUAllocatorEv,
    )
    hooks.restype = allocator.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(hooks())
    answers = {"getPinnedMemoryAllocator": allocator(), "isPinnedPtr": 1}
    answers = {name: constant_function(answer, 0) for name, answer in answers.items()}
    table.value = _answering(table.value, header, answers)


def _guards() -> ctypes.Array | None:
    """PyTorch's device guards by kind of device; None where its library is not known."""
    if (library := _library()) is None:
        return None
    kinds = ctypes.c_void_p * (int(_Kind.PrivateUse1) + 1)
    return kinds.in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


# x86-64: movzx eax, byte [rip + four bytes of distance]; test al, al; setne al; ret
_READS_FLAG, _ANSWERS = b"\x0f\xb6\x05", b"\x84\xc0\x0f\x95\xc0\xc3"


def name_flag() -> ctypes.c_uint8 | None:
    """The byte by which PyTorch knows that its PrivateUse1 device has a name. As long as it does,
    PyTorch takes that device for the only one with streams, and backward of torch.cuda's tensors
    ends in an assertion (https://github.com/pytorch/pytorch/issues/161129): for the time of one,
    the byte may be 0. None where PyTorch's code is not known."""
    library = _library()
    asks = getattr(library, "_ZN3c1033is_privateuse1_backend_registeredEv", None)
    if asks is None:
        return None
    asks.restype = ctypes.c_bool
    start = ctypes.cast(asks, ctypes.c_void_p).value
    code, size = ctypes.string_at(start, 13), len(_READS_FLAG) + 4
    if not code.startswith(_READS_FLAG) or code[size:] != _ANSWERS:
        return None
    distance = int.from_bytes(code[len(_READS_FLAG) : size], "little", signed=True)
    return ctypes.c_uint8.from_address(start + size + distance)


_GUARD = 8  # words of a guard that are copied: its table, and what pybind11 keeps


def rename_to_xla(module: types.ModuleType, constant_function: Callable[[int, int], int]) -> None:
    """From now on the device's tensors are those of PyTorch's device "xla", which exists without a
    back end; "hlo" still means it. Raises RuntimeError if "xla" has a back end."""
    guards, old, new = _guards(), int(PLACE.kind), int(_Kind.XLA)
    if guards[new]:
        raise RuntimeError("PyTorch's device 'xla' already has a back end in this process")
    guard = (ctypes.c_void_p * _GUARD).from_address(guards[old])
    copy = (ctypes.c_void_p * _GUARD)(*guard)
    answers = dict.fromkeys(_METHODS, constant_function(new, 0))
    copy[0] = _answering(guard[0], _GUARD_HEADER, answers)
    _kept.append(copy)
    guards[new] = ctypes.addressof(copy)
    PLACE.key, PLACE.kind = "XLA", _Kind.XLA
    PLACE.device, PLACE.names = torch.device("xla", 0), PLACE.names | {"xla"}
    torch._register_device_module("xla", module)
    # what PyTorch's Python asks to learn which device is not its own, and which the fast one; its
    # meshes ask otherwise, and stay "hlo": those of "xla" have no process groups
    torch._C._get_privateuse1_backend_name = lambda: "xla"
    torch._C._accelerator_getAccelerator = lambda: torch.device("xla")


_registered = False


def register_device(module: types.ModuleType, constant_function: Callable[[int, int], int]) -> None:
    """Make "hlo" a device whose module `torch.hlo` is `module`; `constant_function(first, second)`
    is the address of machine code that returns these words. Raises RuntimeError if another Python
    or C++ backend has taken PrivateUse1."""
    global _registered
    if _registered:
        return
    version.check()
    from torch.utils.backend_registration import (
        _setup_privateuseone_for_python_backend,
    )

    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(
            f"torch_hlo needs PyTorch's PrivateUse1 device, which the backend {taken!r} has taken"
            " in this process"
        )
    guard = _Guard()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module, device_guard=guard)
    answer = constant_function(int(PLACE.kind), 0)
    _answer_natively(guard, answer, module.ask)
    _share_memory(constant_function)
    _registered = True
