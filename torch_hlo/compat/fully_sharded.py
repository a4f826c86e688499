"""torch_xla.distributed.fsdp and the FSDP of SPMD: parameters, gradients and optimizer states are
spread over the devices."""

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from torch_hlo.pytorch import patches

from . import experimental_names, sharding_names, spawning

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
    of elements in what was wrapped."""
    if module in ignored_modules:
        return module, 0
    count, wrapped = sum(p.numel() for p in module.parameters()), 0
    if auto_wrap_policy(module=module, recurse=True, nonwrapped_numel=count):
        for name, child in module.named_children():
            child, n = recursive_wrap(
                child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
            )
            setattr(module, name, child)
            wrapped += n
    rest = count - wrapped
    policy = auto_wrap_policy(module=module, recurse=False, nonwrapped_numel=rest)
    if not only_wrap_children and policy:
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
        given = {"mesh": mesh, "shard_output": shard_output}
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


_IGNORED = frozenset(
    """reshard_after_forward flatten_parameters execute_sharding_on_init optimization_barrier_in
    _forward optimization_barrier_in_backward mark_step_on_finalization disable_reshard_on_root
    shard_param_on_dim_0 pin_layout_in_collective_ops coalesce_all_gather_ops buffer_dtype
    coalesce_reduce_scatter_ops compute_dtype opt_flatten_overlap fp32_reduce_scatter""".split()
)


class XlaFullyShardedDataParallel(_Wrapped):
    """`fully_shard` of PyTorch, one process per device. How it communicates is the compiler's
    business: options for that are accepted."""

    def __init__(
        self,
        module,
        auto_wrap_policy=None,
        auto_wrapper_callable=None,
        compute_dtype=None,
        **options,
    ):
        if unknown := options.keys() - _IGNORED:
            raise NotImplementedError(
                f"XlaFullyShardedDataParallel: {', '.join(sorted(unknown))}; use"
                " torch.distributed.fsdp.fully_shard"
            )
        super().__init__(module, auto_wrap_policy, auto_wrapper_callable)
        module.to("xla")
        if spawning.join() > 1:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            patches.patch_fully_shard()
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype))

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def get_shard_metadata(self):
        raise NotImplementedError(
            "checkpoints of shards: use torch_hlo.distributed.checkpoint, which reads and writes"
            " them on any number of processes"
        )


def checkpoint_module(module):
    """Compute the module's values again in backward instead of keeping them."""
    forward = module.forward

    def call(*args, **kwargs):
        return experimental_names.checkpoint(forward, *args, **kwargs)

    module.forward = call
    return module


def consolidate_sharded_model_checkpoints(*args, **kwargs):
    raise NotImplementedError(
        "torch_hlo.distributed.checkpoint.load reads a checkpoint on any number of processes"
    )


apply_xla_patch_to_nn_linear = sharding_names.apply_xla_patch_to_nn_linear
consolidate_sharded_state_dicts = consolidate_sharded_model_checkpoints
