"""Registration of "hlo" as a PyTorch device from Python alone: the name, the module `torch.hlo`,
and the guard that says which device is current. The same in 2.11 to 2.13."""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Callable

import torch

from torch_hlo.pytorch import version

NAME = "hlo"
_PRIVATE_USE = torch._C._autograd.DeviceType.PrivateUse1


class _Guard(torch._C._acc.DeviceGuard):
    asked = 0

    def type_(self) -> object:  # see _answer_natively
        self.asked += 1
        return _PRIVATE_USE


# Methods of c10::impl::DeviceGuardImplInterface by their place in its virtual table that PyTorch's
# guard for Python back ends answers by calling `type_`: type, exchangeDevice, getDevice, getStream,
# getNewStream, exchangeStream.
_METHODS = (0, 1, 2, 5, 8, 9)
_TABLE = 64  # words that are copied; the table has less


def _answer_natively(guard: _Guard, constant_function: Callable[[int, int], int]) -> None:
    """Let machine code say which device is current. PyTorch asks some five times for each node of
    backward, also in destructors while an exception is under way, where entering Python would be a
    SystemError and raising KeyboardInterrupt the end of the process.

    Every answer is one pair of words: a DeviceType is the first byte of a Device (type, index 0),
    which is the first word of a Stream (device, stream 0)."""
    kind, word = int(_PRIVATE_USE), ctypes.sizeof(ctypes.c_void_p)
    library = next(
        (path for path in map(_library, ("libc10.so", "libc10.dylib")) if os.path.exists(path)),
        None,
    )
    known = library is not None
    if known:
        address = (ctypes.c_void_p * (kind + 1)).in_dll(
            ctypes.CDLL(library), "_ZN3c104impl26device_guard_impl_registryE"
        )[kind]
        table = ctypes.c_void_p.from_address(address)
        # two words before its address belong to it
        words = (ctypes.c_void_p * _TABLE).from_address(table.value - 2 * word)
        asks = ctypes.PYFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(words[2 + _METHODS[0]])
        known = asks(address) == kind and guard.asked == 1
    if not known:
        raise ImportError(
            f"torch_hlo does not know the device guard of PyTorch {torch.__version__} on this"
            " platform"
        )
    _ANSWERS[:] = words
    answer = constant_function(kind, 0)
    for method in _METHODS:
        _ANSWERS[2 + method] = answer
    table.value = ctypes.addressof(_ANSWERS) + 2 * word


_ANSWERS = (ctypes.c_void_p * _TABLE)()  # in use until the process ends


def _library(name: str) -> str:
    return os.path.join(os.path.dirname(torch.__file__), "lib", name)


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
    _answer_natively(guard, constant_function)
    _registered = True
