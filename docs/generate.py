"""Pages that are made from the code when the site is built: API, operators, opcodes, flags,
shortcuts.

They stand beside the pages that are written by hand, in docs/reference/, and are not committed.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

import torch_hlo
from torch_hlo import config
from torch_hlo.hlo.ir.opcodes import OPCODES
from torch_hlo.lowering.core.registry import LOWERINGS
from torch_hlo.pytorch.shortcuts import ROWS

API = {
    "torch_hlo": "Training, captured steps, control flow, programs as text.",
    "torch_hlo.metrics": "Counters, times, reasons of compiles.",
    "torch_hlo.debug": "The program that recorded tensors would become.",
    "torch_hlo.profiler": "The time of every step of compiled programs.",
    "torch_hlo.distributed": "Meshes, shardings, plans, simulation, checkpoints.",
    "torch_hlo.aot": "Programs that need no Python.",
    "torch_hlo.export": "Programs as StableHLO.",
    "torch_hlo.config": "Flags.",
}


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def public(module: ModuleType) -> list[str]:
    """The names that a module offers: `__all__`, or what it defines without an underscore."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def entry(name: str, value: object) -> str:
    """Signature and docstring of a function or class, and of a class's public methods."""
    text = inspect.getdoc(value) or ""
    try:
        signature = f"```python\n{name}{inspect.signature(value)}\n```\n\n"
    except (TypeError, ValueError):
        signature = ""
    parts = [f"### {name}\n\n{signature}{text}"]
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                parts.append(entry(f"{name}.{method}", function).replace("### ", "#### ", 1))
    return "\n\n".join(parts)


def api() -> str:
    parts = ["# API", "This page is made from the docstrings of the code."]
    for path, what in API.items():
        module = importlib.import_module(path)
        parts += [f"## {path}", what]
        for name in public(module):
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                parts.append(entry(name, value))
    return "\n\n".join(parts)


def operators() -> str:
    rooms: dict[str, list[str]] = defaultdict(list)
    for overload, function in LOWERINGS.items():
        room = getattr(function, "__module__", "torch_hlo.lowering.pointwise.pointwise")
        rooms[room.removeprefix("torch_hlo.lowering.")].append(str(overload))
    packets = {str(overload).rpartition(".")[0] for overload in LOWERINGS}
    core = {f"aten.{name}" for name in dir(torch.ops.aten) if is_core(name)}
    missing = sorted(core - packets)
    return "\n\n".join(
        [
            "# Operators",
            f"{len(LOWERINGS)} overloads of {len(packets)} operators have a lowering: they become"
            " HLO. PyTorch decomposes most of the others into these. What is left runs on the CPU,"
            " and says so.",
            f"Of PyTorch's {len(core)} core operators, {len(core) - len(missing)} have a lowering"
            " of their own. The others are decomposed, read values, or are views:"
            f" {', '.join(f'`{name}`' for name in missing)}.",
            "In-place operators, `out=` arguments and views need no lowering of their own: they are"
            " recorded as functional operators.",
            *(
                f"## {room}\n\n" + ", ".join(f"`{name}`" for name in sorted(names))
                for room, names in sorted(rooms.items())
            ),
        ]
    )


def is_core(name: str) -> bool:
    """Whether an aten operator belongs to PyTorch's core operators."""
    packet = getattr(torch.ops.aten, name)
    if not hasattr(packet, "overloads"):
        return False
    return any(torch.Tag.core in getattr(packet, o).tags for o in packet.overloads())


def opcodes() -> str:
    rows = [
        (
            f"`{o.name}`",
            "any" if o.arity is None else o.arity,
            ", ".join(f"`{a}`" for a in o.attrs),
            ", ".join(sorted(o.traits)),
        )
        for o in OPCODES.values()
    ]
    what = "The opcodes of HLO that torch_hlo knows. Names and attributes are XLA's."
    return f"# Opcodes\n\n{what}\n\n" + table(("opcode", "operands", "attributes", "traits"), rows)


def flags() -> str:
    rows = [
        (f"`TORCH_HLO_{f.name}`", "" if callable(f.default) else f"`{f.default!r}`", f.doc)
        for f in config.FLAGS.values()
    ]
    what = (
        "Flags are environment variables. In Python: `with torch_hlo.config.override(LOG=1): ...`"
    )
    return f"# Flags\n\n{what}\n\n" + table(("flag", "default", "meaning"), rows)


def shortcuts() -> str:
    what = (
        "torch_hlo relies on some things that PyTorch does not promise. Here they all are. What is"
        " *needed* cannot be switched off. The others only save time or memory:"
        " `TORCH_HLO_SHORTCUTS=0` switches all of them off, `TORCH_HLO_SHORTCUTS=name,name` all but"
        " those named."
    )
    head = ("name", "file", "what", "why", "saves")
    rows = [(f"`{r.name}`", f"`{r.where}`", r.what, r.why, r.saves or "needed") for r in ROWS]
    return f"# Shortcuts\n\n{what}\n\n" + table(head, rows)


PAGES = {
    "shortcuts": shortcuts,
    "api": api,
    "operators": operators,
    "opcodes": opcodes,
    "flags": flags,
}


def write_pages(folder: Path) -> None:
    for name, make in PAGES.items():
        (folder / f"{name}.md").write_text(make() + "\n")


assert torch_hlo.__version__
