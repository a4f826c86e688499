"""Accelerate and the Trainer of transformers."""

import inspect
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_hlo import config
from torch_hlo.pytorch.registration import NAME, PLACE


def processes(
    original: Callable[..., tuple[str | None, Any]],
    state: Any,
    cpu: bool = False,
    sagemaker_dp: bool = False,
    backend: str | None = None,
) -> tuple[str | None, Any]:
    """PartialState._prepare_backend: several processes train on the device, over gloo."""
    found, kind = original(state, cpu, sagemaker_dp, backend)
    if kind.value != "NO" or cpu or config.variable("LOCAL_RANK", None) is None:
        return found, kind
    state.device = PLACE.device
    # the kind that every strategy is offered for
    return backend or "gloo", type(kind).MULTI_GPU


def setup_devices(original: Callable[[Any], torch.device], arguments: Any) -> torch.device:
    """TrainingArguments._setup_devices: the device that Accelerate has chosen."""
    device = original(arguments)
    state = arguments.distributed_state
    return state.device if state is not None and state.device.type in PLACE.names else device


def pipeline(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Pipeline.__init__ without a device: not on the CPU, if nothing but that was found."""
    given = inspect.signature(original).bind(*args, **kwargs)
    options = given.arguments
    free = options.get("device") is None and not hasattr(options["model"], "hf_device_map")
    if free and PLACE.leads():
        options["device"] = PLACE.device
    original(*given.args, **given.kwargs)


def memory(original: Callable[[Any], dict[Any, int]], given: Any = None) -> dict[Any, int]:
    """get_max_memory: device_map="auto" places modules on the device, not on the CPU. Of a device 0
    Accelerate asks that CUDA is there; of "mps" it does not. It also converts what was given."""
    if not PLACE.leads() or given and 0 not in given:
        return original(given)
    if given is None:
        return {0: _device().mem_get_info()[0]} | original(None)
    given["mps"] = given.pop(0)
    found = original(given)
    given[0] = given.pop("mps")
    return {0: found.pop("mps")} | found


def save_random(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The state of the device's random numbers is written beside those of the others."""
    result = original(*args, **kwargs)
    torch.save(_device().get_rng_state(), _random_file((*args, *kwargs.values())))
    return result


def load_random(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The random numbers of the device go on where they were when `save_random` wrote."""
    result = original(*args, **kwargs)
    path = _random_file((*args, *kwargs.values()))
    if path is not None and os.path.exists(path):
        _device().set_rng_state(torch.load(path))
    return result


def _device() -> ModuleType:
    return torch.get_device_module(PLACE.name)


def _random_file(args: Sequence[Any]) -> str | None:
    """In the first argument that is a folder; None if there is none. Every process has its own."""
    folder = next((a for a in args if isinstance(a, (str, os.PathLike))), None)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return None if folder is None else os.path.join(folder, f"{NAME}_rng_state_{rank}.pth")


def name_backend(module: ModuleType) -> None:
    """`torch_compile_backend="hlo"` is a member of Accelerate's enumeration of back ends."""
    kinds = module.DynamoBackend
    name = NAME.upper()
    member = str.__new__(kinds, name)
    member._name_ = member._value_ = name
    kinds._member_map_[name] = kinds._value2member_map_[name] = member
