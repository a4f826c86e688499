"""`bisect`: the first pass after which a program has other values, or that fails."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch_hlo.compiler.hlo_pass import Pass
from torch_hlo.compiler.llvm import host
from torch_hlo.compiler.pipeline import passes_for
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.ir.verify import verify

from .execute import Results, difference, run_evaluator, run_module

ROUNDS = 16


@frozen
class Finding:
    """What went wrong: the guilty pass ("code generation" when all passes are innocent), why, and
    the program it was given."""

    culprit: str
    reason: str
    before: Module | None


def bisect(module: Module, inputs: Sequence, compiled: bool = True) -> Finding | None:
    """Run the pipeline pass by pass, evaluating after each; then the compiled program. None when
    everything agrees."""
    want = run_evaluator(module, inputs)
    current = module
    for p in passes_for(host()):
        for member, before, after, error in _steps(p, current):
            if error:
                return Finding(member.name, error, before)
            if wrong := _wrong(after, inputs, want):
                return Finding(member.name, wrong, before)
            current = after
    if compiled:
        try:
            wrong = difference(run_module(module, inputs), want)
        except Exception as error:  # any failure is the finding
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return Finding("code generation", wrong, current)
    return None


def _steps(p: Pass, module: Module) -> Iterator[tuple[Pass, Module, Module, str]]:
    """(pass, before, after, error) of each application that changes the module; fixpoints are taken
    apart."""
    members = p.members or (p,)
    quiet = 0
    for turn in range(ROUNDS * len(members) if p.members else 1):
        member = members[turn % len(members)]
        try:
            after = member.run(module)
        except Exception as error:  # any failure is the finding
            yield member, module, module, f"{type(error).__name__}: {error}"
            return
        quiet = quiet + 1 if after is module else 0
        if after is not module:
            yield member, module, after, ""
            module = after
        if quiet >= len(members):
            return


def _wrong(module: Module, inputs: Sequence[Any], want: Results) -> str:
    try:
        verify(module)
        return difference(run_evaluator(module, inputs), want)
    except Exception as error:  # any failure is the finding
        return f"{type(error).__name__}: {error}"
