"""torch_xla.stablehlo: exported programs as StableHLO text, in memory and in a folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torch_hlo
from torch_hlo import export


@dataclass
class StableHLOExportOptions:
    include_human_readable_text: bool = True
    override_tracing_arguments: Any = None
    override_tracing_kwargs: Any = None
    save_weights: bool = True
    inline_all_constant: bool = True
    export_weights: bool = True
    custom_ops_allowed_in_graph: set[str] = field(default_factory=set)
    export_node_metadata: bool = False


class StableHLOGraphModule:
    """A program that can be called, read and saved."""

    def __init__(self, program, options=None):
        self._program = program
        self._weights = options is None or options.export_weights
        self._text = export.to_stablehlo_text(program)

    def __call__(self, *args):
        found = torch_hlo.run_text(self._text, *export.inputs(self._program, *args))
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        spec = self._program.call_spec.out_spec
        changed = len(results) - spec.num_leaves  # new values of buffers come first
        return pytree.tree_unflatten([torch.as_tensor(r) for r in results[changed:]], spec)

    def evaluate(self, method_name, args):
        return self(*args)

    def get_stablehlo_text(self, method_name=None):
        return self._text

    def get_stablehlo_bytecode(self, method_name=None):
        return export.to_portable_artifact(self._program)

    def save(self, directory_path, options=None):
        """The text, and the exported program with its weights, which `load` needs."""
        folder = Path(directory_path)
        (folder / "functions").mkdir(parents=True, exist_ok=True)
        (folder / "functions" / "forward.mlir").write_text(self._text)
        if self._weights and (options is None or options.save_weights):
            torch.export.save(self._program, folder / "program.pt2")

    @classmethod
    def load(cls, directory_path):
        return cls(torch.export.load(Path(directory_path) / "program.pt2"))


def exported_program_to_stablehlo(exported_model, options=None):
    return StableHLOGraphModule(exported_model, options)


def save_as_stablehlo(
    exported_model,
    stablehlo_dir,
    options=None,
):
    StableHLOGraphModule(exported_model, options).save(stablehlo_dir, options)


def save_torch_model_as_stablehlo(
    torchmodel,
    args,
    path,
    options=None,
):
    save_as_stablehlo(torch.export.export(torchmodel, args), path, options)
