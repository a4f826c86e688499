"""`opt`: run passes by name, and show the program at any stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.compiler.hlo_pass import Pass, hlo_pass
from torch_hlo.compiler.llvm import host
from torch_hlo.compiler.pipeline import cpu_pipeline, optimize
from torch_hlo.compiler.spmd.partitioner import partition
from torch_hlo.compiler.spmd.propagate import propagate
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.stablehlo import stablehlo_text
from torch_hlo.hlo.text.printer import STYLES, module_text

from . import UsageError
from .execute import flat

EMITS = ("hlo", "short", "full", "stablehlo", "llvm", "asm", "buffers")


def passes() -> dict[str, Pass]:
    """Every pass of the pipeline by name, members of fixpoints included, and those for programs on
    many devices."""
    return {
        p.name: p
        for group in (*cpu_pipeline(host()).passes, propagate, hlo_pass(partition))
        for p in (group, *group.members)
    }


def chosen(names: str | None) -> Sequence[Pass] | None:
    """Passes of a comma-separated list; None is the whole pipeline, "" none. Raises UsageError for
    an unknown name."""
    if names is None:
        return None
    known = passes()
    wanted = [n for n in names.split(",") if n]
    if bad := [n for n in wanted if n not in known]:
        raise UsageError(f"no pass {bad[0]!r}; passes are {', '.join(known)}")
    return [known[n] for n in wanted]


def optimised(module: Module, names: str | None) -> Module:
    return optimize(module, passes=chosen(names))


def emitted(module: Module, emit: str, names: str | None = None) -> str:
    """The program after the passes as text: of a style, StableHLO, LLVM IR, assembly, or the buffer
    report."""
    module = optimised(module, names)
    if emit == "hlo":
        return module_text(module)
    if emit in STYLES:
        return module_text(module, emit).rstrip("\n") + "\n"
    if emit == "stablehlo":
        return stablehlo_text(module)
    from torch_hlo.compiler.compile import compile_module

    found: list[str] = []

    def keep(stage: str, value: object) -> None:
        if stage == emit:
            found.append(str(value))

    compile_module(flat(module), optimize=False, dump=keep)
    return "\n".join(text.rstrip("\n") for text in found) + "\n"
