"""Behaviour of PyTorch that has no hook, changed for this device. The same in 2.11 to 2.13, but for
what 2.13 does by itself."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any

import torch
import torch.autograd.graph
import torch.utils._foreach_utils
from torch._subclasses import fake_tensor
from torch.nn import Module
from torch.utils.dlpack import DLDeviceType

from . import imports, uninitialized, version
from .around import around
from .operators import Key
from .registration import NAME, PLACE, name_flag


def patch(
    tensor_class: type,
    module: types.ModuleType,
    generator_class: type,
    default_dtype_changed: Callable[[], None],
    start_collectives: Callable[[], None],
) -> None:
    """Behaviour of PyTorch that has no hook: see each line."""
    _patch_backward(tensor_class)
    imports.shorten_dispatch(tensor_class)
    _patch_module_apply()
    # Optimizers and clip_grad_norm_ take the _foreach_ and _fused_ paths only for these exact
    # types. (torch.optim deletes its attribute `optimizer`, hence import_module.)
    for holder in (
        torch.utils._foreach_utils,
        importlib.import_module("torch.optim.optimizer"),
    ):
        if tensor_class not in holder._foreach_supported_types:
            holder._foreach_supported_types.append(tensor_class)
    torch.Generator = generator_class
    _patch_default_dtype(default_dtype_changed)
    _patch_pinned()
    _patch_accelerator(module)
    _patch_data_parallel(module.synchronize)
    _patch_waiting(tensor_class, start_collectives)
    _patch_inductor()
    if version.VERSION < (2, 13):
        _patch_shape_functions()
    # A fake tensor of this device holds no value of the device: torch.tensor(…, device="hlo") is a
    # fake tensor of the CPU that is moved, as on a machine without the GPU that is traced for.
    fake_tensor._is_privateuse1_backend_available = lambda: False


_SHAPES = torch.library.Library("aten", "IMPL", "Meta")


def _patch_shape_functions() -> None:
    """Two operators on tensors without data, as in PyTorch 2.13. Before, a norm kept a dimension of
    size 1 that it was told to reduce by a negative number, and an encoder layer had no kernel."""
    from torch._decomp import decomposition_table
    from torch._prims_common import canonicalize_dims

    aten = torch.ops.aten
    norm = aten.linalg_vector_norm.default
    original = decomposition_table[norm]

    @functools.wraps(original)
    def vector_norm(
        x: torch.Tensor, ord: float = 2, dim: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        dim = canonicalize_dims(x.dim(), dim) if dim else dim
        return original(x, ord, dim, *args, **kwargs)

    def encoder_layer(src: torch.Tensor, *args: object) -> torch.Tensor:
        if src.is_nested:
            raise NotImplementedError("an encoder layer on a nested tensor without data")
        return torch.empty_like(src)

    # asked with symbolic sizes, under Dynamo, and by the dispatcher
    decomposition_table[norm] = norm.py_kernels[Key.Meta] = vector_norm
    norm._dispatch_cache.clear()
    _SHAPES.impl(norm, vector_norm, allow_override=True)
    _SHAPES.impl(aten._transformer_encoder_layer_fwd.default, encoder_layer)


def _patch_inductor() -> None:
    """torch.compile without a name of a back end asks Inductor, which writes no code for this
    device: what it would be asked for is compiled as with backend="hlo". Whichever back end is
    asked, as by `cond` and `while_loop` called alone, Dynamo gets to know this device's tensors."""

    def knowing(make: Callable, *args: object, **kwargs: object) -> None:
        from torch._dynamo.backends import registry

        # a checkout that is not installed has no entry points
        own = EntryPoint(NAME, "torch_hlo.dynamo:hlo", "torch_dynamo_backends")
        registry._BACKENDS.setdefault(NAME, own)
        make(*args, **kwargs)
        registry.lookup_backend(NAME)

    for wrapper in (torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper):
        around(wrapper, "__init__", knowing)

    def compile_graph(
        original: Callable, self: object, graph: torch.fx.GraphModule, inputs: Sequence
    ) -> Callable:
        values = [n.meta.get("example_value") for n in graph.graph.nodes]
        if not any(map(PLACE.has, values)):
            return original(self, graph, inputs)
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(NAME)(graph, inputs)

    around(torch._TorchCompileInductorWrapper, "__call__", compile_graph)


def follow_profiler(record: Callable[[], AbstractContextManager[Any]]) -> None:
    """PyTorch's profiler has what is recorded meanwhile, by `record`, in the traces that it
    writes."""
    kind = torch.autograd.profiler.profile

    def prepared(prepare: Callable, self: Any) -> None:
        prepare(self)
        self._hlo = ExitStack()
        self._hlo_recording = self._hlo.enter_context(record())

    def left(leave: Callable, self: Any, *error: Any) -> object:
        try:
            if hasattr(self, "_hlo"):
                self._hlo.close()  # raises what failed on the device
        finally:
            result = leave(self, *error)
        return result

    def exported(export: Callable, self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        export(self, path, *args, **kwargs)
        if getattr(self, "_hlo_recording", None) is not None:
            self._hlo_recording.add_to(path)

    around(kind, "_prepare_trace", prepared)
    around(kind, "__exit__", left)
    around(kind, "export_chrome_trace", exported)
    # tables are sorted by "self_cuda_time_total" too: of the devices PyTorch replaces its own names
    event = torch.autograd.profiler_util.FormattedTimesMixin
    for part in ("", "self_"):
        same = property(attrgetter(f"{part}device_time_total"))
        setattr(event, f"{part}{NAME}_time_total", same)


def _patch_backward(tensor_class: type) -> None:
    # Graphs of this device run on the thread that calls `backward`: handing each op over to the
    # engine's thread for the device, and the interpreter with it, takes longer than recording it.
    # And a thread numbers the nodes of a graph that it makes by itself, so that the order of a
    # second derivative would be another one at each call: torch.func's transforms wrap tensors,
    # hence the question for the device.
    threads_wanted, set_threads = (
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    )

    flag = name_flag() if torch.version.cuda else None

    def on_cuda(
        original: Callable, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor | None, ...]:
        flag.value = False
        try:
            return original(*args, **kwargs)
        finally:
            flag.value = True

    def run_backward(
        original: Callable, roots: Sequence[torch.Tensor], *args: object, **kwargs: object
    ) -> tuple[torch.Tensor | None, ...]:
        if flag is not None and any(getattr(root, "is_cuda", False) for root in roots):
            return on_cuda(original, roots, *args, **kwargs)
        if not threads_wanted() or not any(
            type(root) is tensor_class or PLACE.has(root) for root in roots
        ):
            return original(roots, *args, **kwargs)
        set_threads(False)
        try:
            return original(roots, *args, **kwargs)
        finally:
            set_threads(True)

    for holder in (torch.autograd.graph, torch.autograd):
        around(holder, "_engine_run_backward", run_backward)


def _patch_module_apply() -> None:
    # `module.to("hlo")` and back must keep Parameter objects, so that optimizers made before and
    # tied weights stay valid: PyTorch does so when it swaps the contents of tensors. Only
    # conversions that change the device need it.
    uninitialized.patch()
    future = torch.__future__

    def _apply(original: Callable, self: Module, fn: Callable, recurse: bool = True) -> Module:
        return uninitialized.convert(self, fn, lambda: swapping(original, self, fn, recurse))

    def swapping(original: Callable, self: Module, fn: Callable, recurse: bool) -> Module:
        if future.get_swap_module_params_on_conversion() or not _changes_device(self, fn):
            return original(self, fn, recurse)
        future.set_swap_module_params_on_conversion(True)
        # torch.export leaves weak references to parameters, at which `swap_tensors` stops. They
        # stay valid: the objects do.
        utils, weak = vars(torch.utils), torch.utils.weakref
        utils["weakref"] = types.SimpleNamespace(getweakrefs=lambda tensor: ())
        swap = utils["swap_tensors"]
        utils["swap_tensors"] = functools.partial(_swap_held, swap)
        try:
            return original(self, fn, recurse)
        finally:
            utils["weakref"] = weak
            utils["swap_tensors"] = swap
            future.set_swap_module_params_on_conversion(False)

    around(Module, "_apply", _apply)


def _swap_held(swap: Callable, *pair: torch.Tensor) -> None:
    """`swap_tensors` of parameters that an earlier result's graph has kept for its backward, at
    which it stops: it counts who holds them. A backward of that graph is an error."""
    for t in pair:
        t._use_count = min(t._use_count(), 1 + t.requires_grad).__int__
    try:
        swap(*pair)
    finally:
        for t in pair:
            del t._use_count


def patch_fully_shard() -> None:
    """Where the device is called "xla", `fully_shard` looks for parameters on the device that its
    mesh, of "hlo", names."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard

    def device(original: Callable, mesh: Any) -> torch.device:
        return PLACE.device if mesh.device_type in PLACE.names else original(mesh)

    for holder in (_fsdp_init, _fully_shard):
        around(holder, "_get_device_from_mesh", device)


def _changes_device(module: Module, fn: Callable) -> bool:
    """True if `fn` moves the module's parameters to or from the hlo device; tried on an empty
    tensor."""
    first = next((p for p in module.parameters() if not torch.nn.parameter.is_lazy(p)), None)
    if first is None:
        return False
    try:
        with torch.no_grad():
            probe = fn(first.detach().new_empty(0))
        return PLACE.has(probe) != PLACE.has(first)
    except Exception:
        return False


def _patch_default_dtype(changed: Callable[[], None]) -> None:
    def set_default(original: Callable, *args: object) -> None:
        original(*args)
        changed()

    around(torch._C, "_set_default_dtype _set_default_tensor_type", set_default)


def _patch_pinned() -> None:
    # DistributedDataParallel wants its counts pinned, and any memory of the CPU counts as pinned
    # (registration.py). To other libraries, through DLPack, it is the CPU's nevertheless.
    def device(original: Callable, self: torch.Tensor) -> tuple[object, int]:
        return (DLDeviceType.kDLCPU, 0) if self.device.type == "cpu" else original(self)

    around(torch.Tensor, "__dlpack_device__", device)


def _patch_data_parallel(synchronize: Callable[[], None]) -> None:
    """DistributedDataParallel(device_ids=[rank]) copies its inputs on a stream of that number, of
    as many as there are devices here: this process has one. init_process_group(device_id=...) asks
    for a back end of the device: collectives of its tensors find their own way. What asks a group
    for its back end of the device gets gloo, and a group that names none has it for tensors of the
    CPU, too: those of the device go through them."""
    if not torch.distributed.is_available():
        return
    backend = torch.distributed.Backend
    backend.default_device_backend_map[NAME] = backend.GLOO
    backend.backend_capability[backend.GLOO].append(NAME)
    import torch.distributed.device_mesh as mesh
    import torch.distributed.utils as holder

    def move(original: Callable, inputs: object, device: torch.device, side_stream: bool) -> object:
        if device.type in PLACE.names:
            device, side_stream = PLACE.device, False
        return original(inputs, device, side_stream)

    around(holder, "_recursive_to", move)

    def begin(
        init: Callable,
        backend: str | None = None,
        *args: object,
        device_id: Any = None,
        **kwargs: object,
    ) -> None:
        own = isinstance(device_id, torch.device) and device_id.type in PLACE.names
        if backend is None and torch.accelerator.current_accelerator() == torch.device(NAME):
            backend = "gloo"
        init(backend, *args, device_id=None if own else device_id, **kwargs)

    def destroy(end: Callable, *args: object, **kwargs: object) -> None:
        if sys.exc_info()[0] is None:  # others wait for what this process recorded
            synchronize()
        end(*args, **kwargs)

    holders = torch.distributed, torch.distributed.distributed_c10d, mesh
    for module in holders:
        around(module, "init_process_group", begin)
    for module in holders[:2]:
        around(module, "destroy_process_group", destroy)


# Methods of ProcessGroup that wait for other processes.
_TOGETHER = (
    "_allgather_base allgather allreduce alltoall alltoall_base barrier broadcast gather recv"
    " recv_anysource reduce reduce_scatter scatter send"
)


def _patch_waiting(tensor_class: type, start: Callable[[], None]) -> None:
    """Collectives of this device are recorded, and may not have begun where a process waits for
    others with tensors of the CPU. Another one may be waiting for them there: they start before."""
    if not torch.distributed.is_available():
        return

    def together(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        given: Any = args
        while isinstance(given, (list, tuple)) and given:
            given = given[0]
        if type(given) is not tensor_class:
            start()
        return original(self, *args, **kwargs)

    around(torch.distributed.ProcessGroup, _TOGETHER, together)


def _patch_accelerator(module: types.ModuleType) -> None:
    # The C++ side of these wants a C++ backend.
    accelerator = torch.accelerator

    def led(replacement: Callable, original: Callable, *args: object, **kwargs: object) -> object:
        return (replacement if PLACE.leads() else original)(*args, **kwargs)

    names = (
        "empty_cache empty_host_cache memory_stats memory_allocated max_memory_allocated"
        " memory_reserved max_memory_reserved reset_accumulated_memory_stats"
        " reset_peak_memory_stats synchronize current_stream set_stream get_memory_info"
        " set_device_index set_device_idx current_device_index current_device_idx"
    ).split()
    ours = {name: getattr(module, name) for name in names}
    ours["get_device_capability"] = module.accelerator_capability
    for name, replacement in ours.items():
        for holder in (accelerator, accelerator.memory):
            if hasattr(holder, name):
                around(holder, name, functools.partial(led, replacement))
