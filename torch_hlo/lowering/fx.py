"""An FX graph of aten ops (from AOTAutograd or torch.export) -> Nodes, inputs and outputs for `lowering.graph.lower`.

Placeholders become Leafs in order; SymInts become symbolic sizes; random ops get a seed and an offset as in the lazy path.
"""
from __future__ import annotations

import operator
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions as sym

from torch_hlo.hlo.dim import Dim, Size, dim_max, dim_min, symbol
from torch_hlo.hlo.shape import Shape
from torch_hlo.lowering.graph import Leaf, Lift, Node, Out
from torch_hlo.lowering.random import is_random
from torch_hlo.lowering.registry import TORCH_TO_HLO, LoweringError

aten = torch.ops.aten


@dataclass
class FxGraph:
    """What `from_fx` found. `inputs` are the program's parameters: first the placeholders that are tensors (at positions `tensor_inputs`),
    then `constants` (attributes of the module), then two Lifts (seed, offset) when `random` is set.

    `outputs`: for each output of the FX graph an Out or Leaf, a Size (an int or symbolic), or None.
    `mutated`: (program output index, placeholder position) of in-place writes at the end of the graph.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Leaf | Lift] = field(default_factory=list)
    tensor_inputs: list[int] = field(default_factory=list)
    size_inputs: dict[str, int] = field(default_factory=dict)  # symbol -> placeholder position, for SymInt placeholders
    size_dims: dict[str, tuple[int, int]] = field(default_factory=dict)  # symbol -> (parameter index, dimension)
    constants: list[torch.Tensor] = field(default_factory=list)
    outputs: list = field(default_factory=list)
    writes: list[tuple[int, object]] = field(default_factory=list)  # (placeholder position, new value)
    random: bool = False


def size_of(x) -> Size:
    """A Size from an int or SymInt. Raises LoweringError for an expression that a Dim cannot hold."""
    if isinstance(x, int):
        return x
    return _size(x.node.expr)


def _size(e: sympy.Expr) -> Size:
    if e.is_Integer:
        return int(e)
    if e.is_Symbol:
        return symbol(str(e))
    rule = _RULES.get(type(e).__name__)
    if rule is None:
        raise LoweringError(f"size expression {e} is not supported; mark the dimension static with torch._dynamo.mark_static")
    result = _size(e.args[0])
    if rule is pow:
        return _power(result, int(e.args[1]))
    for a in e.args[1:]:
        result = rule(result, _size(a))
    return result


def _power(base: Size, exponent: int) -> Size:
    result: Size = 1
    for _ in range(exponent):
        result = result * base
    return result


_RULES = {
    "Add": operator.add, "Mul": operator.mul, "Pow": pow, "PowByNatural": pow, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod, "Max": dim_max, "Min": dim_min,
}  # fmt: skip
assert sym.FloorDiv.__name__ in _RULES


def shape_of(value: torch.Tensor) -> Shape:
    """HLO shape of a (fake) tensor."""
    dtype = TORCH_TO_HLO.get(value.dtype)
    if dtype is None or value.layout != torch.strided:
        raise LoweringError(f"tensors of {value.dtype}, {value.layout} are not supported on hlo")
    return Shape(dtype, tuple(size_of(d) for d in value.shape))


def from_fx(graph_module: fx.GraphModule) -> FxGraph:
    """Convert. Raises LoweringError naming the op when a call is not an aten overload."""
    g = FxGraph()
    env: dict[fx.Node, object] = {}
    seed = offset = None
    drawn = 0

    for position, n in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor):
            leaf = Leaf(shape_of(value))
            env[n] = leaf
            for d, size in enumerate(leaf.shape.dims):
                if isinstance(size, Dim) and str(size) not in g.size_dims and str(size).isidentifier():
                    g.size_dims[str(size)] = (len(g.inputs), d)
            g.inputs.append(leaf)
            g.tensor_inputs.append(position)
        elif isinstance(value, (torch.SymInt, int)):
            env[n] = size_of(value)
            if isinstance(env[n], Dim):
                g.size_inputs.setdefault(str(env[n]), position)
        elif value is None or isinstance(value, (float, bool)):
            env[n] = value
        else:
            raise LoweringError(f"input {n.name} of type {type(value).__name__} is not supported: pass tensors and ints")

    def arg(x):
        if isinstance(x, fx.Node):
            return env[x]
        if isinstance(x, (list, tuple)):
            return [arg(v) for v in x]
        if isinstance(x, torch.SymInt):
            return size_of(x)
        return x

    for n in graph_module.graph.nodes:
        if n.op == "get_attr":
            value = getattr(graph_module, n.target)
            if isinstance(value, torch.Tensor):
                env[n] = leaf = Leaf(shape_of(value))
                g.constants.append(value)
                g.inputs.append(leaf)
            else:
                env[n] = value
        elif n.op == "call_function":
            value = n.meta.get("val")
            if n.target is operator.getitem and not isinstance(value, (torch.SymInt, int)):
                env[n] = env[n.args[0]][n.args[1]]
            elif isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
                env[n] = size_of(value)
            elif n.target is aten.copy_.default and isinstance(env.get(n.args[0]), Leaf):
                env[n] = env[n.args[1]]
                position = g.tensor_inputs[g.inputs.index(env[n.args[0]])]
                source = n.args[1].meta["val"] if isinstance(n.args[1], fx.Node) else None
                target = n.args[0].meta["val"]
                if source is not None and (source.dtype, source.shape) != (target.dtype, target.shape):
                    raise LoweringError(f"write of {source.dtype}{list(source.shape)} into input {n.args[0].name} of {target.dtype}{list(target.shape)}")
                g.writes.append((position, env[n]))
            elif isinstance(n.target, OpOverload):
                flat, tree = pytree.tree_flatten(value, is_leaf=lambda v: v is None)
                outs = tuple(shape_of(v) if isinstance(v, torch.Tensor) else None for v in flat)
                kwargs = {k: arg(v) for k, v in n.kwargs.items()}
                if is_random(n.target):
                    if seed is None:
                        seed, offset = Lift("s64"), Lift("s64")
                        g.random = True
                    kwargs.update(seed=seed, offset=offset, stream=drawn)
                    drawn += 1
                node = Node(n.target, tuple(arg(a) for a in n.args), kwargs, outs, _source(n))
                g.nodes.append(node)
                env[n] = pytree.tree_unflatten([Out(node, i) if s is not None else None for i, s in enumerate(outs)], tree)
            else:
                raise LoweringError(f"{n.target} ({_source(n) or 'no source line'}) is not an operator that hlo can compile")
        elif n.op == "output":
            g.outputs = [arg(v) for v in n.args[0]] if isinstance(n.args[0], (list, tuple)) else [arg(n.args[0])]
    if g.random:
        g.inputs += [seed, offset]
    return g


def _source(n: fx.Node) -> str:
    """`file.py:12` of the user's line, from the stack trace that Dynamo recorded."""
    trace = n.meta.get("stack_trace") or ""
    line = next((x.strip() for x in reversed(trace.splitlines()) if x.strip().startswith('File "')), "")
    parts = line.split('"')
    return f"{parts[1]}:{parts[2].split(',')[1].strip().removeprefix('line ')}" if len(parts) > 2 else ""
