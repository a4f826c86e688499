"""What the text parsers share: a cursor over text, and errors with line, column and a caret.

ParseError: line 3, column 17: 'foo' is not defined
  %y = f32[4] add(%foo, %foo)
                  ^
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from ..ir import DTYPES, Size, parse_dim

MAX_INT = (1 << 63) - 1
_SPACE = re.compile(r"(?:\s++|/\*(?s:.*?)\*/|//[^\n]*+)*+")
STRING = re.compile(r'"((?:[^"\\]++|\\(?s:.))*+)"')
_BALANCED = re.compile(r'"(?:[^"\\\n]++|\\.)*+"|[{}()\[\]"]')
_ESCAPE = re.compile(r"\\([0-9]{3}|[0-9A-Fa-f]{2}|(?s:.))")
_ESCAPES = {
    "n": b"\n",
    "t": b"\t",
    "r": b"\r",
    "f": b"\f",
    "v": b"\v",
    "b": b"\b",
    "a": b"\a",
}
_INNER = r"[^,\]\[{}:()]"
for _ in range(5):  # calls such as floordiv(max(s0,1),2) hold commas
    _INNER = rf"(?:[^,\]\[{{}}:()]++|\((?:{_INNER}|,)*+\))"
SIZE = re.compile(rf"(?:{_INNER})*+")
_INTEGER = re.compile(r"-?[0-9]{1,19}(?![0-9])")


class ParseError(ValueError):
    """Text that is no program. `line` and `column` count from 1."""

    def __init__(self, message: str, text: str, position: int) -> None:
        begin = text.rfind("\n", 0, position) + 1
        end = text.find("\n", position)
        self.line = text.count("\n", 0, position) + 1
        self.column = position - begin + 1
        source = text[begin : len(text) if end < 0 else end]
        offset = position - begin
        cut = max(0, offset - 60)  # long lines: the part around the caret
        shown = source[cut : cut + 120].replace("\t", " ")
        message = message if len(message) < 600 else message[:600] + "…"
        super().__init__(
            f"line {self.line}, column {self.column}: {message}\n  {shown}\n "
            f" {' ' * (offset - cut)}^"
        )


class ErrorAt(Protocol):
    """What the meaning of a program asks of its source: an error that says where."""

    pos: int

    def error(self, message: str, position: int | None = None) -> ParseError: ...


class Scanner:
    """A position in `text`. White space and comments are skipped before everything."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.resources: dict[str, str] | None = None  # hexadecimal bytes by name

    def error(self, message: str, position: int | None = None) -> ParseError:
        return ParseError(
            message,
            self.text,
            self.pos if position is None else min(position, len(self.text)),
        )

    def skip(self) -> int:
        space = _SPACE.match(self.text, self.pos)
        self.pos = space.end() if space else self.pos
        return self.pos

    def done(self) -> bool:
        return self.skip() >= len(self.text)

    def at(self, token: str) -> bool:
        self.skip()
        return self.text.startswith(token, self.pos)

    def accept(self, token: str) -> bool:
        if self.at(token):
            self.pos += len(token)
            return True
        return False

    def expect(self, token: str, what: str = "") -> None:
        if not self.accept(token):
            raise self.error(
                f"expected {token!r}{' ' + what if what else ''}, found {self.found()}"
            )

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match and step over `pattern`, or None."""
        self.skip()
        found = pattern.match(self.text, self.pos)
        if found:
            self.pos = found.end()
        return found

    def peek(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        return pattern.match(self.text, self.pos)

    def need(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = self.match(pattern)
        if not found:
            raise self.error(f"expected {what}, found {self.found()}")
        return found

    def found(self) -> str:
        word = re.compile(r"[\w.%@#-]{1,40}|.", re.S).match(self.text, self.pos)
        return repr(word.group()) if word else "the end of the text"

    def integer(self, what: str = "an integer") -> int:
        value = int(self.need(_INTEGER, what).group())
        if abs(value) > MAX_INT:
            raise self.error(f"{value} does not fit 64 bits")
        return value

    def string(self) -> str:
        """A quoted string, its escapes replaced."""
        return unescape(self.need(STRING, "a string").group(1))

    def balanced(self) -> str:
        """The raw text of a bracketed group, strings inside respected."""
        begin = self.skip()
        closers = {"{": "}", "(": ")", "[": "]"}
        open_: list[str] = []
        while True:
            found = _BALANCED.search(self.text, self.pos)
            if not found:
                raise self.error("this bracket is not closed", begin)
            self.pos = found.end()
            token = found.group()
            if token == '"':
                raise self.error("this string is not closed", found.start())
            if token in closers:
                open_.append(closers[token])
            elif token[0] != '"':
                if not open_ or open_.pop() != token:
                    raise self.error(f"unexpected {token!r}", found.start())
                if not open_:
                    return self.text[begin : self.pos]

    def listed(self, opening: str, closing: str, item: Callable[..., Any]) -> list[Any]:
        """Items between brackets, separated by commas."""
        self.expect(opening)
        values: list[Any] = []
        if self.accept(closing):
            return values
        while True:
            values.append(item())
            if self.accept(closing):
                return values
            self.expect(",")


def unescape(text: str) -> str:
    """Escapes of C (`\\n`, `\\101`) and MLIR (`\\0A`) strings."""
    if "\\" not in text:
        return text

    def byte(m: re.Match[str]) -> bytes:
        code = m.group(1)
        if len(code) == 3 and code.isdigit():
            return bytes([int(code, 8) & 255]) if not set(code) & set("89") else code.encode()
        if len(code) == 2:
            return bytes([int(code, 16)])
        return _ESCAPES.get(code) or code.encode(errors="replace")

    parts = []
    last = 0
    for m in _ESCAPE.finditer(text):
        parts += [text[last : m.start()].encode(errors="replace"), byte(m)]
        last = m.end()
    return b"".join([*parts, text[last:].encode(errors="replace")]).decode(errors="surrogateescape")


def split_sizes(text: str) -> list[str]:
    """`text` cut at the commas outside parentheses."""
    if "(" not in text:
        return text.split(",")
    parts = []
    depth = 0
    begin = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


def parse_size(scanner: Scanner, text: str, position: int) -> Size:
    """A size: an integer or a polynomial over symbols."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) < 20:
        value = int(text)
        if value <= MAX_INT:
            return value
    if text.startswith("<=") or text == "?":
        raise scanner.error(
            f"bounded and unknown sizes ({text}) are not supported; use a named size such as s0",
            position,
        )
    if not text or len(text) > 500 or text.count("(") > 20 or text.isdigit():
        raise scanner.error(f"bad size {text[:40]!r}", position)
    try:
        return parse_dim(text)
    except (ValueError, ArithmeticError):
        raise scanner.error(f"bad size {text!r}", position) from None


def element_type(scanner: Scanner, name: str, position: int) -> str:
    if name not in DTYPES:
        raise scanner.error(
            f"unknown element type {name!r}; known are {', '.join(DTYPES)}",
            position,
        )
    return name
