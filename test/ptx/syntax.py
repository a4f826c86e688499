"""PTX text as data (PTX ISA, sections 4 and 5): a module's variables and functions, a function's
instructions.

    module = parse(text)                      # raises PtxError naming the line
    module.functions["k0"].body[3]            # Instruction(opcode='ld', modifiers=('param', 'b64'),
                                              # operands=(Reg('%rd1'), Mem(...)), ...)
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field


class PtxError(ValueError):
    """Text that is not PTX, an instruction without a meaning here, or a kernel that does what it
    must not; says where."""


@dataclass(frozen=True, slots=True)
class Reg:
    name: str
    negated: bool = False  # `!%p1`


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant: its value as an int or, from decimal text, a float; `width` says that `value` is
    the bits of a float (0f…, 0d…)."""

    value: int | float
    width: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    """The address of a variable, or the name of a function or label."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """`[base + offset]`; `index`: coordinates of a tensor."""

    base: Reg | Sym | Imm
    offset: int = 0
    index: Vec | None = None


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b, …}`, and `a|b` for two results; `_` is None."""

    items: tuple


Operand = Reg | Imm | Sym | Mem | Vec


@dataclass(frozen=True, slots=True)
class Instruction:
    """`@guard opcode.modifier… operands;` `line`: of the text."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand | None, ...]
    guard: Reg | None
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Variable:
    """Memory with a name. `space`: global, const, shared, local or param; `nbytes` 0: as much as
    the launch says (extern)."""

    name: str
    space: str
    nbytes: int
    align: int
    data: bytes = b""


@dataclass(slots=True)
class Function:
    """`entry`: a kernel. `labels`: name -> index in body."""

    name: str
    entry: bool
    params: list[Variable]
    results: list[Variable]
    variables: dict[str, Variable] = field(default_factory=dict)
    # name, or the prefix of numbered ones -> type
    registers: dict[str, str] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    max_threads: int = 1024


@dataclass(slots=True)
class Module:
    target: str
    version: str
    variables: dict[str, Variable]
    functions: dict[str, Function]


SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8,
    "f64": 8, "f32x2": 8, "b128": 16,
}  # fmt: skip
_SPACES = ("global", "const", "shared", "local", "param")
_TOKEN = re.compile(
    r"""\s*(?:(?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})|(?P<number>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
    |(?P<name>[%$_a-zA-Z][\w$]*(?:\.[\w]+)*)|(?P<mark>[-+~!{}\[\](),|<>=;:@]))""",
    re.X,
)
# @!guard, opcode, operands
_STATEMENT = re.compile(r"\s*(?:@\s*(!?)\s*([%$\w]+)\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)([^;]*);")
_OPERANDS = re.compile(r"(?:[^,\[{(]|\[[^\]]*\]|\{[^}]*\}|\([^)]*\))+")
_LABEL = re.compile(r"\s*([$\w]+)\s*:(?!:)")
_DIRECTIVE = re.compile(r"\s*\.([a-zA-Z_]\w*(?:::\w+)*)")


def parse(text: str) -> Module:
    """Raises PtxError naming the line."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = re.sub(
            r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S
        )
        # where we are; how far lines are counted, and how many there are
        self.at = self.counted = self.lines = 0
        self.operands: dict[str, Operand | None] = {}  # of the function at hand, by their text
        self.scopes: list[dict[str, str]] = []  # names declared in inner braces -> their own names
        self.renamed = 0
        self.registers: dict[str, str] = {}  # of the function at hand

    # -- characters
    # -----------------------------------------------------------------------------------------------
    @property
    def line(self) -> int:
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.lines + 1

    def fail(self, message: str) -> PtxError:
        rest = self.text[self.at :].lstrip().split("\n", 1)[0]
        return PtxError(f"line {self.line}: {message}: {rest[:100]!r}")

    def token(self) -> re.Match:
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            raise self.fail("not PTX")
        self.at = found.end()
        return found

    def peek(self) -> str:
        found = _TOKEN.match(self.text, self.at)
        return found[0].strip() if found else ""

    def mark(self) -> str:
        """The next character that is no space, which is where we are then; '}' at the end, so that
        whoever looks for it stops."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1] or "}"

    def accept(self, mark: str) -> bool:
        if self.peek() == mark:
            self.token()
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            raise self.fail(f"expected {mark!r}")

    def name(self) -> str:
        found = self.token()
        if found["name"] is None:
            raise self.fail("expected a name")
        return found["name"]

    def directive(self) -> str:
        """`.word` here, else ''."""
        found = _DIRECTIVE.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[1]

    def skip_line(self) -> str:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        line, self.at = self.text[self.at : end].strip(), end
        return line

    def integers(self) -> list[int]:
        found = [self.integer()]
        while self.accept(","):
            found.append(self.integer())
        return found

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        found = self.token()
        if found["number"] is None or "." in found["number"]:
            raise self.fail("expected an integer")
        return sign * int(found["number"].rstrip("U"), 0)

    # -- module
    # ---------------------------------------------------------------------------------------------------
    def module(self) -> Module:
        made = Module("", "", {}, {})
        while self.text[self.at :].strip():
            word = self.directive()
            if word in ("visible", "extern", "weak", "common"):
                continue
            if word == "version":
                made.version = self.skip_line()
            elif word == "target":
                made.target = self.skip_line().split(",")[0].strip()
            elif word in ("address_size", "file"):
                self.skip_line()
            elif word in ("entry", "func"):
                function = self.function(word == "entry")
                # declarations come before definitions
                if function.name not in made.functions or function.body:
                    made.functions[function.name] = function
            elif word in _SPACES:
                for v in self.declare(word):
                    made.variables[v.name] = v
            elif word in ("section", "pragma", "alias"):
                raise self.fail(f".{word} is not evaluated")
            else:
                raise self.fail("expected a directive")
        return made

    def declare(self, space: str) -> list[Variable]:
        """`.align 16 .b8 name[64] = {…};` after its space."""
        align, kind = 0, ""
        while word := self.directive():
            if word == "align":
                align = self.integer()
            elif word == "ptr":  # an attribute of parameters: `.ptr .global .align 16`
                while self.directive():
                    if self.text[self.at - 5 : self.at] == "align":
                        self.integer()
            elif word in SIZES:
                kind = word
            elif word in ("v2", "v4"):
                raise self.fail("vector variables are not evaluated")
            else:
                raise self.fail(f".{word} of a variable is not known")
        if not kind:
            raise self.fail("a variable without a type")
        made = []
        while True:
            name = self.name()
            count, dims = 1, 0
            while self.accept("["):
                count *= 0 if self.peek() == "]" else self.integer()
                dims += 1
                self.expect("]")
            data = b""
            if self.accept("="):
                data = self.data(SIZES[kind], kind)
                count = max(count, len(data) // SIZES[kind])
            nbytes = count * SIZES[kind]
            made.append(
                Variable(
                    self.scoped(name),
                    space,
                    nbytes,
                    align or SIZES[kind],
                    data.ljust(nbytes, b"\0") if space in ("global", "const") else b"",
                )
            )
            if not self.accept(","):
                break
        if space != "param" or self.peek() == ";":
            self.expect(";")
        return made

    def data(self, size: int, kind: str) -> bytes:
        values = b""
        if self.accept("{"):
            while not self.accept("}"):
                values += self.data(size, kind)
                self.accept(",")
            return values
        operand = self.operand()
        if not isinstance(operand, Imm):
            raise self.fail("addresses in initial values are not evaluated")
        if kind in ("f32", "f64") and not operand.width:
            return struct.pack("<f" if kind == "f32" else "<d", operand.value)
        return (int(operand.value) & (1 << 8 * size) - 1).to_bytes(size, "little")

    # -- functions
    # ------------------------------------------------------------------------------------------------
    def function(self, entry: bool) -> Function:
        results = self.parameters() if not entry and self.peek() == "(" else []
        name = self.name()
        made = Function(name, entry, self.parameters() if self.peek() == "(" else [], results)
        while word := self.directive():
            if word in ("maxntid", "reqntid"):
                made.max_threads = math.prod(self.integers())
            elif word == "reqnctapercluster":
                if math.prod(self.integers()) != 1:
                    raise self.fail("clusters of more than one group are not evaluated")
            elif word in ("minnctapersm", "maxnreg", "maxclusterrank"):
                self.integer()
            elif word in ("noreturn", "explicitcluster"):
                continue
            else:
                raise self.fail(f".{word} of a function is not known")
        if self.accept(";"):
            return made
        self.expect("{")
        self.registers, self.operands = made.registers, {}
        depth = 1
        while depth:
            mark = self.mark()
            if mark not in "{};." and (found := _LABEL.match(self.text, self.at)) is None:
                made.body.append(self.instruction())
                continue
            found = _LABEL.match(self.text, self.at)
            if found:
                self.at = found.end()
                made.labels[self.scoped(found[1])] = len(made.body)
            elif self.accept("{"):
                depth += 1
                self.scopes.append({})
            elif self.accept("}"):
                depth -= 1
                if depth:
                    self.scopes.pop()
            elif self.accept(";"):
                continue
            elif word := self.directive():
                self.local(made, word)
            else:
                made.body.append(self.instruction())
        self.scopes = []
        return made

    def parameters(self) -> list[Variable]:
        self.expect("(")
        made: list[Variable] = []
        while not self.accept(")"):
            if self.directive() not in ("param", "reg"):
                raise self.fail("expected a parameter")
            made += self.declare_one_parameter()
            self.accept(",")
        return made

    def declare_one_parameter(self) -> list[Variable]:
        align, kind = 0, ""
        while word := self.directive():
            if word == "align":
                align = self.integer()
            elif word in SIZES:
                kind = word
            elif word not in ("ptr", *_SPACES):
                raise self.fail(f".{word} of a parameter is not known")
        name, count = self.name(), 1
        if self.accept("["):
            count = self.integer()
            self.expect("]")
        return [Variable(name, "param", count * SIZES[kind], align or SIZES[kind])]

    def local(self, made: Function, word: str) -> None:
        """A declaration inside a function."""
        if word == "reg":
            kind = self.directive()
            if kind in ("v2", "v4"):
                raise self.fail("vector registers are not evaluated")
            if kind not in SIZES:
                raise self.fail("a register without a type")
            while True:
                name = self.name()
                if self.accept("<"):
                    self.integer()
                    self.expect(">")
                    made.registers[name] = kind
                else:
                    made.registers[self.scoped(name, declare=True)] = kind
                if not self.accept(","):
                    break
            self.expect(";")
        elif word in _SPACES:
            if self.scopes:  # .param of a call, or of inline code: a name of its own
                for name in re.findall(
                    r"[%$\w]+(?=\s*(?:\[[^\]]*\]\s*)?[,;])",
                    self.text[self.at : self.text.index(";", self.at) + 1],
                ):
                    self.scoped(name, declare=True)
            for v in self.declare(word):
                made.variables[v.name] = v
        elif word in ("loc", "pragma", "branchtargets", "calltargets", "callprototype"):
            if word == "loc":
                self.skip_line()
            elif word == "pragma":
                self.at = self.text.index(";", self.at) + 1
            else:
                raise self.fail(f".{word} is not evaluated")
        else:
            raise self.fail(f".{word} inside of a function is not known")

    def scoped(self, name: str, declare: bool = False) -> str:
        """The name that an identifier has in the whole function."""
        if declare and self.scopes:
            self.renamed += 1
            self.scopes[-1][name] = f"{name}'{self.renamed}"
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    # -- instructions
    # ---------------------------------------------------------------------------------------------
    def instruction(self) -> Instruction:
        found = _STATEMENT.match(self.text, self.at)
        if found is None:
            raise self.fail("expected an instruction")
        self.at = found.start(3)
        line = self.line
        guard = Reg(self.scoped(found[2]), bool(found[1])) if found[2] else None
        opcode, *modifiers = found[3].split(".")
        operands = tuple(
            self.whole_operand(piece.strip())
            for piece in _OPERANDS.findall(found[4])
            if piece.strip()
        )
        self.at = found.end()
        return Instruction(
            opcode, tuple(modifiers), operands, guard, line, " ".join(found[0].split())
        )

    def whole_operand(self, piece: str) -> Operand | None:
        """The text between two commas; outside of inner braces equal text is an equal operand."""
        if not self.scopes and piece in self.operands:
            return self.operands[piece]
        text, at = self.text, self.at
        line = self.line
        self.text, self.at, self.counted, self.lines = piece, 0, 0, line - 1
        made = self.operand()
        if self.accept("|"):
            made = Vec((made, self.operand()))
        if self.text[self.at :].strip():
            raise self.fail("not an operand")
        self.text, self.at, self.counted, self.lines = text, at, at, line - 1
        if not self.scopes:
            self.operands[piece] = made
        return made

    def operand(self) -> Operand | None:
        if self.accept("{") or self.accept("("):
            items = []
            while not (self.accept("}") or self.accept(")")):
                items.append(self.operand())
                self.accept(",")
            return Vec(tuple(items))
        if self.accept("["):
            base, offset, index = self.operand(), 0, None
            if self.peek() in ("+", "-"):
                self.accept("+")
                offset = self.integer()
            if isinstance(base, Sym) and base.offset:
                base, offset = Sym(base.name), base.offset
            if self.accept(","):
                index = self.operand()
            self.expect("]")
            return Mem(base, offset, index)
        if self.accept("!"):
            return Reg(self.scoped(self.name()), True)
        negative = self.accept("-")
        found = self.token()
        if bits := found["float"]:
            value = int(bits[2:], 16)
            width = 32 if bits[1] in "fF" else 64
            return Imm(value ^ (1 << width - 1) if negative else value, width)
        if number := found["number"]:
            value = float(number) if "." in number else int(number.rstrip("U"), 0)
            return Imm(-value if negative else value)
        name = found["name"]
        if name is None or negative:
            raise self.fail("expected an operand")
        if name == "_":
            return None
        if name in ("true", "false"):
            return Imm(int(name == "true"))
        name = self.scoped(name)
        if name[0] == "%" or name in self.registers:
            return Reg(name)
        offset = 0
        if self.peek() == "+":
            self.accept("+")
            offset = self.integer()
        return Sym(name, offset)
