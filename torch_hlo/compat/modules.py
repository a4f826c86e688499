"""The modules of torch_xla, and where their names are.

A row of MODULES names the modules that have the names, in this folder or elsewhere. REFUSED says
what we do not offer, and what to use."""

import functools
import importlib
import importlib.machinery
import sys
import types

import torch

# Modules of torch_xla (behind "torch_xla.") by where their names are: in modules of this folder, or
# in those that begin with torch. The first have no names, or only refused ones.
_FAMILIES: dict[str, str] = {
    "": """
        _dynamo _dynamo.config _dynamo.dynamo_bridge _internal _internal.jax_workarounds core
        core.xla_builder core.xla_op_registry debug debug.graph_saver debug.metrics_compare_utils
        debug.metrics_saver debug.model_comparator distributed distributed.data_parallel
        experimental.dynamo_set_buffer_donor
        experimental.mark_pattern_utils experimental.pjrt_backend experimental.splash_attention
        experimental.stablehlo_custom_call experimental.unbounded_dynamism_export
        experimental.xla_dynamic_reshape_ops experimental.xla_marker
        experimental.xla_mlir_debuginfo test tf_saved_model_integration utils
        utils.buffer_donor_context utils.keyd_queue
    """,
    "checkpoint_names": """
        experimental.distributed_checkpoint experimental.distributed_checkpoint._helpers
        experimental.distributed_checkpoint.manager experimental.distributed_checkpoint.planners
        experimental.distributed_checkpoint.util
    """,
    "closures": "experimental.callback utils.closures",
    "experimental_names": """
        experimental experimental.assume_pure experimental.custom_kernel experimental.eager
        experimental.fori_loop experimental.gradient_accumulation experimental.scan
        experimental.scan_layers utils.checkpoint
    """,
    "fully_sharded": """
        distributed.fsdp distributed.fsdp.consolidate_sharded_ckpts
        distributed.fsdp.state_dict_utils distributed.fsdp.utils
        distributed.fsdp.xla_fully_sharded_data_parallel
        distributed.zero_redundancy_optimizer experimental.spmd_fully_sharded_data_parallel
    """,
    "fully_sharded torch.distributed.fsdp.wrap": "distributed.fsdp.wrap",
    "functions": "core.functions",
    "hardware": "_internal.tpu experimental.plugins experimental.tpu runtime",
    "hardware spawning communication": "experimental.pjrt",
    "internals": "_dynamo.dynamo_backend2",
    "internals precision": "_XLAC",
    "loading": "distributed.parallel_loader",
    "precision": """
        amp amp.autocast_mode amp.syncfree amp.syncfree.adam amp.syncfree.adamw amp.syncfree.sgd
        backends
    """,
    "sharding_names": """
        distributed.spmd distributed.spmd.api distributed.spmd.debugging
        distributed.spmd.xla_sharded_tensor distributed.spmd.xla_sharding
    """,
    "spawning": "_internal.pjrt distributed.xla_backend distributed.xla_multiprocessing",
    "stablehlo_export": "stablehlo",
    "torch.ao.quantization.fx.convert precision": "experimental.xla_quantized_matmul",
    "torch.nn": "experimental.gru",
    "torch_hlo torch.utils.dlpack": "utils.dlpack",
    "trace_events": "debug.profiler",
    "trace_events torch_hlo.metrics": "debug.metrics",
    "utilities": """
        core.xla_env_vars experimental.deprecation test.test_utils utils.serialization utils.utils
    """,
    "xla_model communication closures": "core.xla_model",
}
# Module of torch_xla -> where its names are; a parent stands before what is below it.
MODULES = {
    "": "xla_top spawning stablehlo_export",
    **dict(sorted((name, k) for k, names in _FAMILIES.items() for name in names.split())),
}

_TEXT = "write HLO text and run it with torch_hlo.run_text"
_DYNAMO = 'use torch.compile(model, backend="hlo")'
_DYNAMIC = "use torch.export with dynamic_shapes, and torch_hlo.export.to_stablehlo_text"
_BUNDLE = "a program is a torch.export.ExportedProgram, and StableHLO text"
_MEMORY = "memory is used again without being told"
_PALLAS = "TPU kernels need a TPU; use torch.nn.functional.scaled_dot_product_attention"
_KERNELS = (
    "FlashAttention GMM fa_custom_backward fa_custom_forward gmm gmm_backward jax_import_guard"
    " make_kernel_from_pallas multi_queries_paged_attention paged_attention quantized_matmul_int8"
    " ragged_paged_attention tgmm trace_pallas"
)
_PARTS = (
    "InputLocation StableHLOFunc StableHLOFunctionMeta StableHLOModelBundle VariableSignature"
    " VariableType XLAExportInterpreter"
)
# What torch_xla has and we do not offer -> what to use.
REFUSED: dict[str, str] = {
    "_dynamo.dynamo_bridge": _DYNAMO,
    "_dynamo.config": _DYNAMO,
    "_internal.jax_workarounds": "JAX is not part of this package; give it HLO text",
    "core.xla_builder": _TEXT,
    "core.xla_op_registry": _TEXT,
    "core.xla_model.send": "use torch.distributed.send",
    "core.xla_model.recv": "use torch.distributed.recv",
    "core.xla_model.DeviceContext": "a process has one device",
    "debug.graph_saver": "use torch_hlo.debug.hlo_text",
    "debug.metrics_compare_utils": "use torch_hlo.metrics.metric_data",
    "debug.metrics_saver": "print torch_hlo.metrics.metrics_report()",
    "debug.model_comparator": "use torch.testing.assert_close",
    "debug.profiler.trace": "there is no profiler server: call trace_detached, or start_trace and"
    " stop_trace, in the process",
    "distributed.data_parallel": "threads per device are gone; use torch_xla.launch",
    **{f"experimental.custom_kernel.{name}": _PALLAS for name in _KERNELS.split()},
    "experimental.dynamo_set_buffer_donor": _MEMORY,
    "experimental.scan.value_and_grad_partitioned": "torch_hlo.scan has gradients",
    "experimental.splash_attention": _PALLAS,
    "experimental.mark_pattern_utils": "patterns are found without marks",
    "experimental.stablehlo_custom_call": _TEXT,
    "experimental.unbounded_dynamism_export": _DYNAMIC,
    "experimental.xla_dynamic_reshape_ops": _DYNAMIC,
    "experimental.xla_marker": "patterns are found without marks",
    "experimental.xla_mlir_debuginfo": "TORCH_HLO_DUMP=folder writes the line of each operation",
    **{f"stablehlo.{name}": _BUNDLE for name in _PARTS.split()},
    "tf_saved_model_integration": "use torch_xla.stablehlo.save_as_stablehlo",
    "utils.buffer_donor_context": _MEMORY,
    "utils.keyd_queue": "use queue.Queue",
}


class Refused:
    """In place of a name that is not offered: scripts may import it, and not use it."""

    def __init__(self, text):
        self._text = text

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(self._text)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(self._text)


class Names(types.ModuleType):
    """A module of torch_xla: its names are looked up in ours."""

    def __init__(self, name, sources):
        super().__init__(f"torch_xla.{name}" if name else "torch_xla")
        self.__path__: list[str] = []  # a package: other modules may stand below it
        # who asks whether torch_xla is installed looks for it
        self.__spec__ = importlib.machinery.ModuleSpec(self.__name__, None, is_package=True)
        self._row, self._sources = name, tuple(sources.split())

    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":  # asked of every module
            raise AttributeError(name)
        for source in self._sources:
            if name in (names := _names(source)):
                return names[name]
        full = f"{self._row}.{name}".removeprefix(".")
        advice = REFUSED.get(full) or REFUSED.get(self._row)
        if advice:
            return Refused(f"torch_xla.{full}: torch_hlo does not offer it; {advice}")
        raise AttributeError(
            f"torch_hlo offers no {name!r} in {self.__name__}; there are"
            f" {', '.join(n for n in dir(self) if n[0] != '_' or self._row == '_XLAC')}"
        )

    def __dir__(self):
        below = [k for k in vars(self) if not k.startswith("_")]
        return sorted({*below, *(n for s in self._sources for n in _names(s))})


@functools.cache
def _names(name):
    """The names of a module of this folder, without the modules and types that it works with."""
    found = vars(
        importlib.import_module(name if name.startswith("torch") else f"torch_hlo.compat.{name}")
    )
    return {
        k: v
        for k, v in found.items()
        if (not k.startswith("__") or k == "__version__")
        and not isinstance(v, (types.ModuleType, torch.dtype))
        and not _foreign(v)
    }


def _foreign(value):
    known = isinstance(value, (type, types.FunctionType))
    return known and not value.__module__.startswith("torch")


class _Again:
    """Finds the modules for importlib.reload."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return target.__spec__ if isinstance(target, Names) else None


def install():
    """Put the modules where `import` looks first."""
    sys.meta_path.append(_Again)
    for row, sources in MODULES.items():
        module = Names(row, sources)
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
    top = sys.modules["torch_xla"]
    core = sys.modules["torch_xla.core"]
    top.xm, top.xr = core.xla_model, top.runtime
