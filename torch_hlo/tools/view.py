"""`view`: a program as a page: its graph, what each pass changed, fusions, memory, machine code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_hlo import pages
from torch_hlo.compiler.codegen import Program
from torch_hlo.compiler.codegen.profile import describe
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.spmd.propagate import explain
from torch_hlo.compiler.spmd.spmd_pipeline import stages
from torch_hlo.hlo.ir import Instruction, Module
from torch_hlo.hlo.text.printer import module_text

from . import UsageError
from .devices import is_annotated
from .execute import flat
from .text_api import load

ELIDED = 64  # elements of a constant that are shown


class Kernels:
    """Stands where a profile does in the compiler, and notes the functions that each step calls."""

    nested = False

    def __init__(self) -> None:
        self.steps: list[tuple[Instruction, list[str]]] = []

    def start(self, program: Program, order: Sequence[Instruction]) -> None:
        self.program = program

    @contextmanager
    def step(self, x: Instruction) -> Iterator[None]:
        code = self.program.code
        before = len(code.lines)
        yield
        text = "\n".join(code.lines[before:])
        self.steps.append((x, [*dict.fromkeys(re.findall(r"@([\w.$]+)", text))]))


def program(module: Module, name: str = "", reason: str = "") -> dict[str, Any]:
    """What the page shows of a program: it is compiled for that, on this machine."""
    module = flat(module)
    seen = [("input", module)]
    texts = defaultdict(list)
    shardings = ""
    if is_annotated(module):
        shardings = explain(module)
        seen = [*stages(module).items()]
        module = seen[-1][1]

    def keep(stage: str, value: object) -> None:
        if isinstance(value, Module):
            seen.append((stage.removeprefix("hlo:"), value))
        else:
            texts[stage].append(str(value))

    kernels = Kernels()
    compile_module(module, dump=keep, profile=kernels)
    order = {x: i for i, x in enumerate(seen[-1][1].entry.instructions())}
    steps = []
    for x, functions in kernels.steps:
        step = describe(x)
        sizes = [n if isinstance(n, int) else str(n) for n in (step.bytes, step.flops)]
        matrix = step.matrix_flops if isinstance(step.matrix_flops, int) else 0
        steps.append([order.get(x, -1), *sizes, matrix, functions])
    return {
        "name": name or module.name,
        "reason": reason,
        "shardings": shardings,
        "passes": [[stage, module_text(m, "full", ELIDED)] for stage, m in seen],
        "steps": steps,
        **{stage: "\n".join(parts) for stage, parts in texts.items()},
    }


def programs(path: str) -> list[dict[str, Any]]:
    """The program in a file; those of a folder that TORCH_HLO_DUMP has written."""
    if not Path(path).is_dir():
        return [program(load(path))]
    files = sorted(Path(path).rglob("00_input.hlo"))
    if not files:
        raise UsageError(f"{path}: no 00_input.hlo in it; TORCH_HLO_DUMP writes such folders")
    found = []
    for file in files:
        reason = file.with_name("reason.txt")
        text = reason.read_text().strip() if reason.exists() else ""
        found.append(program(load(str(file)), file.parent.name, text))
    return found


def save(path: str, output: str) -> None:
    """Write the page of a program or of a dump."""
    data = {"title": path, "programs": programs(path)}
    Path(output).write_text(pages.page("view", data, path))
