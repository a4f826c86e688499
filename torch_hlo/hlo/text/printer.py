"""Programs as text in XLA's HLO syntax.

    module_text(m)                 # canonical: names are opcode.number; what XLA's parser reads
    module_text(m, style="full")   # names and metadata from notes
    module_text(m, style="xla")    # canonical, with shardings as XLA's tile assignments
    module_text(m, style="short")  # for tests: %0, %1, …; of one computation just the lines

Symbolic sizes print as they are (`f32[s0,768]`), with `symbols={s0=(0,1)}` in the header: the value
of s0 is dimension 1 of parameter 0. `parser.parse_module` reads every style back to the same
interned root."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.dim import Dim, Size
from ..ir.instruction import (
    Computation,
    Instruction,
    Module,
    called,
)
from ..ir.literal import Literal
from ..ir.opcodes import COMMON_ATTRS, OPCODES
from ..ir.shape import DTYPES, Shape
from ..ir.window import Window, WindowDim
from ..sharding.sharding import sharding_text
from ..sharding.sharding_text import to_xla

STYLES = ("canonical", "full", "xla", "short")


def module_text(module: Module, style: str = "canonical", elide: int | None = None) -> str:
    """The program as text. Constants of more than `elide` elements print as `{...}`, which cannot
    be read back."""
    if style not in STYLES:
        raise ValueError(f"style {style!r}: use one of {', '.join(STYLES)}")
    order = computations(module.entry)
    printer = _Printer(style, elide, _computation_names(order))
    blocks = [printer.computation(c, c is order[-1]) for c in order]
    if style == "short" and not (
        module.aliases
        or module.symbols
        or module.constants
        or module.excess_precision
        or module.mesh
        or module.num_partitions > 1
        or module.num_replicas > 1
    ):
        return "\n\n".join(blocks) if len(blocks) > 1 else printer.body(module.entry)
    return "\n\n".join([_header(module), *blocks]) + "\n"


def computation_text(computation: Computation) -> str:
    """A computation and those it calls."""
    return module_text(Module(computation.name or "computation", computation))


def instruction_text(x: Instruction) -> str:
    """One line for messages: `%add = f32[4] add(f32[4] %parameter, f32[4] %multiply)`."""
    operands = ", ".join(f"{o.shape} %{_own_name(o) or o.op}" for o in x.operands)
    printer = _Printer("canonical", 16, {c: c.name or "computation" for c in called(x)})
    return (
        f"%{_own_name(x) or x.op} = {x.shape}"
        f" {x.op}({printer.inside(x, operands)}){printer.attributes(x)}"
    )


def computations(entry: Computation) -> list[Computation]:
    """Every computation of a program, called ones before their callers, the entry last."""
    order: list[Computation] = []
    seen = {entry}
    stack: list[tuple[Computation, Iterator[Computation]]] = [(entry, _callees(entry))]
    while stack:
        current, pending = stack[-1]
        for inner in pending:
            if inner not in seen:
                seen.add(inner)
                stack.append((inner, _callees(inner)))
                break
        else:
            order.append(current)
            stack.pop()
    return order


def _callees(c: Computation) -> Iterator[Computation]:
    return iter([inner for x in c.instructions() for inner in called(x)])


def shape_text(shape: Shape, layout: bool = False) -> str:
    """XLA's text of a shape; with `layout` row-major layouts are spelled out."""
    if shape.is_tuple:
        return "(" + ", ".join(shape_text(e, layout) for e in shape.elements) + ")"
    order = shape.layout
    if order is None and layout and shape.dims:
        order = tuple(reversed(range(shape.rank)))
    dims = ",".join(map(str, shape.dims))
    return f"{shape.dtype}[{dims}]" + (
        "" if order is None else "{" + ",".join(map(str, order)) + "}"
    )


def _header(module: Module) -> str:
    root = module.entry.root
    params = module.entry.params
    parts = [f"HloModule {_identifier(module.name) or 'module'}"]
    if module.aliases:

        def index(o: int) -> str:
            return "{" + (str(o) if root.op == "tuple" else "") + "}"

        parts.append(
            "input_output_alias={ "
            + ", ".join(f"{index(o)}: ({p}, {{}}, may-alias)" for o, p in module.aliases)
            + " }"
        )
    shapes = ", ".join(shape_text(p.shape, layout=True) for p in params)
    parts.append(f"entry_computation_layout={{({shapes})->{shape_text(root.shape, layout=True)}}}")
    if module.symbols:
        parts.append(
            "symbols={" + ", ".join(f"{name}=({p},{d})" for name, p, d in module.symbols) + "}"
        )
    if module.num_replicas > 1:
        parts.append(f"replica_count={module.num_replicas}")
    if (partitions := max(module.num_partitions, module.mesh.size if module.mesh else 1)) > 1:
        parts.append(f"num_partitions={partitions}")
    # What only this project reads stands where XLA's parser lets anything pass.
    extra = {"constants": ",".join(map(str, module.constants))} if module.constants else {}
    if module.excess_precision:
        extra["excess_precision"] = "true"
    if module.mesh is not None:
        extra["mesh"] = str(module.mesh)
        for name in ("in_shardings", "out_shardings"):
            if given := getattr(module, name):
                extra[name] = sharding_text(given)
        if module.out_dims:
            extra["out_dims"] = ", ".join(str(list(dims)) for dims in module.out_dims)
    if extra:
        parts.append(
            "frontend_attributes={"
            + ",".join(f"{name}={quoted(value)}" for name, value in extra.items())
            + "}"
        )
    return ", ".join(parts)


def _identifier(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", name).lstrip(".-")


def _own_name(x: Instruction) -> str:
    return _identifier(x.meta.name)


def _unique(name: str, taken: set[str]) -> str:
    found = name
    i = 1
    while found in taken:
        found = f"{name}.{i}"
        i = i + 1
    taken.add(found)
    return found


def _computation_names(order: list[Computation]) -> dict[Computation, str]:
    taken: set[str] = set()
    entry = order[-1]
    names = {entry: _unique(_identifier(entry.name) or "main", taken)}
    for c in order[:-1]:
        names[c] = _unique(_identifier(c.name) or "computation", taken)
    return names


@dataclass
class _Printer:
    """Prints computations in one style. `names` are the names of computations."""

    style: str
    elide: int | None
    names: dict[Computation, str]

    def computation(self, c: Computation, is_entry: bool) -> str:
        head = ("ENTRY " if is_entry else "") + f"%{self.names[c]} "
        order = c.instructions()
        names = self._instruction_names(order)
        if self.style != "short":
            params = ", ".join(f"{names[id(p)]}: {shape_text(p.shape)}" for p in c.params)
            head += f"({params}) -> {shape_text(c.root.shape)} "
        return head + "{\n" + self._lines(c, order, names, "  ") + "\n}"

    def body(self, c: Computation) -> str:
        """The instructions alone."""
        order = c.instructions()
        return self._lines(c, order, self._instruction_names(order), "")

    def _lines(
        self,
        c: Computation,
        order: list[Instruction],
        names: dict[int, str],
        indent: str,
    ) -> str:
        lines = []
        for x in order:
            operands = ", ".join("%" + names[id(o)] for o in x.operands)
            root = "ROOT " if x is c.root else ""
            line = (
                f"{indent}{root}%{names[id(x)]} = {shape_text(x.shape)}"
                f" {x.op}({self.inside(x, operands)}){self.attributes(x)}"
            )
            lines.append(line + (_metadata(x) if self.style == "full" else ""))
        return "\n".join(lines)

    def _instruction_names(self, order: list[Instruction]) -> dict[int, str]:
        if self.style == "short":
            return {id(x): str(i) for i, x in enumerate(order)}
        if self.style != "full":
            return {id(x): f"{x.op}.{i}" for i, x in enumerate(order)}
        taken: set[str] = set()
        return {id(x): _unique(_own_name(x) or f"{x.op}.{i}", taken) for i, x in enumerate(order)}

    def inside(self, x: Instruction, operands: str) -> str:
        """What stands between the parentheses."""
        if x.op == "parameter":
            return str(x["index"])
        if x.op == "constant":
            return literal_text(x["literal"], self.elide)
        return operands

    def attributes(self, x: Instruction) -> str:
        if not x.attrs and x.op not in _ALWAYS:
            return ""
        values = dict(x.attrs)
        for shown in (
            ("literal",) if x.op == "constant" else ("index",) if x.op == "parameter" else ()
        ):
            values.pop(shown, None)
        if x.op in _ALWAYS:
            values = {**{name: x[name] for name in _ALWAYS[x.op]}, **values}
        row = OPCODES.get(x.op)
        known = [n for n in (*row.attrs, *COMMON_ATTRS) if n in values] if row else []
        text = ""
        for name in (*known, *(n for n in values if n not in known)):
            text += self._attribute(x, name, values[name])
        return text

    def _attribute(self, x: Instruction, name: str, value: Any) -> str:
        if name == "branch_computations" and x.operand.dtype == "pred" and len(value) == 2:
            return (
                f", true_computation=%{self.names[value[0]]},"
                f" false_computation=%{self.names[value[1]]}"
            )
        if name == "serial":  # not an attribute of XLA
            return (
                f', frontend_attributes={{serial="{value}"}}'
                if x.get("frontend_attributes") is None
                else ""
            )
        if name == "frontend_attributes" and x.get("serial") is not None:
            value = value[:-1] + ("," if value.strip("{} ") else "") + f'serial="{x["serial"]}"}}'
        return f", {name}={self._value(name, value)}"

    def _value(self, name: str, value: Any) -> str:
        if name == "sharding":
            return to_xla(value) if self.style == "xla" else sharding_text(value)
        special = _ATTRIBUTES.get(name)
        if special is not None:
            return special(value)
        if isinstance(value, Computation):
            return "%" + self.names[value]
        if isinstance(value, Shape):
            return shape_text(value)
        if isinstance(value, bool):
            return "true" if value else "false"
        if type(value) is tuple:
            return "{" + ",".join(self._value("", v) for v in value) + "}"
        return str(value)


# Attributes at their default that XLA requires (or that read badly without).
_ALWAYS = {
    "dot": ("lhs_contracting_dims", "rhs_contracting_dims"),
    "cholesky": ("lower",),
    "gather": ("collapsed_slice_dims",),
    "scatter": ("inserted_window_dims",),
    "triangular-solve": ("left_side", "lower", "unit_diagonal", "transpose_a"),
}


def quoted(text: str) -> str:
    """A C string literal, as XLA writes."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    escaped = (
        escapes.get(c, c)
        if c.isprintable() or c in escapes
        else "".join(f"\\{b:03o}" for b in c.encode(errors="surrogateescape"))
        for c in text
    )
    return f'"{"".join(escaped)}"'


def size_text(size: Size) -> str:
    """A size inside a window or padding, where `x` and `_` separate: symbolic ones in
    parentheses."""
    return f"({size})" if isinstance(size, Dim) else str(size)


# Fields of a window, what they usually are (and are left out then), and their text.
_WINDOW: tuple[tuple[str, str, Callable[[WindowDim], str]], ...] = (
    ("size", "", lambda w: size_text(w.size)),
    ("stride", "1", lambda w: str(w.stride)),
    ("pad", "0_0", lambda w: f"{size_text(w.pad_low)}_{size_text(w.pad_high)}"),
    ("lhs_dilate", "1", lambda w: str(w.base_dilation)),
    ("rhs_dilate", "1", lambda w: str(w.window_dilation)),
    ("rhs_reversal", "0", lambda w: str(int(w.reversal))),
)


def window_text(window: Window) -> str:
    fields = []
    for name, usual, text in _WINDOW:
        values = [text(w) for w in window]
        if not usual or any(v != usual for v in values):
            fields.append(f"{name}={'x'.join(values)}")
    return "{" + " ".join(fields) + "}"


def _padding(value: tuple[tuple[Size, ...], ...]) -> str:
    def one(low: Size, high: Size, interior: Size) -> str:
        return f"{size_text(low)}_{size_text(high)}" + (
            f"_{size_text(interior)}" if interior != 0 else ""
        )

    return "x".join(one(*p) for p in value)


def _slice(value: tuple[tuple[int, ...], ...]) -> str:
    return "{" + ", ".join(f"[{a}:{b}]" if s == 1 else f"[{a}:{b}:{s}]" for a, b, s in value) + "}"


def _raw_or_quoted(value: str) -> str:
    return value if value[:1] == "{" else quoted(value)


_ATTRIBUTES: dict[str, Callable[[Any], str]] = {
    "window": window_text,
    "padding": _padding,
    "slice": _slice,
    "custom_call_target": quoted,
    "opaque": quoted,
    "backend_config": _raw_or_quoted,
    "frontend_attributes": str,
    "infeed_config": quoted,
    "outfeed_config": quoted,
    "async_execution_thread": quoted,
    "epsilon": lambda v: _float_text(np.float64(v)),
}


def _metadata(x: Instruction) -> str:
    meta = x.meta
    if not (meta.op_name or meta.source):
        return ""
    fields = [f"op_name={quoted(meta.op_name)}"] if meta.op_name else []
    if meta.source:
        name, _, line = meta.source.rpartition(":")
        if name and line.isdigit():
            fields += [f"source_file={quoted(name)}", f"source_line={line}"]
        else:
            fields.append(f"source_file={quoted(meta.source)}")
    return ", metadata={" + " ".join(fields) + "}"


# Literals


def literal_text(value: Literal, elide: int | None = None) -> str:
    """`1.5`, `{1, 2}`, `{ { 1, 2 }, { 3, 4 } }`; `{...}` above `elide` elements."""
    array = value.numpy()
    if elide is not None and array.size > elide:
        return "{...}"
    texts = _element_texts(array, value.dtype)
    if not value.dims:
        return texts[0]
    return _nested(iter(texts), value.dims)


def _nested(texts: Iterator[str], dims: tuple[int, ...]) -> str:
    if len(dims) == 1:
        return "{" + ", ".join([next(texts) for _ in range(dims[0])]) + "}"
    return "{ " + ", ".join(_nested(texts, dims[1:]) for _ in range(dims[0])) + " }"


def _element_texts(array: np.ndarray, dtype: str) -> list[str]:
    flat = array.ravel()
    kind = DTYPES[dtype].kind
    if kind == "p":
        return ["true" if v else "false" for v in flat.tolist()]
    if kind in "su":
        return list(map(str, flat.tolist()))
    if kind == "c":
        return [
            f"({a}, {b})" for a, b in zip(map(_float_text, flat.real), map(_float_text, flat.imag))
        ]
    if not np.isnan(flat).any():
        return (
            [_trimmed(t) for t in flat.astype(np.float64).tolist()]
            if flat.dtype == np.float64
            else list(map(_float_text, flat))
        )
    return [_float_text(v, dtype) for v in flat]


# Fraction bits and canonical quiet nan of the storage types.
_FRACTION = {2: (10, 0x200), 4: (23, 0x400000), 8: (52, 0x8000000000000)}


def _float_text(value: np.floating, dtype: str | None = None) -> str:
    if np.isnan(value):
        bits = int.from_bytes(value.tobytes(), "little")
        fraction, quiet = _FRACTION[value.dtype.itemsize]
        payload = bits & ((1 << fraction) - 1)
        if dtype == "bf16":
            payload = payload >> 16
            quiet = quiet >> 16
        sign = "-" if np.signbit(value) else ""
        # f8 types have one nan, or none that text tells apart.
        return sign + (
            "nan" if payload == quiet or (dtype or "").startswith("f8") else f"nan({payload:#x})"
        )
    return _trimmed(str(value))


def _trimmed(value: float | str) -> str:
    text = str(value)
    return text[:-2] if text.endswith(".0") else text
