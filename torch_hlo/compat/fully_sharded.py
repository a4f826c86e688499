"""torch_xla.distributed.fsdp and the FSDP of SPMD: parameters, gradients and optimizer states are
spread over the devices."""

import argparse
import contextlib
import functools
import math
import time
from glob import glob
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import optim
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from torch_hlo.pytorch import patches

from . import communication, sharding_names, spawning

Module = torch.nn.Module


def recursive_wrap(
    module,
    auto_wrap_policy,
    wrapper_cls,
    ignored_modules=(),
    ignored_params=(),
    only_wrap_children=False,
    **kwargs,
):
    """Wrap the modules below, and the module, where the policy says so; returns it and the number
    of elements in what was wrapped. The policy is asked with (module, recurse, elements that are
    not wrapped): PyTorch and PyTorch/XLA have other names for the last."""
    if module in ignored_modules:
        return module, 0
    count, wrapped = sum(p.numel() for p in module.parameters()), 0
    if auto_wrap_policy(module, True, count):
        for name, child in module.named_children():
            child, n = recursive_wrap(
                child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
            )
            setattr(module, name, child)
            wrapped += n
    if not only_wrap_children and auto_wrap_policy(module, False, count - wrapped):
        return wrapper_cls(module, **kwargs), count
    return module, wrapped


class _Wrapped(Module):
    """A module that looks like the one it wraps."""

    _what = "FSDP"

    def __init__(self, module, auto_wrap_policy, wrapper, **kwargs):
        if isinstance(module, _Wrapped):
            raise RuntimeError(f"Cannot wrap a module that is already wrapped with {self._what}")
        if type(module).forward is Module.forward:
            raise RuntimeError(
                f"The module wrapped by {self._what} must define a `forward` method: do not wrap"
                " nn.ModuleList or nn.ModuleDict"
            )
        super().__init__()
        if auto_wrap_policy is not None:
            if any(isinstance(m, _Wrapped) for m in module.modules()):
                raise ValueError("modules below are wrapped, and there is an `auto_wrap_policy`")
            wrapper = wrapper or type(self)
            recursive_wrap(module, auto_wrap_policy, wrapper, only_wrap_children=True, **kwargs)
        self._orig_module = module

    @property
    def module(self):
        return self._orig_module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_module"), name)

    def __getitem__(self, key):
        return self.module[key]


class SpmdFullyShardedDataParallel(_Wrapped):
    """Parameters are sharded along the axis "fsdp" of the mesh, over their longest dimension."""

    def __init__(
        self,
        module,
        *,
        mesh=None,
        shard_output=None,
        auto_wrap_policy=None,
        auto_wrapper_callable=None,
        extra_data_axis=None,
    ):
        mesh = mesh or sharding_names.get_global_mesh()
        if mesh is None:
            raise ValueError(
                "No mesh is provided and no global mesh is set. Please provide a mesh."
            )
        if "fsdp" not in (mesh.axis_names or ()):
            raise ValueError("The mesh must have an axis named 'fsdp'.")
        if extra_data_axis and extra_data_axis not in mesh.axis_names:
            raise ValueError(f"The provided {extra_data_axis} axis is not in the mesh.")
        given = {"mesh": mesh, "shard_output": shard_output, "extra_data_axis": extra_data_axis}
        super().__init__(module, auto_wrap_policy, auto_wrapper_callable, **given)
        module.to("xla")
        self._mesh, self._shard_output = mesh, shard_output
        self._axis = (extra_data_axis, "fsdp") if extra_data_axis else "fsdp"
        for p in module.parameters():
            if sharding_names.placement(p) is None:
                spec: list[Any] = [None] * p.dim()
                if spec:
                    spec[p.shape.index(max(p.shape))] = "fsdp"
                sharding_names.mark_sharding(p, mesh, spec)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self._shard_output is not None:
            self._shard_output(output, self._mesh)
            return output
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, torch.Tensor):
            raise RuntimeError(
                f"The output type is not supported: {type(output)}. Please provide your own"
                " shard_output callable."
            )
        spec = [self._axis, *[None] * (first.dim() - 1)] if first.dim() else []
        sharding_names.mark_sharding(first, self._mesh, spec)
        return output


_OPTIONS = frozenset(
    """compute_dtype fp32_reduce_scatter reshard_after_forward flatten_parameters buffer_dtype
    execute_sharding_on_init optimization_barrier_in_forward optimization_barrier_in_backward
    mark_step_on_finalization disable_reshard_on_root
    shard_param_on_dim_0 pin_layout_in_collective_ops coalesce_all_gather_ops
    coalesce_reduce_scatter_ops opt_flatten_overlap""".split()
)


class XlaFullyShardedDataParallel(_Wrapped):
    """`fully_shard` of PyTorch, one process per device. How it communicates is the compiler's
    business: options for that are accepted."""

    def __init__(self, module, auto_wrap_policy=None, auto_wrapper_callable=None, **options):
        if unknown := options.keys() - _OPTIONS:
            raise NotImplementedError(
                f"XlaFullyShardedDataParallel: {', '.join(sorted(unknown))}; use"
                " torch.distributed.fsdp.fully_shard"
            )
        super().__init__(module, auto_wrap_policy, auto_wrapper_callable, **options)
        module.to("xla")
        spawning.join(alone=True)  # its types are those of several processes
        patches.patch_fully_shard()
        types = MixedPrecisionPolicy(
            options.get("compute_dtype"),
            torch.float32 if options.get("fp32_reduce_scatter") else None,
        )
        frees = options.get("reshard_after_forward", True)
        fully_shard(module, mp_policy=types, reshard_after_forward=frees)

    @contextlib.contextmanager
    def no_sync(self):
        """Gradients are added up; the first backward behind it joins those of all processes."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def get_shard_metadata(self):
        """What `consolidate_sharded_model_checkpoints` wants to find in each process's file."""
        return {"world_size": dist.get_world_size(), "rank": dist.get_rank()}


class ZeroRedundancyOptimizer(optim.ZeroRedundancyOptimizer):
    """PyTorch's: each process keeps the states of some parameters and steps these. Gradients become
    their mean over the processes, and are clipped. `state_dict` is what this process keeps."""

    def __init__(
        self,
        params,
        optimizer_class,
        grad_clipping=True,
        max_norm=None,
        pin_layout=True,
        **defaults,
    ):
        spawning.join(alone=True)
        super().__init__(params, optimizer_class, **defaults)
        self._limit = (max_norm or 1.0) if grad_clipping else math.inf

    def step(self, closure=None, **kwargs):
        with torch.enable_grad():
            loss = closure() if closure else None
        communication.reduce_gradients(self)
        if self._limit < math.inf:
            found = [p for group in self.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(found, self._limit)
        super().step(**kwargs)
        return loss

    def state_dict(self):
        return self.optim.state_dict()

    def load_state_dict(self, state_dict):
        self.optim.load_state_dict(state_dict)


def checkpoint_module(module):
    """Compute the module's values again in backward instead of keeping them."""
    module.forward = functools.partial(
        checkpoint, module.forward, use_reentrant=False, early_stop=False
    )
    return module


def consolidate_sharded_state_dicts(state_dict_list, shard_metadata):
    """The state of the module that was wrapped, from those of all processes by rank."""

    def whole(parts):
        if not isinstance(parts[0], DTensor):
            return parts[0]
        return torch.cat([part.to_local() for part in parts])

    names = {name: name.replace("_orig_module.", "") for name in state_dict_list[0]}
    return {new: whole([s[name] for s in state_dict_list]) for name, new in names.items()}


def _written(pattern):
    """The checkpoints of all processes by rank; None while some process still writes its file."""
    try:
        found = [torch.load(path, map_location="cpu") for path in glob(pattern)]
    except (EOFError, RuntimeError):
        return None
    found.sort(key=lambda c: c["shard_metadata"]["rank"])
    whole = found and len(found) == found[0]["shard_metadata"]["world_size"]
    return found if whole else None


def consolidate_sharded_model_checkpoints(
    ckpt_prefix, ckpt_suffix="*.pth", save_path="", save_model=True
):
    """The whole state from the files of all processes, and where it was saved."""
    end = time.monotonic() + 60
    while (found := _written(ckpt_prefix + ckpt_suffix)) is None:
        if time.monotonic() > end:
            files = ckpt_prefix + ckpt_suffix
            raise RuntimeError(f"{files}: those of some processes are missing, or broken")
        time.sleep(0.1)
    state = consolidate_sharded_state_dicts([c["model"] for c in found], None)
    path = (save_path or f"{ckpt_prefix}_consolidated.pth") if save_model else None
    if path:
        torch.save({"model": state}, path)
    return state, path


def main():
    """`-m torch_xla.distributed.fsdp.consolidate_sharded_ckpts`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ckpt_prefix", required=True)
    parser.add_argument("--ckpt_suffix", default="*.pth")
    parser.add_argument("--save_path", default="")
    consolidate_sharded_model_checkpoints(**vars(parser.parse_args()))


apply_xla_patch_to_nn_linear = sharding_names.apply_xla_patch_to_nn_linear
