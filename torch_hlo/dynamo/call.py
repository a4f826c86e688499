"""From PyTorch's calling convention to a program's: a Python function written for each graph.

    caller = Caller(graph, "graph", Host()); run = caller.bind(promise of
        [compile_program(caller.module())], 0)
    results = run([tensor, size, ...])                 # clears the list

The function reads addresses, makes the outputs and calls the program; everything that can be
decided before is.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch
from torch.utils import _pytree as pytree

from torch_hlo import config
from torch_hlo.device.host_tensor import LARGE
from torch_hlo.device.interfaces import Program
from torch_hlo.hlo.ir import Dim, Ints, Module, Shape, Size, symbol, symbols
from torch_hlo.lazy.run import executor
from torch_hlo.lowering.core import HLO_TO_TORCH, LOWERINGS, Leaf, Lift, Node, Out, lower
from torch_hlo.lowering.fx.fx_graph import FxGraph, Input
from torch_hlo.lowering.fx.fx_size import Layout
from torch_hlo.pytorch.operators import HigherOrderOperator, OpOverload

from .cut import key_of, shape_of
from .place import Gpu, Host

aten = torch.ops.aten


class Foreign:
    """A CPU tensor's memory as a device buffer, for back ends that take no addresses."""

    __slots__ = ("shape", "tensor", "job", "memory")

    ready = device_address = 0  # see DeviceMemory

    def __init__(self, shape: Shape, tensor: torch.Tensor) -> None:
        self.shape = shape
        self.tensor = tensor
        self.job = None
        self.memory = self

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    @property
    def bytes(self):
        flat = torch.empty(0, dtype=self.tensor.dtype).set_(
            self.tensor.untyped_storage(),
            self.tensor.storage_offset(),
            (self.shape.size,),
        )
        return flat.view(torch.uint8).numpy()


class _Result:
    """A root of the program: a value in a physical order. `position`: the placeholder whose memory
    it takes."""

    def __init__(self, root: Out | Leaf, shape: Shape, layout: Layout) -> None:
        self.root = root
        self.shape = shape
        self.layout = layout
        self.position: int | None = None


class Caller:
    """Decides the program's parameters, roots and aliases, and writes the function that calls
    it."""

    def __init__(self, graph: FxGraph, name: str, place: Host | Gpu, losses: int = 0) -> None:
        """`losses`: of a forward graph whose backward graph follows, the number of the first
        outputs, from which PyTorch computes a loss."""
        self.graph = graph
        self.name = name
        self.place = place
        self.losses = losses
        self.nodes: list[Node] = list(graph.nodes)
        self.results: list[_Result] = []
        self._index: dict[tuple, int] = {}
        self.inputs: list[Leaf | Lift] = [i.leaf for i in graph.inputs]
        self.symbols = self._bind_symbols()
        self.host_calls = any(n.target not in LOWERINGS for n in graph.nodes)
        self.writes = [self._write(position, value) for position, value in graph.writes]
        self.outputs = [self._output(value, layout) for value, layout in graph.outputs]
        self.checks = [(self._output(value, None), check) for value, check in graph.checks]
        self.aliases = self._aliases()

    # ---- the program

    def module(self) -> Module:
        """The HLO of the graph."""
        return lower(
            self.nodes,
            [r.root for r in self.results],
            self.inputs,
            self.aliases,
            self.name,
            self.symbols,
        )

    def _bind_symbols(self) -> tuple[tuple[str, int, int], ...]:
        """Where each symbol is read. One that is no dimension of an input gets an input of its own,
        u8[s,0]: no bytes, but a size."""
        found = self.graph.places()
        for name in self.graph.sizes:
            if name not in found and self._is_size(name):
                found[name] = (len(self.inputs), 0)
                self.inputs.append(Leaf(Shape("u8", (symbol(name), 0))))
        return tuple((name, i, d) for name, (i, d) in sorted(found.items()))

    def _is_size(self, name: str) -> bool:
        """Whether anything has this symbol for a size, and not for a number alone."""
        for node in self.nodes:
            dims = [d for out in node.outs if out is not None for d in out.dims]
            values = [*pytree.tree_leaves((node.args, node.kwargs)), *dims]
            if any(isinstance(d, Dim) and name in symbols(d) for d in values):
                return True
        return any(isinstance(node.target, HigherOrderOperator) for node in self.nodes)

    def _result(self, value: Out | Leaf, layout: Layout) -> int:
        """Number of the root that is `value` in the physical order of `layout`."""
        if not layout.dense:
            layout = Layout.row_major(len(layout.order))
        shape = shape_of(value)
        key = (*key_of(value), layout.order, layout.repeated)
        if key not in self._index:
            self._index[key] = len(self.results)
            root = value
            for d in layout.repeated:
                root = self._node(
                    aten.slice.Tensor,
                    (root, d, 0, 1),
                    [1 if i == d else n for i, n in enumerate(shape_of(root).dims)],
                    shape,
                )
            if layout.order != tuple(range(shape.rank)):
                root = self._node(
                    aten.permute.default,
                    (root, list(layout.order)),
                    [shape_of(root).dims[d] for d in layout.order],
                    shape,
                )
            self.results.append(_Result(root, shape, layout))
        return self._index[key]

    def _node(self, op: OpOverload, args: tuple, dims: list[Size], like: Shape) -> Out:
        node = Node(op, args, {}, (Shape(like.dtype, tuple(dims)),))
        self.nodes.append(node)
        return Out(node)

    def _write(self, position: int, value: Out | Leaf) -> tuple[int, int]:
        source = self.graph.inputs[self.graph.input_at(position)]
        i = self._result(value, source.layout)
        if self.results[i].position is None and not source.lazy_bits and not self.host_calls:
            self.results[i].position = position
        return position, i

    def _output(self, value: object, layout: Layout | None) -> object:
        if not isinstance(value, (Out, Leaf)):
            return value
        if isinstance(value, Leaf):
            i = next(i for i, x in enumerate(self.graph.inputs) if x.leaf is value)
            source = self.graph.inputs[i].source
            if isinstance(source, int) and not any(p == source for p, _ in self.writes):
                return ("input", source)
        layout = layout or Layout.row_major(shape_of(value).rank)
        i = self._result(value, layout)
        # a write's memory belongs to the input: PyTorch wants a tensor of its own
        if self.results[i].position is not None:
            self._index = {}
            i = self._result(value, layout)
        return ("result", i, layout)

    def _aliases(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (i, self.graph.input_at(r.position))
            for i, r in enumerate(self.results)
            if r.position is not None
        )

    # ---- the function

    def bind(self, programs: Future[list[Program]], number: int) -> Callable[[list], list]:
        """A function that runs the program of this number, once there is one: it waits for that,
        and raises what compiling has raised."""
        bound: Callable[[list], list] | None = None

        def call(args: list) -> list:
            nonlocal bound
            if bound is None:
                bound = self._bound(programs.result()[number])
            return bound(args)

        return call

    def _bound(self, program: Program) -> Callable[[list], list]:
        self.scope: dict[str, object] = {
            "empty": self.place.empty,
            "large": self.place.large,
            "bring": self.place.bring,
            "dense": _dense,
            "rebuilt": _rebuilt,
            "draw": _draw,
            "floordiv": int.__floordiv__,
            "mod": int.__mod__,
            "make_room": self.place.make_room,
            "math": math,
            "torch": torch,
            "Foreign": Foreign,
            "Shape": Shape,
            "number": _number,
            "refuse": self._refuse,
        }
        fast = self.place.starter(program)
        run = fast or program.run
        self.scope["run"] = (
            executor.watched(self.name, program, run) if config.get("PROFILE") else run
        )
        lines = self._lines(fast is not None)
        source = "def call(args):\n" + "\n".join(f"    {line}" for line in lines) + "\n"
        file = f"<torch_hlo {self.name} {id(self):x}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), self.scope)
        return self.scope["call"]

    def _lines(self, fast: bool) -> list[str]:
        g = self.graph
        names = [f"a{i}" for i in range(g.placeholders)]
        lines = [f"[{', '.join(names)}] = args" if names else "", "args.clear()"]
        lines += self._size_lines()
        pointers = []
        targets = {r.position for r in self.results if r.position is not None}
        for i, x in enumerate(g.inputs):
            pointers.append(self._input_lines(i, x, lines, targets))
        pointers += self._empty_inputs(lines)
        outs = []
        for i, r in enumerate(self.results):
            name = f"o{i}" if r.position is None else f"p{g.input_at(r.position)}"
            if r.position is None:
                lines.append(f"{name} = {self._allocation(r)}")
            outs.append((name, Shape(r.shape.dtype, r.layout.physical(r.shape.dims))))
        if fast:
            words = [name for name, _, _ in self.symbols] + [
                f"{p}.data_ptr()" for p, _ in (*pointers, *outs)
            ]
            lines.append(f"run(({', '.join(words)},))" if words else "run(())")
        else:
            inputs, results = (
                ", ".join(f"Foreign({_shape_text(s)}, {p})" for p, s in side)
                for side in (pointers, outs)
            )
            lines.append(f"run([{inputs}], [{results}])")
        if nbytes := self._loss_bytes():
            lines.append(f"make_room({nbytes})")
        for value, check in self.checks:
            lines.append(f"{self._constant(check)}({self._returned(value)})")
        for position, i in self.writes:
            p = f"p{g.input_at(position)}"
            if self.results[i].position == position:
                lines.append(f"if {p} is not a{position}: a{position}.copy_({p})")
            else:
                lines.append(f"a{position}.copy_(o{i})")
        lines.append(
            "return ["
            + ", ".join(
                self._returned(x)
                + (".cpu()" if self.place.leaves(i) and isinstance(x, tuple) else "")
                for i, x in enumerate(self.outputs)
            )
            + "]"
        )
        return [line for line in lines if line]

    def _loss_bytes(self) -> int:
        """What PyTorch takes for a loss between this program and that of the backward graph, where
        a training step needs most memory: a cross-entropy keeps as much as it is given, and makes
        two gradients of that size. 0 where that is little, or sizes vary."""
        sizes = [
            self.results[x[1]].shape.nbytes
            for x in self.outputs[: self.losses]
            if isinstance(x, tuple) and x[0] == "result"
        ]
        return 3 * sum(n for n in sizes if isinstance(n, int) and n >= LARGE)

    def _empty_inputs(self, lines: list[str]) -> list[tuple[str, Shape]]:
        """Arrays of no bytes, for sizes that are those of no other input."""
        empty = self._constant(self.place.bring(torch.empty(0, dtype=torch.uint8)))
        shapes = [leaf.shape for leaf in self.inputs[len(self.graph.inputs) :]]
        for name in (shape.dims[0] for shape in shapes):
            lines.append(f"if not 0 <= {name} < {2**31}: refuse({name})")
        return [(empty, shape) for shape in shapes]

    def _refuse(self, number: int) -> None:
        raise ValueError(
            f"torch.compile(backend='hlo'): {self.name} takes the number {number} for a size, which"
            f" is from 0 to {2**31 - 1}: hand it in as a tensor"
        )

    def _size_lines(self) -> list[str]:
        lines = [
            f"{name} = a{position}"
            for name, position in (
                *self.graph.sizes.items(),
                *self.graph.numbers.items(),
            )
        ]
        for name, i, d in self.symbols:
            if name not in self.graph.sizes:
                x = self.graph.inputs[i]
                lines.append(f"{name} = a{x.source}.shape[{x.layout.order[d]}]")
        return lines

    def _input_lines(
        self, i: int, x: Input, lines: list[str], targets: set[int]
    ) -> tuple[str, Shape]:
        """Make `p<i>`, a tensor that lies as the program expects."""
        if isinstance(x.leaf, Lift):
            lines.append(f"p{i} = bring(number({x.source}, {x.leaf.dtype!r}))")
            return f"p{i}", Shape(x.leaf.dtype)
        if x.source is None:
            lines.append(f"p{i} = bring(draw())")
            return f"p{i}", x.leaf.shape
        if isinstance(x.source, torch.Tensor):
            return self._constant(self.place.bring(x.source)), x.leaf.shape
        a = f"a{x.source}"
        if self.place.is_away(x.source):
            lines.append(f"b{x.source} = bring({a})")
            a = f"b{x.source}"
        if x.layout.plain:
            lies = f"{a}.is_contiguous()"
        else:
            strides = _strides(x.layout, self._logical_dims(x))
            lies = f"{a}.stride() == {_tuple(strides)}"
        bits = f" and not {a}.is_conj() and not {a}.is_neg()" if x.lazy_bits else ""
        if x.source in targets or not self.place.reads_any:
            bits += f" and not {a}.data_ptr() % {self.place.alignment}"
        fix = f"dense({a}, {x.layout.order})"
        lines.append(f"p{i} = {a} if {lies}{bits} else {fix}")
        return f"p{i}", x.leaf.shape

    def _logical_dims(self, x: Input) -> list[Size]:
        dims: list[Size] = [1] * len(x.layout.order)
        for place, d in enumerate(x.layout.order):
            dims[d] = x.leaf.shape.dims[place]
        return dims

    def _constant(self, value: torch.Tensor | Callable) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def _dtype(self, shape: Shape) -> str:
        dtype = HLO_TO_TORCH[shape.dtype]
        name = str(dtype).replace(".", "_")
        self.scope[name] = dtype
        return name

    def _allocation(self, r: _Result) -> str:
        strides = _strides(r.layout, r.shape.dims)
        nbytes = r.shape.nbytes
        which = "empty" if isinstance(nbytes, int) and nbytes < LARGE else "large"
        return f"{which}({_tuple(r.shape.dims)}, {_tuple(strides)}, {self._dtype(r.shape)})"

    def _returned(self, x: object) -> str:
        if isinstance(x, tuple):
            if x[0] == "input":
                return f"a{x[1]}"
            _, i, layout = x
            if layout.dense:
                return f"o{i}"
            return f"rebuilt(o{i}, {_tuple(layout.strides)})"
        if isinstance(x, (Dim, int, float, bool, str)) or x is None:
            return str(x)
        raise TypeError(f"{x!r} cannot be returned from a compiled program")


def _strides(layout: Layout, dims: Sequence[Size]) -> list[Size]:
    """Strides of a dense tensor of `dims` that lies as `layout`."""
    strides: list[Size] = [0] * len(dims)
    step: Size = 1
    for d in reversed(layout.order):
        if d in layout.repeated:
            continue
        strides[d] = step
        step = step * (dims[d] if dims[d] != 0 else 1)
    return strides


def _tuple(sizes: Iterable[object]) -> str:
    return "(" + "".join(f"{s}, " for s in sizes) + ")"


def _shape_text(shape: Shape) -> str:
    return f"Shape({shape.dtype!r}, {_tuple(shape.dims)})"


def _dense(t: torch.Tensor, order: Ints) -> torch.Tensor:
    """A copy without gaps whose dimensions lie in `order`, with `t`'s logical values."""
    t = t.detach().resolve_conj().resolve_neg()
    back = [order.index(d) for d in range(len(order))]
    return t.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _rebuilt(t: torch.Tensor, strides: Ints) -> torch.Tensor:
    """The same values with gaps, as the strides say."""
    result = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)
    _once(result, strides).copy_(_once(t, strides))
    return result


def _once(t: torch.Tensor, strides: Ints) -> torch.Tensor:
    """The first of the elements that lie at one place."""
    for d, s in enumerate(strides):
        if s == 0 and t.shape[d]:
            t = t.narrow(d, 0, 1)
    return t


def _draw() -> torch.Tensor:
    """The seed of this call, from PyTorch's CPU generator."""
    return torch.randint(-(2**63), 2**63 - 1, ())


def _number(value: float, dtype: str) -> torch.Tensor:
    return torch.tensor(value, dtype=HLO_TO_TORCH[dtype])
