"""Address spaces, assigned to finished text. Emitters write plain `ptr`; on a GPU memory is global,
shared by a group, or a thread's stack.

Where a pointer comes from says what it is: parameters of kernels are global, `alloca` is the stack,
variables say it themselves (constants need not); getelementptr, select and phi keep the space of
their operands. A phi of pointers must have a first incoming value that is already known."""

from __future__ import annotations

import re

from .target import CONSTANT, GLOBAL, KERNEL

_ASSIGNED = re.compile(r"^\s*(%[\w.$]+) = (.*)$")
# or a vector of them
_POINTER = re.compile(r"(?<![\w.])ptr(>| noalias readonly)? ([%@][\w.$]+)")
_BY_VALUE = re.compile(r"(?<![\w.])ptr byval[^%]*(%[\w.$]+)")
_PHI = re.compile(r"phi ptr \[(?:\s*)([%@][\w.$]+)")
_MANGLED = re.compile(
    r"@(llvm\.(?:masked\.(?:load|store|gather|scatter)|memset|memcpy|memmove)\.[\w.]*)\("
)


class SpaceError(ValueError):
    """A pointer whose address space cannot be told from the text."""


class Spaces:
    """The address spaces of one module: variables are remembered from text to text."""

    def __init__(self) -> None:
        self.variables: dict[str, int] = {}

    def assign(self, text: str) -> str:
        """The definitions of `text` with an address space on every pointer."""
        spaces: dict[str, int] = {}
        lines = []
        for line in text.split("\n"):
            if line.startswith("define "):
                # what a kernel is given lies in memory, what kernels give to functions on the stack
                space = GLOBAL if f" {KERNEL} " in line else 0
                spaces = {
                    **self.variables,
                    **{m[2]: space for m in _POINTER.finditer(line)},
                    **{m[1]: 0 for m in _BY_VALUE.finditer(line)},
                }
                lines.append(
                    _POINTER.sub(lambda m: f"ptr{_suffix(space)}{m[1] or ''} {m[2]}", line)
                )
            elif line.startswith("@"):
                lines.append(self._variable(line))
            elif line[:1] != "!" and ("ptr" in line or "alloca" in line):
                lines.append(_line(line, spaces))
            else:
                lines.append(line)
        return "\n".join(lines)

    def _variable(self, line: str) -> str:
        name = line.split(" ", 1)[0]
        if found := re.search(r"addrspace\((\d+)\)", line):
            self.variables[name] = int(found[1])
            return line
        self.variables[name] = CONSTANT
        return line.replace(" constant ", f" addrspace({CONSTANT}) constant ", 1)


def _line(line: str, spaces: dict[str, int]) -> str:
    found = _ASSIGNED.match(line)
    name, body = (found[1], found[2]) if found else ("", line)
    if body.startswith("alloca"):
        spaces[name] = 0
        return line
    if phi := _PHI.match(body):
        spaces[name] = space = _space(phi[1], spaces, line)
        return line.replace("phi ptr", f"phi ptr{_suffix(space)}", 1)
    used: list[int] = []

    def one(m: re.Match[str]) -> str:
        used.append(_space(m[2], spaces, line))
        return f"ptr{_suffix(used[-1])}{m[1] or ''} {m[2]}"

    line = _POINTER.sub(one, line)
    if name and body.startswith(("getelementptr", "select", "inttoptr", "freeze")) and used:
        if body.startswith("select") and len(set(used)) > 1:
            raise SpaceError(f"select between address spaces {used}: {line.strip()}")
        spaces[name] = used[0]
    if mangled := _MANGLED.search(line):
        numbers = iter(used)
        new = re.sub(r"(?<=[.\d])p0(?![\w])", lambda m: f"p{next(numbers)}", mangled[1])
        line = line.replace(mangled[1], new, 1)
    return line


def _space(name: str, spaces: dict[str, int], line: str) -> int:
    if name not in spaces:
        raise SpaceError(f"where does {name} point? {line.strip()}")
    return spaces[name]


def _suffix(space: int) -> str:
    return f" addrspace({space})" if space else ""
