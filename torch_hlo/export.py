"""torch.export programs as HLO and StableHLO text.

    ep = torch.export.export(model, (x,))
    text = torch_hlo.export.to_stablehlo_text(ep)
    # parameters and buffers, then what the caller gives
    results = torch_hlo.run_text(text, *torch_hlo.export.inputs(ep, x))
    text = torch_hlo.export.to_hlo_text(ep, embed=True)   # or with the weights inside the text
    results = torch_hlo.run_text(text, x)
    data = torch_hlo.export.to_portable_artifact(ep)      # StableHLO as bytes, for any consumer

The program's parameters are the exported graph's: weights, buffers and constants by signature, then
the user's tensors, all row-major; if it draws random numbers, a seed (s64) follows. Results are new
values of mutated buffers and inputs, then the user's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec
from torch.utils import _pytree as pytree

from torch_hlo.compiler.simplify.legalize import legalize
from torch_hlo.frozen import frozen
from torch_hlo.hlo.bytecode import portable_artifact
from torch_hlo.hlo.ir import (
    Computation,
    Dim,
    Instruction,
    Literal,
    Module,
    Size,
    build,
    inline,
    postorder,
    symbols as dim_symbols,
)
from torch_hlo.hlo.stablehlo import stablehlo_text
from torch_hlo.hlo.text.printer import module_text
from torch_hlo.lowering.core import LOWERINGS, Leaf, LoweringError, Out, lower, size_value
from torch_hlo.lowering.fx import export_sizes as sizes, operators_of_libraries
from torch_hlo.lowering.fx.fx_graph import FxGraph, Input, from_fx
from torch_hlo.lowering.fx.fx_size import shape_of
from torch_hlo.pytorch.graphs import with_effects

aten = torch.ops.aten


def to_hlo_text(ep: ExportedProgram, embed: bool = False) -> str:
    """HLO text, which XLA's parser reads as well. `embed`: parameters and buffers become constants.

    Raises LoweringError naming the op that a program cannot hold, or a result that is not a tensor
    or number."""
    return module_text(to_module(ep, embed))


def to_stablehlo_text(ep: ExportedProgram, embed: bool = False) -> str:
    """StableHLO text, see to_hlo_text; dynamic dimensions are `?`. Raises WriteError for what
    StableHLO cannot say."""
    return stablehlo_text(to_module(ep, embed))


def to_portable_artifact(program: ExportedProgram | Module, embed: bool = False) -> bytes:
    """The program as a StableHLO portable artifact (MLIR bytecode), for all consumers since
    StableHLO 1.0 where its operations allow. `torch_hlo.run_text` and StableHLO's own tools read
    it. Raises WriteError for what StableHLO cannot say."""
    module = program if isinstance(program, Module) else to_module(program, embed)
    return portable_artifact(legalize.run(module))


def to_module(ep: ExportedProgram, embed: bool = False) -> Module:
    """The program as a Module; dynamic dimensions are symbols."""
    return exported(ep, "all" if embed else "none").module


@frozen
class Value:
    """An input or output of an exported program. `kind`: "user"; "weight" for parameters, buffers
    and constants; "state" for buffers that the program changes, and their new values; "mutated" for
    new values of user inputs; "seed". `target`: the buffer's or mutated input's name. `value`: the
    tensor of a weight or state, the number of a user value that is no tensor."""

    name: str
    kind: str = "user"
    target: str = ""
    value: Any = None


@frozen
class Exported:
    """`inputs` and `outputs` describe the module's parameters and results. `arguments` and
    `results`: the flat user values in order: position among the inputs or outputs, or the number or
    None itself in a tuple. `conditions`: (predicate, left, right) on sizes;
    `unchecked`: conditions that PyTorch found and this does not understand."""

    module: Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arguments: tuple[int | tuple[Any], ...]
    results: tuple[int | tuple[Any], ...]
    conditions: tuple[tuple[str, Size, Size], ...]
    unchecked: tuple[str, ...]


def exported(ep: ExportedProgram, embed: str = "none") -> Exported:
    """The program and what its inputs and outputs are. `embed`: what becomes constants: "none",
    "all" weights, or "fixed", those that the program does not change. Raises LoweringError, see
    to_hlo_text."""
    guards = sizes.guards(ep)
    ep = _functional(ep)
    graph = from_fx(_without_checks(_row_major(ep.graph_module)))
    leaves = [i.leaf for i in graph.inputs]
    signature, values = ep.graph_signature, _weights(ep)
    changed = {s.target for s in signature.output_specs if s.kind in _STATE}
    described = [_described(x, signature.input_specs, values, changed) for x in graph.inputs]
    constants = {
        i: x.value
        for i, x in enumerate(described)
        if _is_constant(graph.inputs[i], x, embed) or x.kind == "token"
    }
    tensors = [value for value, _ in graph.outputs if isinstance(value, (Out, Leaf))]
    module = lower(graph.nodes, tensors, leaves, (), "exported", _symbols(graph))
    used = set(postorder((module.entry.root,)))
    kept = [
        i
        for i, x in enumerate(graph.inputs)
        if i not in constants and (x.source is not None or module.entry.params[i] in used)
    ]
    params = [build.parameter(n, module.entry.params[i].shape) for n, i in enumerate(kept)]
    swaps = dict(enumerate(module.entry.params))
    swaps |= {i: _constant(t) for i, t in constants.items()} | dict(zip(kept, params, strict=True))
    root = inline(module.entry, [swaps[i] for i in range(len(leaves))])
    roots, outs, results = _results(graph, signature.output_specs, root)
    symbols = tuple((name, kept.index(i), d) for name, i, d in module.symbols)
    entry = Computation("main", tuple(params), build.tuple_(*roots))
    found = Module("exported", entry, (), symbols)
    arguments = _arguments([graph.inputs[i] for i in kept], signature.input_specs)
    names = {name for name, _, _ in symbols}
    conditions = [c for c in (*sizes.ranges(ep), *guards.conditions) if _known(c, names)]
    return Exported(
        found,
        tuple(described[i] for i in kept),
        tuple(outs),
        tuple(arguments),
        tuple(results),
        tuple(conditions),
        guards.unchecked,
    )


def _results(
    graph: FxGraph, specs: Sequence[OutputSpec], root: Instruction
) -> tuple[list[Instruction], list[Value], list[int | tuple[Any]]]:
    """The module's results, what they are, and `Exported.results`. `root` has the tensors among
    the graph's outputs."""
    parts = iter(root.operands)
    roots: list[Instruction] = []
    outs: list[Value] = []
    results: list[int | tuple[Any]] = []
    for (value, _), spec in zip(graph.outputs, specs, strict=True):
        if spec.kind == OutputKind.TOKEN:  # orders effects, of which none are left
            next(parts)
            continue
        if spec.kind == OutputKind.USER_OUTPUT:
            results.append((None,) if value is None else len(roots))
        if value is not None:
            roots.append(next(parts) if isinstance(value, (Out, Leaf)) else _number(value))
            number = value if isinstance(value, (bool, int, float, Dim)) else None
            name = getattr(spec.arg, "name", "") or f"out{len(outs)}"
            kind = _KINDS.get(spec.kind, "user")
            outs.append(Value(name, kind, spec.target or "", number))
    return roots, outs, results


def _arguments(kept: Sequence[Input], specs: Sequence[InputSpec]) -> list[int | tuple[Any]]:
    """`Exported.arguments`."""
    where = {x.source: n for n, x in enumerate(kept) if type(x.source) is int}
    return [
        where[p] if p in where else (getattr(s.arg, "value", None),)
        for p, s in enumerate(specs)
        if s.kind == InputKind.USER_INPUT
    ]


_STATE = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
_KINDS = dict.fromkeys(_STATE, "state") | {OutputKind.USER_INPUT_MUTATION: "mutated"}


def _described(
    x: Input,
    specs: Sequence[InputSpec],
    values: dict[int, Tensor],
    changed: set[str],
) -> Value:
    if isinstance(x.source, Tensor):
        return Value("constant", "weight", value=x.source)
    if x.source is None:
        return Value("seed", "seed")
    if isinstance(x.source, str):
        return Value(x.source)
    spec = specs[x.source]
    target = spec.target or ""
    if x.source in values:
        return Value(target, "state" if target in changed else "weight", target, values[x.source])
    if spec.kind == InputKind.TOKEN:
        return Value(spec.arg.name, "token", value=torch.zeros(0))
    return Value(spec.arg.name)


def _is_constant(x: Input, described: Value, embed: str) -> bool:
    return (
        isinstance(x.source, Tensor)
        or described.kind == "weight"
        and embed != "none"
        or described.kind == "state"
        and embed == "all"
    )


def _known(condition: sizes.Condition, names: set[str]) -> bool:
    return dim_symbols(condition[1]) | dim_symbols(condition[2]) <= names


def inputs(ep: ExportedProgram, *args: Any, **kwargs: Any) -> list[Tensor | float]:
    """What a program written without `embed` is run on: the weights and constants, then the tensors
    in `args` and `kwargs`."""
    ep = _functional(ep)
    weights = _weights(ep)
    given = iter(v for v in pytree.tree_leaves((args, kwargs)))
    found: list[Tensor | float] = []
    for i, spec in enumerate(ep.graph_signature.input_specs):
        value = (
            weights[i]
            if i in weights
            else next(given, None)
            if spec.kind == InputKind.USER_INPUT
            else None
        )
        if isinstance(value, Tensor):
            found.append(value.detach())
        elif type(value) is float and not isinstance(getattr(spec.arg, "value", None), float):
            found.append(value)
    return found


def _functional(ep: ExportedProgram) -> ExportedProgram:
    """Mutations become results, and operators without a lowering what they are made of."""
    from torch_hlo.dynamo.backend import decompositions

    operators_of_libraries.register()
    table = torch.export.default_decompositions()
    for op in [op for op in table if op in LOWERINGS]:
        del table[op]
    table.update(decompositions(composite=True))
    decomposed: ExportedProgram = ep.run_decompositions(table)
    return decomposed


def _without_checks(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Checks that raise errors about values (a singular matrix) are left out: a program has no way
    to raise."""
    for n in module.graph.find_nodes(op="call_function", target=with_effects):
        if n.args[1] is aten._linalg_check_errors.default:
            for user in list(n.users):
                user.replace_all_uses_with(n.args[0])
                module.graph.erase_node(user)
            module.graph.erase_node(n)
    return module


def _weights(ep: ExportedProgram) -> dict[int, Tensor]:
    """Position of a placeholder -> the parameter, buffer or constant tensor it stands for."""
    found = {}
    for i, spec in enumerate(ep.graph_signature.input_specs):
        if spec.target is not None:
            value = ep.state_dict.get(spec.target)
            value = ep.constants.get(spec.target) if value is None else value
            if isinstance(value, Tensor):
                found[i] = value
    return found


def _row_major(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Placeholders as the text declares them: whatever the example inputs' strides were, arrays of
    a program are row-major."""
    for n in module.graph.find_nodes(op="placeholder"):
        value = n.meta.get("val")
        if isinstance(value, Tensor) and not value.is_contiguous():
            n.meta["val"] = value.clone(memory_format=torch.contiguous_format)
    return module


def _symbols(graph: FxGraph) -> tuple[tuple[str, int, int], ...]:
    """Where the value of each symbol is read: (name, parameter, dimension)."""
    found = graph.places()
    missing = sorted(set(graph.sizes) - set(found))
    if missing:
        raise LoweringError(
            f"size {missing[0]} is an input of its own and no dimension of a tensor: export with"
            " that number fixed"
        )
    used = {
        s: d
        for x in graph.inputs
        if isinstance(x.leaf, Leaf)
        for d in x.leaf.shape.dims
        for s in dim_symbols(d)
    }
    for s in sorted(used.keys() - found.keys()):
        raise LoweringError(
            f"size {s} is no dimension itself, only {used[s]} is: export with a Dim of its own for"
            " that dimension"
        )
    return tuple((name, i, d) for name, (i, d) in sorted(found.items()))


def data_of(tensor: Tensor) -> bytes:
    """The elements in row-major order."""
    data = (
        tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
    )
    return np.ascontiguousarray(data).tobytes()


def _constant(tensor: Tensor) -> Instruction:
    shape = shape_of(tensor)
    return build.constant(Literal(shape.dtype, tuple(tensor.shape), data_of(tensor)), shape.dtype)


def _number(value: object) -> Instruction:
    """A number among the results."""
    if isinstance(value, (bool, int, float)):
        return build.constant(value, {bool: "pred", int: "s64", float: "f64"}[type(value)])
    if isinstance(value, Dim):
        return size_value(value)
    raise LoweringError(
        f"result {value!r} of type {type(value).__name__} is not a tensor: return it as one"
    )


__all__ = [
    "Exported",
    "Value",
    "exported",
    "inputs",
    "to_hlo_text",
    "to_module",
    "to_portable_artifact",
    "to_stablehlo_text",
]
