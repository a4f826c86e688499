"""What the writers of StableHLO operations stand on: `WRITERS[op](w, x) -> list of names`.

Tuples disappear: a value is the list of its array (and token) leaves. Each computation that `call`,
`while` or `conditional` uses becomes a private function; reducers and comparators become regions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count

import numpy as np

from ..ir import DTYPES, Computation, Instruction, Ints, Literal, Shape, Size, build as b
from ..sharding.sharding import Mesh, Placement, Sharding
from .sizes import value_of
from .types import Type, type_text

# Opcodes without a line of their own, or that say their sharding themselves
_UNPLACED = frozenset("parameter tuple get-tuple-element custom-call".split())
Write = Callable[["Writer", Instruction], list[str]]
WRITERS: dict[str, Write] = {}


class WriteError(ValueError):
    """An instruction that StableHLO cannot express."""


def mesh_text(mesh: Mesh) -> str:
    devices = f", device_ids=[{', '.join(map(str, mesh.devices))}]" if mesh.devices else ""
    return "[" + ", ".join(f'"{name}"={size}' for name, size in mesh.axes) + "]" + devices


def sharding_text(sharding: Sharding) -> str:
    """`<@mesh, [{"x"}, {?}]>`."""
    if sharding.maximal is not None:
        return f"<mesh<[], device_ids=[{sharding.maximal}]>, []>"
    # Axes that are written per device are no part of Shardy's shardings.
    mesh = sharding.mesh
    where = f"mesh<{mesh_text(mesh)}>" if mesh.devices else "@mesh"
    text = str(replace(sharding, manual=(), mesh=Mesh(mesh.axes)))[1:-1]
    return f"<{where}, " + _AXIS.sub(lambda found: f'"{found.group()}"', text) + ">"


_AXIS = re.compile(r"(?<=[{\s])[A-Za-z_][\w.\-]*(?=[,}:])")


def placements(sharding: Placement, shape: Shape) -> list[Sharding]:
    """One per leaf of the shape."""
    if isinstance(sharding, tuple):
        return [p for s, e in zip(sharding, shape.elements) for p in placements(s, e)]
    return [sharding]


def _sharding_attribute(sharding: Placement | None, shape: Shape) -> str:
    """`sdy.sharding = …` of the values of an operation; "" when there is nothing to say."""
    found = [] if sharding is None else placements(sharding, shape)
    if not found or any(s is None for s in found):
        return ""
    return f"sdy.sharding = #sdy.sharding_per_value<[{', '.join(map(sharding_text, found))}]>"


class Program:
    """`symbols`: the values of symbolic sizes, read off the parameters of the entry."""

    def __init__(self, symbols: Mapping[str, Instruction]) -> None:
        self.symbols = symbols
        self.functions: list[str] = []
        self.names: dict[Computation, str] = {}

    def name_of(self, c: Computation) -> str:
        """The private function of a computation, written when first asked for."""
        if c not in self.names:
            base = re.sub(r"[^\w]", "_", c.name) or "computation"
            taken = set(self.names.values()) | {"main"}
            numbered = (f"{base}_{i}" for i in count(1))
            name = next(n for n in chain([base], numbered) if n not in taken)
            self.names[c] = name
            self.function(name, c)
        return self.names[c]

    def function(
        self,
        name: str,
        c: Computation,
        public: bool = False,
        aliases: dict[int, int] | None = None,
    ) -> None:
        w = Writer(self, "    ")
        args = []
        at = 0
        for p in c.params:
            names = []
            for leaf in p.shape.arrays:
                names.append(f"%arg{at}")
                attrs = []
                if aliases and p["index"] in aliases and not p.is_tuple:
                    attrs.append(f"tf.aliasing_output = {aliases[p['index']]} : i32")
                if (sharding := p.get("sharding")) is not None and not p.is_tuple:
                    attrs.append(f"sdy.sharding = #sdy.sharding{sharding_text(sharding)}")
                args.append(
                    f"%arg{at}: {type_text(leaf)}" + (f" {{{', '.join(attrs)}}}" if attrs else "")
                )
                at += 1
            w.values[p] = names
        results = w.block(c)
        types = [type_text(leaf) for leaf in c.root.shape.arrays]
        if c.root.op == "tuple" and (wanted := c.root.get("sharding")) is not None:
            types = [
                f"{t} {{sdy.sharding = #sdy.sharding{sharding_text(s)}}}"
                for t, s in zip(types, placements(wanted, c.root.shape))
            ]
        w.emit("func.return", results, c.root.shape.arrays, [])
        visibility = "public" if public else "private"
        result = "" if not types else f" -> ({', '.join(types)})"
        self.functions.append(
            f"  func.func {visibility} @{name}({', '.join(args)}){result} {{\n"
            + "\n".join(w.lines)
            + "\n  }"
        )


class Writer:
    """The lines of one function or region."""

    def __init__(self, program: Program, indent: str, counter: list[int] | None = None) -> None:
        self.program = program
        self.indent = indent
        self.counter = counter or [0]
        self.lines: list[str] = []
        self.values: dict[Instruction, list[str]] = {}

    def block(self, c: Computation) -> list[str]:
        for x in c.instructions():
            if x not in self.values:
                writer = WRITERS.get(x.op)
                if writer is None:
                    raise WriteError(f"{x.op} {x.shape}: no StableHLO operation means this")
                self.values[x] = writer(self, x)
                attribute = _sharding_attribute(x.get("sharding"), x.shape)
                if attribute and x.op not in _UNPLACED:
                    self.annotate(attribute)
        return self.values[c.root]

    def annotate(self, attribute: str) -> None:
        """One more attribute, which no operation has of its own, to the last line."""
        before, colon, types = self.lines[-1].rpartition(" : (")
        self.lines[-1] = f"{before} {{{attribute}}}{colon}{types}"

    def __getitem__(self, x: Instruction) -> list[str]:
        return self.values[x]

    def operands(self, x: Instruction) -> list[str]:
        return [name for o in x.operands for name in self.values[o]]

    def emit(
        self,
        op: str,
        operands: Sequence[str],
        operand_shapes: Sequence[Shape | Type],
        result_shapes: Sequence[Shape | Type],
        attrs: str = "",
        regions: Sequence[str] = (),
    ) -> list[str]:
        """One line in generic form; the names of its results."""
        results = [self.fresh() for _ in result_shapes]
        left = ", ".join(results) + " = " if results else ""
        types = ", ".join(type_text(s) for s in operand_shapes)
        outs = ", ".join(type_text(s) for s in result_shapes)
        body = f" ({', '.join(regions)})" if regions else ""
        properties = f" <{{{attrs}}}>" if attrs else ""
        outs = outs if len(result_shapes) == 1 else f"({outs})"
        self.lines.append(
            f'{self.indent}{left}"{op}"({", ".join(operands)}){properties}{body} : ({types}) ->'
            f" {outs}"
        )
        return results

    def filled(self, shape: Shape, number: int) -> list[str]:
        known(shape.dims)
        value = f"value = dense<{number}> : {type_text(shape)}"
        return self.emit("stablehlo.constant", [], [], [shape], value)

    def op(
        self,
        x: Instruction,
        name: str,
        attrs: str = "",
        regions: Sequence[str] = (),
        shape: Shape | None = None,
    ) -> list[str]:
        """Instruction `x` as the operation `name` on its operands."""
        shapes = [leaf for o in x.operands for leaf in o.shape.arrays]
        return self.emit(
            name,
            self.operands(x),
            shapes,
            (shape or x.shape).arrays,
            attrs,
            regions,
        )

    def sizes(self, sizes: Sequence[Size]) -> list[str]:
        """An s32 array of these sizes."""
        parts = [b.reshape(value_of(s, self.program.symbols), (1,)) for s in sizes]
        return self.block(Computation("sizes", (), b.concatenate(parts, 0)))

    def sized(self, x: Instruction, name: str, attrs: str, *sizes: Sequence[Size]) -> list[str]:
        """`x` as the operation `name`, which takes sizes as operands."""
        arrays = [name for row in sizes for name in self.sizes(row)]
        shapes = [leaf for o in x.operands for leaf in o.shape.arrays]
        shapes += [Shape("s32", (len(row),)) for row in sizes]
        return self.emit(name, [*self.operands(x), *arrays], shapes, [x.shape], attrs)

    def fresh(self) -> str:
        self.counter[0] += 1
        return f"%{self.counter[0]}"

    def region(self, c: Computation) -> str:
        """A computation as a region with a block of arguments."""
        inner = Writer(self.program, self.indent + "  ", self.counter)
        args = []
        for p in c.params:
            inner.values[p] = [inner.fresh().replace("%", "%a") for _ in p.shape.arrays]
            args += [f"{n}: {type_text(s)}" for n, s in zip(inner.values[p], p.shape.arrays)]
        return self._region(inner, args, inner.block(c), c)

    def _region(self, inner: Writer, args: list[str], results: list[str], c: Computation) -> str:
        inner.emit("stablehlo.return", results, c.root.shape.arrays, [])
        head = f"\n{self.indent}^bb0({', '.join(args)}):" if args else ""
        return "{" + head + "\n" + "\n".join(inner.lines) + f"\n{self.indent}}}"

    def calling(
        self,
        c: Computation,
        args: Sequence[tuple[str, Shape]],
        arguments: Sequence[str],
    ) -> str:
        """A region of block arguments `args` that calls the function of `c` with `arguments`."""
        inner = Writer(self.program, self.indent + "  ", self.counter)
        shapes = [leaf for p in c.params for leaf in p.shape.arrays]
        results = inner.emit(
            "func.call",
            arguments,
            shapes,
            c.root.shape.arrays,
            f"callee = @{self.program.name_of(c)}",
        )
        return self._region(inner, [f"{n}: {type_text(s)}" for n, s in args], results, c)


def writes(*ops: str) -> Callable[[Write], Write]:
    def register(fn: Write) -> Write:
        for op in ops:
            WRITERS[op] = fn
        return fn

    return register


def known(sizes: Sequence[Size]) -> Sequence[Size]:
    """The sizes, where an attribute or a constant needs their values."""
    if not all(isinstance(s, int) for s in sizes):
        raise WriteError(
            f"sizes {', '.join(map(str, sizes))}: known sizes are needed here; specialize the"
            " program for concrete inputs first"
        )
    return sizes


def array(values: Sequence[int], kind: str = "i64") -> str:
    """`array<i64: 1, 2>`."""
    known(values)
    texts = [str(v).lower() for v in values]
    return f"array<{kind}{': ' if texts else ''}{', '.join(texts)}>"


def integer(value: int) -> str:
    return f"{value} : i64"


def boolean(value: object) -> str:
    return "true" if value else "false"


def matrix(rows: Sequence[Sequence[int]], width: int) -> str:
    """A dense rank-2 tensor of i64."""
    text = (
        "[" + ", ".join("[" + ", ".join(map(str, known(row))) + "]" for row in rows) + "]"
        if rows
        else ""
    )
    return f"dense<{text}> : tensor<{len(rows)}x{width}xi64>"


def dense_text(value: Literal) -> str:
    """`dense<…> : tensor<…>`: bytes, so that every value is exact."""
    data = np.frombuffer(value.data, np.uint8)
    if DTYPES[value.dtype].kind in "sup":
        text = _nested([str(v).lower() for v in value.numpy().ravel().tolist()], value.dims)
    elif value.dims:
        size = DTYPES[value.dtype].itemsize
        uniform = len(data) and (data.reshape(-1, size) == data[:size]).all()
        return (
            f'dense<"0x{(value.data[:size] if uniform else value.data).hex().upper()}"> :'
            f" {type_text(value.shape)}"
            if len(data)
            else f"dense<> : {type_text(value.shape)}"
        )
    elif DTYPES[value.dtype].kind == "c":
        half = len(value.data) // 2
        text = f"({_bits(value.data[:half])}, {_bits(value.data[half:])})"
    else:
        text = _float(value)
    return f"dense<{text}> : {type_text(value.shape)}"


def _float(value: Literal) -> str:
    number = float(value.numpy())
    return f"{number:.17e}" if np.isfinite(number) else _bits(value.data)


def _bits(data: bytes) -> str:
    return "0x" + data[::-1].hex().upper()


def _nested(pieces: list[str], dims: Ints) -> str:
    if not pieces:
        return ""
    for n in reversed(dims):
        pieces = ["[" + ", ".join(pieces[i : i + n]) + "]" for i in range(0, len(pieces), n)]
    return pieces[0]


def dictionary(**entries: str | None) -> str:
    return ", ".join(f"{k} = {v}" for k, v in entries.items() if v is not None)
