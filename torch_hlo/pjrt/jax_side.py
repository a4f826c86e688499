"""What JAX is told beside the C API: that the plugin is there, which of its lowerings fit, and how
a program calls Python.

JAX promises none of the names that this file uses; all of them stand here.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from torch_hlo import collector
from torch_hlo.compiler.codegen.registry import host_call
from torch_hlo.device import dlpack
from torch_hlo.frameworks.hook import Row, install
from torch_hlo.hlo.ir import DTYPES, Shape

from .client import PLATFORM, Client
from .objects import CALLBACK


def initialize() -> None:
    """Called by JAX for each plugin that is installed."""
    from jax._src import config, distributed, xla_bridge

    if PLATFORM in xla_bridge._backend_factories:
        return
    with collector.paused():
        from . import arrays, executables  # noqa: F401  their functions fill the table
        from .functions import table

        collector.settle()
    state = distributed.global_state
    Client.asked = staticmethod(lambda: xla_bridge.num_cpu_devices.value)
    Client.processes = staticmethod(partial(_processes, state))
    Client.connect = staticmethod(lambda: _connect(state))
    xla_bridge.register_plugin(PLATFORM, priority=-100, c_api=table().capsule())
    if config.jax_platforms.value == PLATFORM:  # JAX's callbacks compute on its CPU
        config.update("jax_platforms", f"{PLATFORM},cpu")
    _lowerings()
    _callbacks()
    _inspection()
    _kept()
    _ahead()
    _between_processes()
    _dlpack((config.jax_platforms.value or "").startswith(PLATFORM))


_PATIENCE = 300_000  # milliseconds for which processes wait for each other
_CONNECTING = threading.Lock()  # several threads may compile


def _processes(state: Any, count: int) -> tuple[int, list[int]]:
    """The number of this process, which has `count` devices, and how many each of them has."""
    own = state.process_id
    if state.client is None:
        return own, [count]
    key = "torch_hlo/devices/"
    state.client.key_value_set(f"{key}{own}", str(count))
    numbers = range(state.num_processes)
    return own, [int(state.client.blocking_key_value_get(f"{key}{n}", _PATIENCE)) for n in numbers]


def _connect(state: Any) -> None:
    """The processes of jax.distributed become those of torch.distributed, which carries what their
    programs exchange. JAX's coordinator tells where the first one listens."""
    import torch.distributed as dist

    rank = state.process_id
    count = state.num_processes
    key = "torch_hlo/port"
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    with _CONNECTING:
        if dist.is_initialized():
            return
        if rank == 0:
            store = dist.TCPStore(host, 0, count, True, wait_for_workers=False)
            state.client.key_value_set(key, str(store.port))
        else:
            port = state.client.blocking_key_value_get(key, _PATIENCE)
            store = dist.TCPStore(host, int(port), count, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)


def _between_processes() -> None:
    """`jax.device_put` from the devices of some processes to those of others, which all call it."""
    from jax._src import dispatch

    def possible(rank: int, source: Any, target: Any) -> bool:
        a, b = source._internal_device_list, target._internal_device_list
        same = source._to_xla_hlo_sharding(rank) == target._to_xla_hlo_sharding(rank)
        return same and a.process_indices != b.process_indices

    dispatch._is_supported_cross_host_transfer = possible
    dispatch._DeferredCrossHostTransferArg = _Sent


class _Sent:
    """JAX would defer the copy. It makes the array: each shard is one message."""

    def __new__(cls, x: Any, target: Any, copy: Any) -> Any:
        import jax
        import torch
        import torch.distributed as dist

        Client.connect()
        own = {s.device: s.data for s in x.addressable_shards}
        parts = []
        for a, b in zip(x.sharding._device_assignment, target._device_assignment, strict=True):
            value = np.empty(x.sharding.shard_shape(x.shape), x.dtype)
            data = torch.from_numpy(value.reshape(-1).view(np.uint8))
            if a in own:
                value[...] = own[a]
            if b.process_index == dist.get_rank():
                if a not in own:
                    dist.recv(data, a.process_index)
                parts.append(jax.device_put(value, b))
            elif a in own:
                dist.send(data, b.process_index)
        return jax.make_array_from_single_device_arrays(x.shape, target, parts, dtype=x.dtype)


def _lowerings() -> None:
    """Lowerings of JAX for its CPU back end are good for us, also in programs that were exported;
    donated arrays are overwritten. Functions that say how they are partitioned are partitioned as
    everything else is."""
    from jax._src import core, custom_partitioning
    from jax._src.export import _export
    from jax._src.interpreters import mlir
    from jax._src.lax.control_flow import conditionals

    tables = mlir._platform_specific_lowerings
    tables[PLATFORM] = ChainMap({}, tables["cpu"])
    mlir._platforms_with_donation.append(PLATFORM)

    def call(ctx: Any, *args: Any, exported: Any) -> Any:
        if PLATFORM in ctx.module_context.platforms and PLATFORM not in exported.platforms:
            names = (PLATFORM if p == "cpu" else p for p in exported.platforms)
            exported = replace(exported, platforms=tuple(names))
        return _export._call_exported_lowering(ctx, *args, exported=exported)

    mlir.register_lowering(_export.call_exported_p, call)

    def partitioned(ctx: Any, *args: Any, **options: Any) -> Any:
        whole = core.jaxpr_as_fun(options["call"])
        return mlir.lower_fun(whole, multiple_results=True)(ctx, *args)

    function = custom_partitioning.custom_partitioning_p
    mlir.register_lowering(function, partitioned, platform=PLATFORM)

    def named(platforms: Any) -> Any:
        """What is for the CPU is for us, where nothing is for all others."""
        if None in platforms or any(PLATFORM in some for some in platforms):
            return platforms
        return tuple((*some, PLATFORM) if "cpu" in some else some for some in platforms)

    def lowered(rule: Callable[..., Any], ctx: Any, *args: Any, **options: Any) -> Any:
        both = options.keys() & {"platforms", "branches_platforms"}
        return rule(ctx, *args, **options | {key: named(options[key]) for key in both})

    for primitive, rule in (
        (conditionals.platform_index_p, conditionals._platform_index_lowering),
        (conditionals.cond_p, conditionals._cond_lowering),
    ):
        mlir.register_lowering(primitive, partial(lowered, rule))

    def interpreted(pallas: Any, name: str) -> bool:
        rule = getattr(pallas, name)  # the one for "cpu"
        mlir.register_lowering(pallas.mpmd_map_p, rule, platform=PLATFORM)
        return True

    install((Row("jax._src.pallas.mpmd", "_mpmd_map_fallback_lowering", interpreted),))


def _inspection() -> None:
    """The functions of `jax.debug.inspect_array_sharding` by what their calls carry, which is
    an address to XLA."""
    from jax._src.lib import xla_client

    original = xla_client.encode_inspect_sharding_callback
    alive: WeakValueDictionary[str, Callable[..., None]] = WeakValueDictionary()

    def encode(function: Callable[..., None]) -> bytes:
        key = original(function)
        alive[key.decode("utf-8", "surrogateescape")] = function
        return key

    def inspect(key: str, sharding: str) -> None:
        if (function := alive.get(key)) is not None:
            function(xla_client.HloSharding.from_string(sharding))

    xla_client.encode_inspect_sharding_callback = encode
    Client.inspect = staticmethod(inspect)


def _kept() -> None:
    """JAX keeps the compiled programs of platforms that it knows by name, such as its CPU."""
    from jax._src import compilation_cache as cache

    original = cache.is_cache_used
    known = SimpleNamespace(platform="cpu")
    cache.is_cache_used = lambda x: original(known if x.platform == PLATFORM else x)


def _ahead() -> None:
    """JAX holds Python's lock, which our compiler needs, while it compiles for the devices of a
    topology. So the devices that are here stand for those."""
    from jax._src import compiler, xla_bridge
    from jax._src.lib import xla_client

    original = compiler.backend_compile_and_load

    def compiled(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
        if backend.platform == PLATFORM:
            callbacks = []  # which call themselves, see Callback; JAX wants to know that some are
        if backend.platform == PLATFORM and backend.runtime_type == "compile_only_runtime":
            backend = xla_bridge.get_backend(PLATFORM)
            here = backend.devices()
            devices = xla_client.DeviceList(tuple(here[d.id] for d in devices))
        return original(backend, module, devices, options, callbacks)

    compiler.backend_compile_and_load = compiled


_HOST = (dlpack.CPU, 0)
_NAMES = {row.torch: row.name for row in DTYPES.values() if row.torch}  # NumPy's are the same


def _dlpack(is_default: bool) -> None:
    """Our arrays are in the host's memory, as DLPack names it; what comes from there becomes ours
    where this is JAX's first platform."""
    from jax._src import array, dlpack as theirs

    kind = array.ArrayImpl
    device = kind.__dlpack_device__
    pack = kind.__dlpack__

    def dlpack_device(x: Any) -> tuple[Any, int]:
        ours = x.platform() == PLATFORM and len(x.devices()) == 1
        return (theirs.DLDeviceType.kDLCPU, 0) if ours else device(x)

    def dlpack_pack(x: Any, *, dl_device: Any = None, copy: bool | None = None, **rest: Any) -> Any:
        here = None if x.platform() in (PLATFORM, "cpu") and dl_device == _HOST else dl_device
        if x.platform() != PLATFORM or here is not None or len(x.devices()) != 1:
            return pack(x, dl_device=here, copy=copy, **rest)
        if x.dtype.name not in _NAMES:
            raise BufferError(f"DLPack has no type for {x.dtype.name}")
        # a view: no program overwrites what it looks at
        held = [np.array(x, order="C") if copy else np.asarray(x, order="C")]
        shape = Shape(_NAMES[x.dtype.name], x.shape)
        return dlpack.export(dlpack.Array(held[0].ctypes.data, shape, _HOST), held.clear)

    unpack = theirs._jax.dlpack_managed_tensor_to_buffer

    def dlpack_unpack(tensor: Any, to: Any, stream: Any, copy: Any = None, *rest: Any) -> Any:
        """What jaxlib copies with, the C API does not have."""
        ours = copy and to.platform == PLATFORM
        x = unpack(tensor, to, stream, not ours and copy, *rest)
        return x.copy().block_until_ready() if ours else x

    kind.__dlpack_device__, kind.__dlpack__ = dlpack_device, dlpack_pack
    theirs._jax.dlpack_managed_tensor_to_buffer = dlpack_unpack
    if is_default:
        theirs._DL_DEVICE_TO_PLATFORM[theirs.DLDeviceType.kDLCPU] = PLATFORM


_NARROW = frozenset(("int2", "int4", "uint2", "uint4"))  # NumPy's have unused bits


class Callback:
    """A Python function that a program calls: arrays in, a sequence of arrays out."""

    alive: WeakValueDictionary[int, Callback] = WeakValueDictionary()  # JAX's programs keep them
    count = 0

    def __init__(self, function: Callable[..., Sequence[Any]], names: Sequence[str]) -> None:
        self.function = function
        self.dtypes = [np.dtype(n) for n in names]  # of the arguments
        self.number = Callback.count
        Callback.count += 1
        self.alive[self.number] = self


@host_call(CALLBACK)
def _call(outputs: list[np.ndarray], inputs: list[np.ndarray], opaque: str) -> None:
    """The last output says that the call has been made: programs with an effect wait for it."""
    found = Callback.alive[int(opaque)]
    values = [np.array(x).view(d) for x, d in zip(inputs, found.dtypes)]
    for value in values:
        value.flags.writeable = False
    for to, value in zip(outputs[:-1], found.function(*values), strict=True):
        made = np.asarray(value)
        to[...] = made if made.dtype.name in _NARROW else made.view(to.dtype)
    outputs[-1][...] = True


def _callbacks() -> None:
    from jax._src import callback as theirs
    from jax._src.dtypes import canonicalize_value
    from jax._src.interpreters import mlir
    from jax.interpreters import mlir as public

    original = theirs.emit_python_callback

    def emit(
        ctx: Any,
        callback: Callable[..., Sequence[Any]],
        token: Any,
        operands: Sequence[Any],
        operand_avals: Sequence[Any],
        result_avals: Sequence[Any],
        **options: Any,
    ) -> tuple[Sequence[Any], Any, Any]:
        """The names of its arguments are JAX's, which uses them."""
        if tuple(ctx.module_context.platforms) != (PLATFORM,):
            given = ctx, callback, token, operands, operand_avals, result_avals
            return original(*given, **options)

        def checked(*arguments: np.ndarray) -> Sequence[np.ndarray]:
            values = [canonicalize_value(np.asarray(v)) for v in callback(*arguments)]
            _check(values, result_avals)
            return values

        made = Callback(checked, [a.dtype.name for a in operand_avals])
        ctx.module_context.add_keepalive(made)
        ctx.module_context.add_host_callback(made)  # no persistent cache for this program
        types = [mlir.aval_to_ir_type(ctx.module_context, a) for a in result_avals]
        done = mlir.ir.RankedTensorType.get([], mlir.ir.IntegerType.get_signless(1))
        barrier = mlir.hlo.OptimizationBarrierOp
        if token is not None:  # calls in order: one needs what the other has done
            token, after = barrier([token, mlir.ir_constant(np.bool_(True))]).results
            operands = [*operands, after]
        call = mlir.custom_call(
            CALLBACK,
            result_types=[*types, done],
            operands=operands,
            backend_config=str(made.number),
            has_side_effect=options["has_side_effect"],
        )
        if (sharding := options.get("sharding")) is not None:
            mlir.set_sharding(ctx.module_context, call, _with_one_more(sharding, len(types)))
        if token is not None:
            token = barrier([token, call.results[-1]]).results[0]
        return list(call.results)[:-1], token, made

    theirs.emit_python_callback = public.emit_python_callback = emit
    _buffer_callbacks(emit)


class Buffer(np.ndarray):
    """What a function of `buffer_callback` gets for an array."""

    @property
    def writeable(self) -> bool:
        return self.flags.writeable


def _buffer_callbacks(emit: Callable[..., Any]) -> None:
    """Functions that write their results into arrays are called as others are."""
    from jax import tree
    from jax._src import buffer_callback as theirs
    from jax._src.interpreters import mlir
    from jax.errors import JaxRuntimeError

    class Context:
        stage = theirs.ExecutionStage.EXECUTE

        @property
        def stream(self) -> int:
            raise JaxRuntimeError(
                "XLA FFI GPU context is not available: these arrays are in memory"
            )

    def lowering(ctx: Any, *args: Any, **options: Any) -> Any:
        def function(*arrays: np.ndarray) -> list[np.ndarray]:
            results = [np.empty(a.shape, a.dtype) for a in ctx.avals_out]
            for i, o in options["input_output_aliases"]:
                results[o] = arrays[i].view()
                results[o].flags.writeable = True
            given, out = ([a.view(Buffer) for a in some] for some in (arrays, results))
            positional, named = tree.unflatten(options["in_tree"], given)
            out = tree.unflatten(options["out_tree"], out)
            if options["callback"](Context(), out, *positional, **named) is not None:
                raise ValueError("buffer_callback callback must not return any values.")
            return results

        return emit(
            ctx,
            function,
            None,
            args,
            ctx.avals_in,
            ctx.avals_out,
            has_side_effect=options["has_side_effect"],
        )[0]

    mlir.register_lowering(theirs.buffer_callback_p, lowering, platform=PLATFORM)


def _with_one_more(sharding: Any, results: int) -> Any:
    """For the result that says that the call has been made. Calls without results have one
    already."""
    shardings = getattr(sharding, "shardings", None)
    if not shardings or not results:
        return sharding
    ids = shardings[0].logical_device_ids
    last = type(shardings[0])(mesh_shape=(), dim_shardings=(), logical_device_ids=ids)
    return type(sharding)((*shardings, last))


def _check(values: Sequence[np.ndarray], avals: Sequence[Any]) -> None:
    if len(values) != len(avals):
        raise RuntimeError(
            "Mismatched number of outputs from callback. Expected:"
            f" {len(avals)}, Actual: {len(values)}"
        )
    for i, (value, aval) in enumerate(zip(values, avals)):
        for what in ("shape", "dtype"):
            if getattr(value, what) != getattr(aval, what):
                raise RuntimeError(
                    f"Incorrect output {what} for return value #{i}: Expected:"
                    f" {getattr(aval, what)}, Actual: {getattr(value, what)}"
                )
