"""The modules of torch_xla, and where their names are.

A row of MODULES names the modules that have the names, in this folder or elsewhere. REFUSED says
what we do not offer, and what to use."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

import torch

# Module of torch_xla (behind "torch_xla.") -> modules, of this folder unless they begin with torch.
MODULES: dict[str, str] = {
    "": "xla_top spawning stablehlo_export",
    "_XLAC": "internals precision",
    "_dynamo": "",
    "_dynamo.config": "",
    "_dynamo.dynamo_bridge": "",
    "_internal": "",
    "_internal.pjrt": "spawning",
    "_internal.tpu": "hardware",
    "_internal.jax_workarounds": "",
    "amp": "precision",
    "amp.autocast_mode": "precision",
    "amp.syncfree": "torch.optim",
    "backends": "precision",
    "core": "",
    "core.functions": "functions",
    "core.xla_builder": "",
    "core.xla_env_vars": "utilities",
    "core.xla_model": "xla_model communication closures",
    "core.xla_op_registry": "",
    "debug": "",
    "debug.metrics": "counters torch_hlo.metrics",
    "debug.model_comparator": "",
    "debug.profiler": "trace_events",
    "distributed": "",
    "distributed.data_parallel": "",
    "distributed.fsdp": "fully_sharded",
    "distributed.fsdp.utils": "fully_sharded",
    "distributed.fsdp.wrap": "fully_sharded torch.distributed.fsdp.wrap",
    "distributed.fsdp.xla_fully_sharded_data_parallel": "fully_sharded",
    "distributed.parallel_loader": "loading",
    "distributed.spmd": "sharding_names",
    "distributed.spmd.api": "sharding_names",
    "distributed.spmd.debugging": "sharding_names",
    "distributed.spmd.xla_sharded_tensor": "sharding_names",
    "distributed.spmd.xla_sharding": "sharding_names",
    "distributed.xla_backend": "spawning",
    "distributed.xla_multiprocessing": "spawning",
    "distributed.zero_redundancy_optimizer": "",
    "experimental": "experimental_names",
    "experimental.assume_pure": "experimental_names",
    "experimental.callback": "",
    "experimental.custom_kernel": "experimental_names",
    "experimental.distributed_checkpoint": "sharding_names",
    "experimental.eager": "experimental_names",
    "experimental.fori_loop": "experimental_names",
    "experimental.gradient_accumulation": "experimental_names",
    "experimental.plugins": "hardware",
    "experimental.scan": "experimental_names",
    "experimental.scan_layers": "experimental_names",
    "experimental.spmd_fully_sharded_data_parallel": "fully_sharded",
    "experimental.splash_attention": "",
    "runtime": "hardware",
    "stablehlo": "stablehlo_export",
    "test": "",
    "test.test_utils": "utilities",
    "utils": "",
    "utils.checkpoint": "experimental_names",
    "utils.closures": "closures",
    "utils.dlpack": "torch_hlo torch.utils.dlpack",
    "utils.serialization": "utilities",
    "utils.utils": "utilities",
}

_TEXT = "write HLO text and run it with torch_hlo.run_text"
_DYNAMO = 'use torch.compile(model, backend="hlo")'
_PALLAS = "TPU kernels need a TPU; use torch.nn.functional.scaled_dot_product_attention"
# What torch_xla has and we do not offer -> what to use.
REFUSED: dict[str, str] = {
    "_dynamo.dynamo_bridge": _DYNAMO,
    "_dynamo.config": _DYNAMO,
    "_internal.jax_workarounds": "JAX is not part of this package; give it HLO text",
    "core.xla_builder": _TEXT,
    "core.xla_op_registry": _TEXT,
    "core.xla_model.send": "use torch.distributed.send",
    "core.xla_model.recv": "use torch.distributed.recv",
    "debug.model_comparator": "use torch.testing.assert_close",
    "distributed.data_parallel": "threads per device are gone; use torch_xla.launch",
    "distributed.zero_redundancy_optimizer": "use torch_hlo.distributed.zero1, or"
    " torch.distributed.optim.ZeroRedundancyOptimizer",
    "experimental.callback": "call torch_xla.sync() and read the tensor",
    "experimental.splash_attention": _PALLAS,
}


class Names(types.ModuleType):
    """A module of torch_xla: its names are looked up in ours."""

    def __init__(self, name: str, sources: str):
        super().__init__(f"torch_xla.{name}" if name else "torch_xla")
        self.__path__: list[str] = []  # a package: other modules may stand below it
        self._row, self._sources = name, tuple(sources.split())

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__version__":  # asked of every module
            raise AttributeError(name)
        for source in self._sources:
            if name in (names := _names(source)):
                return names[name]
        full = f"{self._row}.{name}".removeprefix(".")
        advice = REFUSED.get(full) or REFUSED.get(self._row)
        if advice:
            raise NotImplementedError(f"torch_xla.{full}: torch_hlo does not offer it; {advice}")
        raise AttributeError(
            f"torch_hlo offers no {name!r} in {self.__name__}; there are"
            f" {', '.join(n for n in dir(self) if n[0] != '_' or self._row == '_XLAC')}"
        )

    def __dir__(self) -> list[str]:
        below = [k for k in vars(self) if not k.startswith("_")]
        return sorted({*below, *(n for s in self._sources for n in _names(s))})


_OTHERS = ("__future__", "builtins", "collections", "typing", "torch_hlo.compat.modules")


@functools.cache
def _names(name: str) -> dict[str, Any]:
    """The names of a module of this folder, without the modules and types that it works with."""
    found = vars(
        importlib.import_module(name if name.startswith("torch") else f"torch_hlo.compat.{name}")
    )
    return {
        k: v
        for k, v in found.items()
        if (not k.startswith("__") or k == "__version__")
        and not isinstance(v, (types.ModuleType, torch.dtype))
        and not str(getattr(v, "__module__", "")).startswith(_OTHERS)
    }


def install():
    """Put the modules where `import` looks first."""
    for row, sources in MODULES.items():
        module = Names(row, sources)
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
