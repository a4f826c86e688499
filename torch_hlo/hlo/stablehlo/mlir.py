"""The operations of MLIR text, generic (`"stablehlo.add"(%0, %1) : …`) and pretty (`stablehlo.add
%0, %1 : …`), in one form.

    name, functions, meshes = parse_text(scanner, syntax)     # {"main": Operation("func.func")}

What a pretty form writes between the operands and the types becomes attributes: `dims = [0]` is
attrs["dims"], a bare word is attrs["word"], `[0:4:2]` is attrs["ranges"], `[1] x [0]` a pair of
lists. convert.py knows both names of an attribute."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ..text.scanner import ErrorAt, Scanner
from .attributes import RESOURCES, Dense, FunctionType, attribute, dictionary, symbol
from .operation import Block, Operation
from .shardings import Annotations
from .types import Type, parse_type, parse_types

MAX_NESTING = 60
MAX_OPERATIONS = 5_000_000
_RESULT = re.compile(r"%([A-Za-z0-9_$.\-]+)(?::(\d{1,6}))?")
_USE = re.compile(r"%([A-Za-z0-9_$.\-]+)(?:#(\d{1,6}))?")
_QUOTED = re.compile(r'"([A-Za-z_][\w$.\-]*)"')
_NAME = re.compile(r"[A-Za-z_][\w$]*(?:\.[\w$]+)*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")
_RANGES = re.compile(r"\[\s*(?:\d+\s*:[\d:,\s]*)\]")
_LOC = re.compile(r"loc\b")
_ALIAS = re.compile(r"[#!][\w$.\-]+\s*=")
# a dictionary, not the body of a function
_ATTRIBUTES = re.compile(r'\{\s*(?:\}|"?[A-Za-z_][\w$.\-]*"?\s*(?:[=,}]))')
_BLOCK = re.compile(r"\^([\w$.\-]+)")


Program = tuple[str, dict[str, Operation], list[Operation], Annotations]


def parse_text(s: Scanner, syntax: Mapping[str, PrettyForm]) -> Program:
    """(module name, functions by name, meshes, annotations). `syntax`: readers of pretty forms by
    operation. Raises ParseError."""
    return Reader(s, syntax).text()


def collect(operations: list[Operation], s: ErrorAt) -> Program:
    """The functions and meshes among the outermost operations, and all annotations."""
    name = "module"
    functions = {}
    meshes = []
    todo = operations[::-1]
    while todo:
        op = todo.pop()
        if op.name in ("builtin.module", "module"):
            name = str(op.attrs.get("sym_name", name))
            todo += [inner for block in op.regions for inner in block.ops][::-1]
        elif op.name == "func.func":
            found = str(op.attrs.get("sym_name", "main"))
            if isinstance(kind := op.attrs.get("function_type"), FunctionType):
                op.types = list(kind.results)
            if found in functions:
                raise s.error(f"function @{found} is defined twice", op.position)
            functions[found] = op
        elif op.name == "sdy.mesh":
            meshes.append(op)
        elif not op.name.startswith(("sdy.", "memref.")):
            raise s.error(f"unexpected operation {op.name} outside a function", op.position)
    if not functions:
        raise s.error("the program holds no function")
    return name, functions, meshes, Annotations(operations)


class Reader:
    def __init__(self, s: Scanner, syntax: Mapping[str, PrettyForm]) -> None:
        self.s = s
        self.syntax = syntax
        self.count = 0
        self.attributes: list[dict[str, object]] = []  # of the arguments or results read last

    def text(self) -> Program:
        found = []
        while not self.s.done() and not self.s.at(RESOURCES):
            if self.s.match(_ALIAS):
                self._skip_alias()
            else:
                found.append(self.operation(0))
        return collect(found, self.s)

    def _skip_alias(self) -> None:
        s = self.s
        if not s.at("!"):
            attribute(s)
        else:
            parse_type(s)
        self._location()

    def operation(self, depth: int) -> Operation:
        s = self.s
        if depth > MAX_NESTING:
            raise s.error(f"regions nest deeper than {MAX_NESTING}")
        self.count += 1
        if self.count > MAX_OPERATIONS:
            raise s.error(f"more than {MAX_OPERATIONS} operations")
        results = []
        if s.at("%"):
            while True:
                result = s.need(_RESULT, "a result")
                results.append((result.group(1), int(result.group(2) or 1)))
                if not s.accept(","):
                    break
            s.expect("=")
        begin = s.skip()
        if found := s.match(_QUOTED):
            op = Operation(_short(found.group(1)), begin, results)
            self._generic(op, depth)
        else:
            op = Operation(_short(s.need(_NAME, "an operation").group()), begin, results)
            if op.name in ("module", "builtin.module"):
                self._module(op, depth)
            elif op.name == "func.func":
                self._function(op, depth)
            else:
                self._pretty(op, depth)
        self._location()
        return op

    def _location(self) -> None:
        if self.s.match(_LOC):
            self.s.balanced()

    # Generic form

    def _generic(self, op: Operation, depth: int) -> None:
        s = self.s
        op.operands = s.listed("(", ")", self.use)
        if s.accept("["):
            raise s.error("operations with successor blocks are not supported")
        if s.accept("<"):
            op.attrs.update(dictionary(s))
            s.expect(">")
        if s.at("("):
            op.regions = s.listed("(", ")", lambda: self.region(depth + 1))
        if s.at("{"):
            op.attrs.update(dictionary(s))
        s.expect(":", "and the types")
        parse_types(s)
        s.expect("->")
        op.types = parse_types(s)

    def use(self) -> tuple[str, int]:
        found = self.s.need(_USE, "an operand such as %0")
        return found.group(1), int(found.group(2) or 0)

    def region(self, depth: int, args: list[tuple[str, Type]] | None = None) -> Block:
        """`{ ^bb0(%a: type): operations }`: one block."""
        s = self.s
        s.expect("{")
        block = Block(list(args or []))
        if s.match(_BLOCK):
            if s.at("("):
                block.args += s.listed("(", ")", self.typed_argument)
            s.expect(":")
        while not s.accept("}"):
            if s.at("^"):
                raise s.error(
                    "control flow between blocks is not supported; use stablehlo.while and"
                    " stablehlo.case"
                )
            block.ops.append(self.operation(depth))
        return block

    def typed_argument(self) -> tuple[str, Type]:
        name = self.use()[0]
        self.s.expect(":")
        found = parse_type(self.s)
        self.attributes.append(dictionary(self.s) if self.s.at("{") else {})
        self._location()
        return name, found

    # Module and functions

    def _module(self, op: Operation, depth: int) -> None:
        s = self.s
        if s.at("@"):
            op.attrs["sym_name"] = symbol(s, "the module's @name")
        if s.accept("attributes"):
            op.attrs.update(dictionary(s))
        op.regions = [self.region(depth + 1)]

    def _function(self, op: Operation, depth: int) -> None:
        s = self.s
        while found := s.match(re.compile(r"(public|private|nested)\b")):
            op.attrs["sym_visibility"] = found.group()
        op.attrs["sym_name"] = symbol(s, "the function's @name")
        self.attributes.clear()
        args = s.listed(
            "(",
            ")",
            lambda: self.typed_argument() if s.at("%") else ("", self._result_type()),
        )
        op.attrs["arg_attrs"] = self.attributes.copy()
        self.attributes.clear()
        if s.accept("->"):
            op.types = s.listed("(", ")", self._result_type) if s.at("(") else [self._result_type()]
        op.attrs["res_attrs"] = self.attributes.copy()
        if s.accept("attributes"):
            op.attrs.update(dictionary(s))
        if s.at("{"):
            op.regions = [self.region(depth + 1, args)]

    def _result_type(self) -> Type:
        found = parse_type(self.s)
        self.attributes.append(
            dictionary(self.s) if self.s.at("{") and self.s.peek(_ATTRIBUTES) else {}
        )
        return found

    # Pretty form

    def _pretty(self, op: Operation, depth: int) -> None:
        s = self.s
        special = {"reduce": self._reduce, "while": self._while}.get(op.name)
        if special is not None:
            special(op, depth)
            return
        if op.name in self.syntax:
            self.syntax[op.name](self, op, depth)
            return
        self._items(op)
        if s.accept(":"):
            op.types = self.types(op.name in _ALL_TYPES)

    def _items(self, op: Operation) -> None:
        """Everything up to the types: operands, keywords, words, attributes."""
        s = self.s
        while True:
            if s.at("%"):
                op.operands.append(self.use())
                if s.at("[") and op.name == "get_tuple_element":
                    op.attrs["index"] = s.listed("[", "]", s.integer)[0]
            elif s.at("@"):
                op.attrs["callee"] = attribute(s)
            elif s.at("("):
                s.pos += 1
                if not s.accept(")"):
                    self._items(op)
                    s.expect(")")
            elif s.at("{"):
                op.attrs.update(dictionary(s))
            elif s.at("<{"):
                s.expect("<")
                op.attrs.update(dictionary(s))
                s.expect(">")
            elif s.at("dense"):
                op.attrs["value"] = attribute(s)
                if isinstance(op.attrs["value"], Dense):
                    op.types = [op.attrs["value"].type]
                return
            elif s.at('"'):
                op.attrs["name"] = s.string()
            elif s.peek(_RANGES):
                op.attrs["ranges"] = s.listed("[", "]", self._range)
            elif found := s.match(_KEYWORD):
                op.attrs[found.group(1)] = self._keyword_value(found.group(1))
            elif not s.peek(_LOC) and (found := s.peek(_WORD)) and op.name in _WITH_WORDS:
                s.pos = found.end()
                op.attrs.setdefault("word" if "word" not in op.attrs else "word2", found.group())
            elif not s.accept(","):
                return

    def _keyword_value(self, key: str) -> object:
        s = self.s
        if key in ("batching_dims", "contracting_dims"):
            left = attribute(s)
            s.expect("x")
            return left, attribute(s)
        if key == "dim_numbers":
            found = s.need(
                re.compile(r"\[[\w?,\s]*\]\s*x\s*\[[\w?,\s]*\]\s*->\s*\[[\w?,\s]*\]"),
                "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]",
            )
            return found.group()
        if key == "window":
            return dictionary(s)
        if key == "algorithm" and s.at("<"):
            s.accept("<")
            while not s.accept(">"):
                s.need(_WORD, "a field")
                s.expect("=")
                attribute(s)
                s.accept(",")
            return "dot"
        return attribute(s, typed=False)

    def _range(self) -> tuple[int, int, int]:
        s = self.s
        start = s.integer()
        s.expect(":")
        limit = s.integer()
        return start, limit, s.integer() if s.accept(":") else 1

    def types(self, every: bool) -> list[Type]:
        """Result types: behind the arrow, else the last (or every) type of the list."""
        s = self.s
        types = parse_types(s)
        while s.accept(","):
            types.append(parse_type(s))
        if s.accept("->"):
            return parse_types(s)
        return types if every else types[-1:]

    def _reduce(self, op: Operation, depth: int) -> None:
        """`(%x init: %i), (%y init: %j) [applies op] across dimensions = [1] : types [reducer(%a:
        t, %b: t) { … }]`."""
        s = self.s
        inputs = []
        inits = []
        while s.accept("("):
            inputs.append(self.use())
            s.expect("init")
            s.expect(":")
            inits.append(self.use())
            s.expect(")")
            s.accept(",")
        op.operands = inputs + inits
        applied = None
        if s.accept("applies"):
            applied = _short(s.need(_NAME, "an operation").group())
        s.expect("across")
        s.expect("dimensions")
        s.expect("=")
        op.attrs["dimensions"] = attribute(s)
        if s.at("{"):
            op.attrs.update(dictionary(s))
        s.expect(":")
        op.types = self.types(False)
        if applied is not None:
            op.attrs["applies"] = applied
            return
        s.expect("reducer")
        args: list[tuple[str, Type]] = []
        while s.at("("):
            args += s.listed("(", ")", self.typed_argument)
        self._location()
        # Written as pairs (left, right) per array; the generic form has all left ones first.
        op.regions = [self.region(depth + 1, args[0::2] + args[1::2])]

    def _while(self, op: Operation, depth: int) -> None:
        """`(%a = %init, …) : types [attributes {…}] cond { … } do { … }`."""
        s = self.s
        names: list[str] = []

        def entry() -> None:
            names.append(self.use()[0])
            s.expect("=")
            op.operands.append(self.use())

        s.listed("(", ")", entry)
        if s.accept(":"):
            op.types = self.types(True)
        if s.accept("attributes"):
            op.attrs.update(dictionary(s))
        if len(op.types) != len(names):
            raise s.error(f"while has {len(names)} values and {len(op.types)} types", op.position)
        args = list(zip(names, op.types, strict=True))
        s.expect("cond")
        cond = self.region(depth + 1, args)
        s.expect("do")
        op.regions = [cond, self.region(depth + 1, args)]


# Fills operands, attributes, regions and types of an operation; the int is the depth of nesting.
PrettyForm = Callable[[Reader, Operation, int], None]

# Pretty operations whose type list without an arrow is the list of results.
_ALL_TYPES = frozenset({"optimization_barrier", "return", "func.return", "composite"})
_WITH_WORDS = frozenset({"compare", "chlo.broadcast_compare"})


def _short(name: str) -> str:
    for prefix in ("stablehlo.", "mhlo."):
        if name.startswith(prefix):
            return name[len(prefix) :]
    return {"call": "func.call", "func.return": "return"}.get(name, name)
