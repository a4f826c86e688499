"""What names CUDA, or the CPU, where nobody chose: the device takes its place.

Each function is called in place of `original`, see `wrapped` in hook.py."""

import torch

from torch_hlo.lazy.record.tensor import HloTensor, user_attributes
from torch_hlo.lazy.subclasses import meant
from torch_hlo.pytorch.registration import PLACE


def mixed(original, instance, device="cuda", *args, device_type=None, **kwargs):
    """GradScaler(device) and autocast(device_type): CUDA is what loops of other packages say, and
    the scaler's default. Where there is none they would do nothing."""
    named = device_type or device
    absent = named == "cuda" and not torch.cuda.is_available()
    original(instance, PLACE.name if absent else named, *args, **kwargs)


def clip(original, parameters, *args, **kwargs):
    """clip_grad_norm_: without gradients the norm is on the parameters' device too."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = original(given, *args, **kwargs)
    ours = norm.device.type == "cpu" and any(map(PLACE.has, given))
    return norm.to(PLACE.device) if ours else norm


def fastai_device(original, *args, **kwargs):
    """default_device of fastai, unless `use_cuda` is False."""
    device = original(*args, **kwargs)
    asked = original.__globals__["defaults"].use_cuda is False
    return device if asked or device.type != "cpu" else PLACE.device


def fastai_meta(original, tensor, source, as_copy=False):
    """set_meta of fastai gives a tensor the dictionary of `source`. In ours is its memory."""
    if isinstance(tensor, HloTensor) and hasattr(source, "__dict__"):
        tensor.__dict__.update(user_attributes(source))
    else:
        original(tensor, source, as_copy)


def fastai_cast(original, x, kind):
    """What fastai brought to the CPU keeps its class, but not that of the device."""
    return original(x, kind if PLACE.has(x) else meant(kind))
