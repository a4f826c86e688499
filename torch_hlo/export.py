"""torch.export programs as HLO and StableHLO text.

    ep = torch.export.export(model, (x,))
    text = torch_hlo.export.to_stablehlo_text(ep)
    results = torch_hlo.run_text(text, *torch_hlo.export.inputs(ep, x))     # parameters and buffers, then what the caller gives
    text = torch_hlo.export.to_hlo_text(ep, embed=True)                     # or with the weights inside the text
    results = torch_hlo.run_text(text, x)

The program's parameters are the exported graph's: weights, buffers and constants by signature, then the user's tensors, all
row-major; if it draws random numbers, a seed (s64) follows. Results are new values of mutated buffers and inputs, then the user's.
"""
from __future__ import annotations

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from torch_hlo.hlo import build
from torch_hlo.hlo.dim import Dim
from torch_hlo.hlo.ir import Computation, Instruction, Module, instr, postorder
from torch_hlo.hlo.match import inline
from torch_hlo.hlo.shape import Literal
from torch_hlo.hlo.stablehlo import stablehlo_text
from torch_hlo.hlo.text import module_text
from torch_hlo.lowering.fx import FxGraph, from_fx
from torch_hlo.lowering.fx_size import shape_of
from torch_hlo.lowering.graph import Leaf, Out, lower
from torch_hlo.lowering.registry import LOWERINGS, LoweringError


def to_hlo_text(ep: ExportedProgram, embed: bool = False) -> str:
    """HLO text, which XLA's parser reads as well. `embed`: parameters and buffers become constants.

    Raises LoweringError naming the op that a program cannot hold, or a result that is not a tensor or number.
    """
    return module_text(to_module(ep, embed))


def to_stablehlo_text(ep: ExportedProgram, embed: bool = False) -> str:
    """StableHLO text, see to_hlo_text. Raises WriteError for what StableHLO cannot say."""
    return stablehlo_text(to_module(ep, embed))


def to_module(ep: ExportedProgram, embed: bool = False) -> Module:
    """The program as a Module; dynamic dimensions are symbols."""
    ep = _functional(ep)
    graph_module = _row_major(ep.graph_module)
    graph = from_fx(graph_module)
    leaves = [i.leaf for i in graph.inputs]
    values = _weights(ep)
    constants: dict[int, torch.Tensor] = {
        i: x.source for i, x in enumerate(graph.inputs) if isinstance(x.source, torch.Tensor)
    } | {i: values[x.source] for i, x in enumerate(graph.inputs) if embed and type(x.source) is int and x.source in values}
    tensors = [value for value, _ in graph.outputs if isinstance(value, (Out, Leaf))]
    module = lower(graph.nodes, tensors, leaves, (), "exported", _symbols(graph))
    used = set(postorder((module.entry.root,)))
    kept = [i for i, x in enumerate(graph.inputs) if i not in constants and (x.source is not None or module.entry.params[i] in used)]
    params = [instr("parameter", (), module.entry.params[i].shape, index=n) for n, i in enumerate(kept)]
    swaps = dict(enumerate(module.entry.params)) | {i: _constant(t) for i, t in constants.items()} | dict(zip(kept, params, strict=True))
    root = inline(module.entry, [swaps[i] for i in range(len(leaves))])
    parts = iter(root.operands)
    results = [next(parts) if isinstance(value, (Out, Leaf)) else _number(value) for value, _ in graph.outputs if value is not None]
    symbols = tuple((name, kept.index(i), d) for name, i, d in module.symbols)
    return Module("exported", Computation("main", tuple(params), build.tuple_(*results)), (), symbols)


def inputs(ep: ExportedProgram, *args, **kwargs) -> list:
    """What a program written without `embed` is run on: the weights and constants, then the tensors in `args` and `kwargs`."""
    ep = _functional(ep)
    weights = _weights(ep)
    given = iter(v for v in pytree.tree_leaves((args, kwargs)))
    found = []
    for i, spec in enumerate(ep.graph_signature.input_specs):
        value = weights[i] if i in weights else next(given, None) if spec.kind == InputKind.USER_INPUT else None
        if isinstance(value, torch.Tensor):
            found.append(value.detach())
        elif type(value) is float and not isinstance(getattr(spec.arg, "value", None), float):
            found.append(value)
    return found


def _functional(ep: ExportedProgram) -> ExportedProgram:
    """Mutations become results, and operators without a lowering what they are made of."""
    table = torch.export.default_decompositions()
    for op in [op for op in table if op in LOWERINGS]:
        del table[op]
    return ep.run_decompositions(table)


def _weights(ep: ExportedProgram) -> dict[int, torch.Tensor]:
    """Position of a placeholder -> the parameter, buffer or constant tensor it stands for."""
    found = {}
    for i, spec in enumerate(ep.graph_signature.input_specs):
        if spec.target is not None:
            value = ep.state_dict.get(spec.target)
            value = ep.constants.get(spec.target) if value is None else value
            if isinstance(value, torch.Tensor):
                found[i] = value
    return found


def _row_major(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Placeholders as the text declares them: whatever the example inputs' strides were, arrays of a program are row-major."""
    for n in module.graph.find_nodes(op="placeholder"):
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            n.meta["val"] = value.clone(memory_format=torch.contiguous_format)
    return module


def _symbols(graph: FxGraph) -> tuple[tuple[str, int, int], ...]:
    """Where the value of each symbol is read: (name, parameter, dimension)."""
    found: dict[str, tuple[int, int]] = {}
    for i, x in enumerate(graph.inputs):
        for d, size in enumerate(x.leaf.shape.dims if isinstance(x.leaf, Leaf) else ()):
            if isinstance(size, Dim) and str(size).isidentifier():
                found.setdefault(str(size), (i, d))
    missing = sorted(set(graph.sizes) - set(found))
    if missing:
        raise LoweringError(f"size {missing[0]} is an input of its own and no dimension of a tensor: export with that number fixed")
    return tuple((name, i, d) for name, (i, d) in sorted(found.items()))


def _constant(tensor: torch.Tensor) -> Instruction:
    shape = shape_of(tensor)
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return build.constant(Literal(shape.dtype, tuple(shape.dims), np.ascontiguousarray(data).tobytes()), shape.dtype)


def _number(value) -> Instruction:
    """A number among the results."""
    if isinstance(value, (bool, int, float)):
        return build.constant(value, {bool: "pred", int: "s64", float: "f64"}[type(value)])
    raise LoweringError(f"result {value!r} of type {type(value).__name__} is not a tensor: return it as one")


__all__ = ["inputs", "to_hlo_text", "to_module", "to_stablehlo_text"]
