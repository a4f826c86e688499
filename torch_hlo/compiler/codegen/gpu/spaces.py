"""Address spaces, assigned to finished text. Emitters write plain `ptr`; on a GPU memory is global, shared by a group, or a thread's stack.

Where a pointer comes from says what it is: parameters are global, `alloca` is the stack, variables of the module are shared; getelementptr,
select and phi keep the space of their operands. A phi of pointers must have a first incoming value that is already known.
"""
from __future__ import annotations

import re

from torch_hlo.compiler.codegen.gpu.target import GLOBAL, SHARED

_ASSIGNED = re.compile(r"^\s*(%[\w.$]+) = (.*)$")
_POINTER = re.compile(r"(?<![\w.])ptr( align \d+)? ([%@][\w.$]+)")
_POINTERS = re.compile(r"(<\d+ x )ptr>( align \d+)? (%[\w.$]+)")
_PHI = re.compile(r"phi ptr \[(?:\s*)([%@][\w.$]+)")
_MANGLED = re.compile(r"@(llvm\.(?:masked\.(?:load|store|gather|scatter)|memset|memcpy|memmove)\.[\w.]*)\(")


class SpaceError(ValueError):
    """A pointer whose address space cannot be told from the text."""


def assign_spaces(text: str, stack: int = 0) -> str:
    """The function(s) of `text` with an address space on every pointer; `stack`: the one of stack slots."""
    spaces: dict[str, int] = {}
    lines = []
    for line in text.split("\n"):
        if line.startswith("define "):
            spaces = {m[2]: GLOBAL for m in _POINTER.finditer(line)}
            lines.append(_POINTER.sub(lambda m: f"ptr addrspace({GLOBAL}){m[1] or ''} {m[2]}", line))
        elif "ptr" in line or "alloca" in line:
            lines.append(_line(line, spaces, stack))
        else:
            lines.append(line)
    return "\n".join(lines)


def _line(line: str, spaces: dict[str, int], stack: int) -> str:
    found = _ASSIGNED.match(line)
    name, body = (found[1], found[2]) if found else ("", line)
    if body.startswith("alloca"):
        spaces[name] = stack
        return line + (f", addrspace({stack})" if stack else "")
    if phi := _PHI.match(body):
        spaces[name] = space = _space(phi[1], spaces, line)
        return line.replace("phi ptr", f"phi ptr{_suffix(space)}", 1)
    used: list[int] = []

    def one(m: re.Match) -> str:
        used.append(_space(m[2], spaces, line))
        return f"ptr{_suffix(used[-1])}{m[1] or ''} {m[2]}"

    def many(m: re.Match) -> str:
        used.append(_space(m[3], spaces, line))
        return f"{m[1]}ptr{_suffix(used[-1])}>{m[2] or ''} {m[3]}"

    line = _POINTERS.sub(many, _POINTER.sub(one, line))
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
    if name[0] == "@":
        return SHARED
    if name not in spaces:
        raise SpaceError(f"where does {name} point? {line.strip()}")
    return spaces[name]


def _suffix(space: int) -> str:
    return f" addrspace({space})" if space else ""
