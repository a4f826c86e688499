"""HLO text -> Module: everything XLA, JAX and TensorFlow print, and every style of printer.py.

    module = parse_module(text)        # ParseError with line, column and a caret

Read but without effect: layouts inside the program, tilings, schedules, metadata (kept as notes),
device placement of the header. A layout other than row-major of an entry parameter or result is
kept on its shape, next to a `copy` from or to the row-major array (values of arrays are logical
everywhere, so such a copy changes no value). A `bitcast` between layouts becomes transposes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir import (
    COMMON_ATTRS,
    OPCODES,
    Computation,
    Dim,
    Instruction,
    Ints,
    Literal,
    Meta,
    Module,
    Shape,
    ShapeError,
    begin_program,
    has_effect,
    instr,
    lost_effect,
    parameters_of,
    replace,
    symbols,
    tuple_shape,
)
from ..sharding.sharding import (
    Mesh,
    Placement,
    Sharding,
    ShardingError,
)
from ..sharding.sharding_text import (
    common_mesh,
    mesh_from_text,
    parse_sharding,
)
from . import attributes
from .attributes import ATTRIBUTES, HARMLESS, Ref, name, plain, raw, shape
from .header import HEADER
from .layouts import bitcast, has_layout, kept_copy, replaced
from .literals import parse_nested_literal
from .scanner import ParseError, Scanner

__all__ = ["ParseError", "parse_module", "parse_computation"]

MAX_INSTRUCTIONS = 5_000_000
_OPCODE = re.compile(r"[a-z][a-z0-9\-]*+")
_HEAD = re.compile(r"HloModule\b")
_ROOT = re.compile(r"ROOT\b")
_ENTRY = re.compile(r"ENTRY\b")
_DEFINITION = re.compile(r"(?:ROOT\s+)?(?:%?[A-Za-z0-9_][\w.\-]*+|%\"[^\"\n]+\")\s*=")
_TABLES = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\b")
_ROW = re.compile(r"(\d{1,9})\s+(\"(?:[^\"\\\n]++|\\.)*+\"|\{[^{}\n]*\})")
_PLAIN_OPERAND = re.compile(r"%([A-Za-z0-9_][\w.\-]*+)\s*([,)])")
_CONSTANT = re.compile(r"(?:[^()\"]++|\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\))*+")


@dataclass(slots=True)
class _Line:
    """One instruction as written."""

    name: str
    position: int
    shape: Shape
    op: str
    operands: list[tuple[str, int]] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    value: Any = None  # parameter number or literal
    is_root: bool = False
    metadata: dict[str, str] | None = None


@dataclass(slots=True)
class _Block:
    name: str
    position: int
    lines: list[_Line]


def parse_module(text: str) -> Module:
    """The program that `text` describes. Raises ParseError."""
    return _Parser(text).module()


def parse_computation(text: str) -> Computation:
    """The entry computation of `parse_module(text)`."""
    return parse_module(text).entry


class _Parser:
    def __init__(self, text: str) -> None:
        begin_program()
        self.s = Scanner(text)
        self.blocks: dict[str, _Block] = {}
        self.built: dict[str, Computation] = {}
        self.header: dict[str, tuple[Any, int]] = {}  # (value, position)
        self.tables: dict[str, dict[str, str]] = {}  # title -> number -> row
        self.mesh: Mesh | None = None
        self.entry: str | None = None
        self.count = 0

    def module(self) -> Module:
        s = self.s
        module_name = self._header() if s.match(_HEAD) else "module"
        while not s.done():
            if found := s.match(_TABLES):
                self._table(found.group(1))
            elif s.peek(_DEFINITION):  # the short style: bare lines
                begin = s.pos
                self._add_block(
                    _Block("main", begin, self._lines(lambda: s.done() or not s.peek(_DEFINITION))),
                    True,
                )
            else:
                self._block()
        if not self.blocks:
            raise s.error("the text holds no computation")
        return self._finish(module_name, self.entry or next(reversed(self.blocks)))

    # The header

    def _header(self) -> str:
        s = self.s
        module_name = name(s, "the module's name")
        while s.accept(","):
            at = s.skip()
            key = s.need(attributes.WORD, "an attribute").group()
            s.expect("=")
            if key in HEADER:
                self.header[key] = (HEADER[key](s), at)
            else:
                raw(s)
                if s.accept("->"):
                    raw(s)
        return module_name

    def _table(self, title: str) -> None:
        rows: dict[str, str] = {}
        while found := self.s.match(_ROW):
            rows[found.group(1)] = found.group(2)
        self.tables[title] = rows

    # Computations and instructions as written

    def _block(self) -> None:
        s = self.s
        is_entry = s.match(_ENTRY) is not None
        begin = s.skip()
        block_name = name(s, "a computation")
        if s.at("("):
            s.listed("(", ")", self._signature)
            s.expect("->")
            shape(s)
        while s.accept(","):
            self._ignored_attribute()
        s.expect("{", "of the computation")
        lines = self._lines(lambda: s.at("}") or s.done())
        s.expect("}", "at the end of the computation")
        while s.accept(","):
            self._ignored_attribute()
        self._add_block(_Block(block_name, begin, lines), is_entry)

    def _signature(self) -> None:
        if not self.s.at("(") and not self.s.peek(re.compile(r"[a-z]\w*\[")):
            name(self.s)
            self.s.expect(":")
        shape(self.s)

    def _ignored_attribute(self) -> None:
        self.s.need(attributes.WORD, "an attribute")
        self.s.expect("=")
        raw(self.s)

    def _add_block(self, block: _Block, is_entry: bool) -> None:
        if block.name in self.blocks:
            raise self.s.error(f"computation {block.name!r} is defined twice", block.position)
        if not block.lines:
            raise self.s.error(f"computation {block.name!r} has no instructions", block.position)
        self.blocks[block.name] = block
        if is_entry:
            if self.entry is not None:
                raise self.s.error("a second ENTRY", block.position)
            self.entry = block.name

    def _lines(self, stop: Callable[..., Any]) -> list[_Line]:
        lines = []
        while not stop():
            lines.append(self._line())
            self.count += 1
            if self.count > MAX_INSTRUCTIONS:
                raise self.s.error(f"more than {MAX_INSTRUCTIONS} instructions")
        return lines

    def _line(self) -> _Line:
        s = self.s
        is_root = s.match(_ROOT) is not None
        begin = s.skip()
        line_name = name(s, "an instruction")
        s.expect("=", "of an instruction")
        line_shape = shape(s)
        at = s.skip()
        line = _Line(
            line_name,
            begin,
            line_shape,
            s.need(_OPCODE, "an opcode").group(),
            is_root=is_root,
        )
        s.expect("(", "of the operands")
        if line.op == "parameter":
            line.value = s.integer("the parameter's number")
            s.expect(")")
        elif line.op == "constant":
            where = s.skip()
            text = s.need(_CONSTANT, "a constant").group()
            s.expect(")")
            line.value = parse_nested_literal(s, text, plain(line_shape), where)
        elif not s.accept(")"):
            self._operands(line)
        if line.op not in OPCODES and not _is_async(line.op):
            raise s.error(f"unknown opcode {line.op!r}", at)
        while s.accept(","):
            self._attribute(line)
        return line

    def _operands(self, line: _Line) -> None:
        s = self.s
        while True:
            begin = s.skip()
            if found := s.match(_PLAIN_OPERAND):
                line.operands.append((found.group(1), begin))
                if found.group(2) == ")":
                    return
                continue
            if s.at("(") or s.peek(re.compile(r"[a-z]\w*\[")):
                shape(s)
            begin = s.skip()
            line.operands.append((name(s, "an operand"), begin))
            if s.accept(")"):
                return
            s.expect(",")

    def _attribute(self, line: _Line) -> None:
        s = self.s
        begin = s.skip()
        key = s.need(attributes.WORD, "an attribute").group()
        s.expect("=")
        row = OPCODES.get(line.op)
        if key == "dim_labels":
            line.attrs[key] = s.need(
                re.compile(r"[\w?]+->[\w?]+"), "labels such as bf01_oi01->bf01"
            ).group()
        elif key == "metadata":
            line.metadata = attributes.metadata(s)
        elif (
            key == "algorithm"
            and line.op != "rng-bit-generator"
            or key == "kind"
            and line.op != "fusion"
        ):
            raw(s)  # of dot: which precision the hardware uses
        elif key in ATTRIBUTES:
            if key in line.attrs:
                raise s.error(f"attribute {key} is given twice", begin)
            value = ATTRIBUTES[key](s)
            legal = row is None or key in row.attrs or key in COMMON_ATTRS or key in _REWRITTEN
            if legal:
                line.attrs[key] = value
            elif key not in _OPTIONAL:
                raise s.error(f"{line.op} has no attribute {key!r}", begin)
        elif key in COMMON_ATTRS or row is not None and key in row.attrs:
            line.attrs[key] = raw(s)
        elif key in HARMLESS:
            raw(s)
        else:
            raise s.error(f"unknown attribute {key!r} of {line.op}", begin)

    # Building

    def _finish(self, module_name: str, entry: str) -> Module:
        self.mesh = self._mesh()
        self._build_all(entry)
        c = self.built[entry]
        c = self._with_layouts(c, self.blocks[entry])
        c = self._with_open_shardings(c)
        aliases, at = self.header.get("input_output_alias", ((), 0))
        results = len(c.root.operands) if c.root.op == "tuple" else 1
        for output, param in aliases:
            if not (0 <= output < results and 0 <= param < len(c.params)):
                raise self.s.error(
                    f"alias of output {output} and parameter {param}: there are {results} and"
                    f" {len(c.params)}",
                    at,
                )
        partitions, replicas = (self._given(key, 1) for key in ("num_partitions", "replica_count"))
        ins = self._boundary_shardings("in_shardings", [p.shape for p in c.params])
        if (
            partitions > 1
            and self._given("is_scheduled", "") == "true"
            and c.params
            and all(p.get("sharding") for p in c.params)
        ):
            # By XLA, after its partitioner: what it leaves on parameters is history.
            ins = tuple(p.get("sharding") for p in c.params)
            swaps = {p: instr("parameter", (), p.shape, index=p["index"]) for p in c.params}
            for old, new in swaps.items():
                new.meta = old.meta
            c = Computation(c.name, tuple(swaps.values()), replaced(c.root, swaps))
        outs = self._boundary_shardings(
            "out_shardings",
            [x.shape for x in c.results],
        )
        return Module(
            module_name,
            c,
            tuple(aliases),
            self._symbols(c),
            self.mesh,
            partitions,
            replicas,
            ins,
            outs,
            self._out_dims(),
            self._constants(c),
            self._given("frontend_attributes", {}).get("excess_precision") == "true",
        )

    def _constants(self, c: Computation) -> Ints:
        text = self._given("frontend_attributes", {}).get("constants", "")
        return tuple(n for n in map(int, re.findall(r"\d{1,9}", text)) if n < len(c.params))

    def _out_dims(self) -> tuple[Ints, ...]:
        text = self._given("frontend_attributes", {}).get("out_dims", "")
        return tuple(
            tuple(int(n) for n in re.findall(r"\d{1,18}", dims))
            for dims in re.findall(r"\[([^\[\]]*)\]", text)
        )

    def _given(self, key: str, default: Any = None) -> Any:
        """A header attribute."""
        return self.header[key][0] if key in self.header else default

    def _mesh(self) -> Mesh | None:
        """The mesh that the header names, or the coarsest one for the tile assignments of the
        program."""
        texts = [
            line.attrs["sharding"]
            for block in self.blocks.values()
            for line in block.lines
            if "sharding" in line.attrs
        ]
        named = self._given("frontend_attributes", {}).get("mesh")
        try:
            if named is not None:
                return mesh_from_text(named)
            return common_mesh(texts, self._given("num_partitions", 1)) if texts else None
        except ShardingError as error:
            raise self.s.error(str(error), 0) from None

    def _with_open_shardings(self, c: Computation) -> Computation:
        """Where XLA allows propagation to change the sharding of an output, a written
        `{replicated}` says nothing."""
        given = c.root.get("sharding")
        allowed = self._given("allow_spmd_sharding_propagation_to_output", ())
        if given is None or not any(allowed):
            return c
        parts = given if type(given) is tuple else (given,)
        flags = allowed * len(parts) if len(allowed) == 1 else allowed
        if len(flags) != len(parts):
            raise self.s.error(
                f"allow_spmd_sharding_propagation_to_output has {len(flags)} flags for {len(parts)}"
                " results",
                0,
            )
        opened = tuple(
            _opened(s) if flag and type(s) is Sharding and s.is_replicated else s
            for s, flag in zip(parts, flags)
        )
        return Computation(
            c.name,
            c.params,
            replace(c.root, sharding=opened if type(given) is tuple else opened[0]),
        )

    def _boundary_shardings(self, key: str, shapes: list[Shape]) -> tuple[Any, ...]:
        text = self._given("frontend_attributes", {}).get(key)
        if text is None or self.mesh is None:
            return ()
        try:
            given = parse_sharding(text, tuple_shape(*shapes), self.mesh)
            return given if isinstance(given, tuple) else ()
        except ShardingError as error:
            raise self.s.error(f"{key}: {error}", 0) from None

    def _build_all(self, entry: str) -> None:
        """Build the computations, called ones first, without recursion."""
        stack = [entry, *reversed(self.blocks)]
        open_ = set()
        while stack:
            current = stack[-1]
            if current in self.built:
                stack.pop()
                continue
            block = self.blocks[current]
            missing = []
            for ref in (r for line in block.lines for r in _refs(line)):
                if ref.name not in self.blocks:
                    raise self.s.error(f"computation {ref.name!r} is not defined", ref.position)
                if ref.name in open_ or ref.name == current:
                    raise self.s.error(f"computation {ref.name!r} calls itself", ref.position)
                if ref.name not in self.built:
                    missing.append(ref.name)
            if missing:
                open_.add(current)
                stack += missing
            else:
                open_.discard(current)
                self.built[current] = self._build(block)
                stack.pop()

    def _build(self, block: _Block) -> Computation:
        values: dict[str, Instruction] = {}
        written: dict[str, Shape] = {}
        params: dict[int, Instruction] = {}
        root = None
        for line in block.lines:
            if line.name in values:
                raise self.s.error(f"{line.name!r} is defined twice", line.position)
            operands = []
            for operand, position in line.operands:
                if operand not in values:
                    raise self.s.error(f"{operand!r} is not defined before its use", position)
                operands.append(values[operand])
            x = self._instruction(line, operands, [written[n] for n, _ in line.operands])
            values[line.name] = x
            written[line.name] = line.shape
            if x.op == "parameter":
                if x["index"] in params:
                    raise self.s.error(f"a second parameter {x['index']}", line.position)
                params[x["index"]] = x
            self._describe(x, line)
            if line.is_root:
                if root is not None:
                    raise self.s.error("a second ROOT", line.position)
                root = x
        if sorted(params) != list(range(len(params))):
            raise self.s.error(
                f"computation {block.name!r} has parameters {sorted(params)}; they are numbered"
                " from 0",
                block.position,
            )
        root = root if root is not None else x
        for line in block.lines:
            if has_effect(values[line.name]) and (lost := lost_effect(root, values[line.name])):
                raise self.s.error(lost, line.position)
        return Computation(block.name, tuple(params[i] for i in range(len(params))), root)

    def _instruction(
        self, line: _Line, operands: list[Instruction], written: Sequence[Shape]
    ) -> Instruction:
        try:
            return self._made(line, operands, written)
        except ParseError:
            raise
        except ShapeError as error:
            raise self.s.error(str(error), line.position) from None
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
        ) as error:
            # A shape rule met attributes it did not expect.
            raise self.s.error(
                f"{line.op}: bad operands or attributes ({error})", line.position
            ) from error

    def _made(
        self, line: _Line, operands: list[Instruction], written: Sequence[Shape]
    ) -> Instruction:
        want = plain(line.shape)
        if line.op == "parameter":
            return instr(
                "parameter",
                (),
                want,
                index=line.value,
                sharding=self._sharding(line, want),
            )
        if line.op == "constant":
            return _constant(line.value, self._sharding(line, want))
        attrs: dict[str, Any] = {k: self._resolved(v) for k, v in line.attrs.items()}
        if "sharding" in attrs:
            attrs["sharding"] = self._sharding(line, want)
        _rewrite_attributes(line.op, attrs)
        if line.op not in OPCODES:
            return self._async(line, operands, attrs, want)
        if line.op == "bitcast":
            return bitcast(operands, want, line.shape, written)
        if line.op == "select" and operands and not operands[0].dims and want.dims:
            operands = [
                instr("broadcast", operands[:1], want.with_dtype("pred"), dimensions=()),
                *operands[1:],
            ]
        if line.op == "reshape" and len(operands) > 1:
            raise ShapeError("reshape takes one operand")
        OPCODES[line.op].verify(want, *operands, **attrs)
        return instr(line.op, operands, want, **attrs)

    def _sharding(self, line: _Line, shape: Shape) -> Placement | None:
        text = line.attrs.get("sharding")
        return None if text is None or self.mesh is None else parse_sharding(text, shape, self.mesh)

    def _async(
        self,
        line: _Line,
        operands: list[Instruction],
        attrs: dict[str, Any],
        want: Shape,
    ) -> Instruction:
        """`x-start(operands), attributes of x`: short for async-start of a computation that is one
        x."""
        inner, _, kind = line.op.rpartition("-")
        if kind != "start":
            return instr(f"async-{kind}", operands, want)
        if len(want.elements) < 2:
            raise ShapeError(f"{line.op}: the result must be ((operands), results, …)")
        params = parameters_of(o.shape for o in operands)
        if calls := attrs.pop("calls", None) if inner not in ("fusion",) else None:
            return instr("async-start", operands, want, calls=calls)
        thread = attrs.pop("async_execution_thread", None)
        OPCODES[inner].verify(want.elements[1], *params, **attrs)
        root = instr(inner, params, want.elements[1], **attrs)
        calls = Computation(f"async_{inner}", params, root)
        return instr("async-start", operands, want, calls=calls, async_execution_thread=thread)

    def _resolved(self, value: object) -> object:
        if isinstance(value, Ref):
            return self.built[value.name]
        if type(value) is tuple and value and isinstance(value[0], Ref):
            return tuple(self.built[r.name] for r in value)
        return value

    def _describe(self, x: Instruction, line: _Line) -> None:
        fields = line.metadata or {}
        source = fields.get("source_file", "")
        if source and "source_line" in fields:
            source += ":" + fields["source_line"]
        if not source and "stack_frame_id" in fields:
            source = self._frame(fields["stack_frame_id"])
        x.meta = Meta(line.name, fields.get("op_name", ""), source)

    def _frame(self, frame: str) -> str:
        def number(table: str, row: str, key: str) -> str:
            found = re.search(rf"\b{key}=(\d+)", self.tables.get(table, {}).get(row, ""))
            return found.group(1) if found else ""

        location = number("StackFrames", frame, "file_location_id")
        file = number("FileLocations", location, "file_name_id")
        line = number("FileLocations", location, "line")
        path = self.tables.get("FileNames", {}).get(file, "").strip('"')
        return f"{path}:{line}" if path else ""

    # The boundary of the program

    def _with_layouts(self, c: Computation, block: _Block) -> Computation:
        """Keep layouts other than row-major of parameters and results, with copies at the
        boundary."""
        by_index = {line.value: line.shape for line in block.lines if line.op == "parameter"}
        wanted = [by_index[i] for i in range(len(c.params))]
        root_line = next((line for line in block.lines if line.is_root), block.lines[-1])
        result = root_line.shape
        if (given := self.header.get("entry_computation_layout")) is not None:
            (param_shapes, result_shape), at = given
            if [plain(s) for s in param_shapes] != [p.shape for p in c.params] or plain(
                result_shape
            ) != c.root.shape:
                raise self.s.error(
                    "entry_computation_layout does not match the ENTRY computation",
                    at,
                )
            wanted = param_shapes
            result = result_shape
        if not any(has_layout(w) for w in (*wanted, result)):
            return c
        swaps = {}
        params = []
        for p, w in zip(c.params, wanted, strict=True):
            if w.layout is None:
                params.append(p)
                continue
            outer = instr("parameter", (), w, index=p["index"], sharding=p.get("sharding"))
            swaps[p] = kept_copy(outer, p.shape)
            params.append(outer)
        root = replaced(c.root, swaps)
        if root.op == "tuple":
            pieces = [
                kept_copy(o, s) if s.layout is not None else o
                for o, s in zip(root.operands, result.elements, strict=True)
            ]
            root = instr("tuple", pieces, tuple_shape(*(p.shape for p in pieces)))
        elif result.layout is not None:
            root = kept_copy(root, result)
        return Computation(c.name, tuple(params), root)

    def _symbols(self, c: Computation) -> tuple[tuple[str, int, int], ...]:
        at_entry = self.blocks[self.entry].position if self.entry else 0
        given, at = self.header.get("symbols", (None, at_entry))
        found: list[tuple[str, int, int]] = [] if given is None else given
        if given is None:
            seen: set[str] = set()
            for i, p in enumerate(c.params):
                for d, n in enumerate(p.dims):
                    if isinstance(n, Dim) and str(n) in symbols(n) and str(n) not in seen:
                        seen.add(str(n))
                        found.append((str(n), i, d))
        for symbol_name, i, d in found:
            if (
                i >= len(c.params)
                or d >= c.params[i].rank
                or str(c.params[i].dims[d]) != symbol_name
            ):
                raise self.s.error(
                    f"symbol {symbol_name} is not dimension {d} of parameter {i}",
                    at,
                )
        bound = {n for n, _, _ in found}
        for x in c.instructions():
            for size in x.dims:
                if isinstance(size, Dim) and (free := symbols(size) - bound):
                    raise self.s.error(
                        f"symbol {min(free)} in {x.shape} is no size of a parameter",
                        at,
                    )
        return tuple(found)


def _opened(s: Sharding) -> Sharding:
    return Sharding.replicate(s.mesh, s.rank, open=True)


def _refs(line: _Line) -> Iterator[Ref]:
    for value in line.attrs.values():
        if isinstance(value, Ref):
            yield value
        elif type(value) is tuple and value and isinstance(value[0], Ref):
            yield from value


def _is_async(op: str) -> bool:
    inner, _, kind = op.rpartition("-")
    return kind in ("start", "done", "update") and inner in OPCODES


def _constant(value: Literal, sharding: Placement | None = None) -> Instruction:
    if isinstance(value, Literal):
        return instr("constant", (), value.shape, literal=value, sharding=sharding)
    return instr("tuple", map(_constant, value))


# Attributes that another spelling replaces, and ones that XLA prints on some opcodes where they say
# nothing new.
_REWRITTEN = ("true_computation", "false_computation", "serial")
_OPTIONAL = frozenset(
    "channel_id indices_are_sorted unique_indices use_global_device_ids operand_precision type"
    " dimensions async_execution_thread constrain_layout called_computations"
    " custom_call_has_side_effect".split()
)
_SERIAL = re.compile(r'(?:,\s*)?serial="(\d{1,18})"')


def _rewrite_attributes(op: str, attrs: dict[str, Any]) -> None:
    """XLA's spellings that say the same as ours."""
    if "true_computation" in attrs:
        attrs["branch_computations"] = (
            attrs.pop("true_computation"),
            attrs.pop("false_computation"),
        )
    if op == "compare" and attrs.get("type") != "TOTALORDER":
        attrs.pop("type", None)  # the operands' type says it
    if set(attrs.get("operand_precision", ("highest",))) == {"default"}:
        del attrs["operand_precision"]
    if (text := attrs.get("frontend_attributes")) and (found := _SERIAL.search(text)):
        attrs["serial"] = int(found.group(1))
        rest = _SERIAL.sub("", text).replace("{,", "{")
        if rest.strip("{} "):
            attrs["frontend_attributes"] = rest
        else:
            del attrs["frontend_attributes"]
    if attrs.get("api_version") == "API_VERSION_ORIGINAL":
        del attrs["api_version"]
