"""What a pass is: a function Module -> Module that returns the same object when it changed nothing.

    @hlo_pass
    def algebra(module: Module) -> Module:
        '''Local identities.'''
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hlo.hlo.ir import Module


@dataclass(frozen=True, slots=True)
class Pass:
    name: str
    run: Callable[[Module], Module]
    doc: str
    members: tuple[Pass, ...] = ()  # of a fixpoint

    def __call__(self, module: Module) -> Module:
        return self.run(module)


def hlo_pass(fn: Callable[[Module], Module]) -> Pass:
    """The pass with this function's name and docstring."""
    return Pass(fn.__name__, fn, (fn.__doc__ or "").strip())


ROUNDS = 16


def fixpoint(*passes: Pass) -> Pass:
    """A pass that repeats `passes` until none of them changes the module. Raises RuntimeError after ROUNDS rounds."""
    name = "+".join(p.name for p in passes)

    def run(module: Module) -> Module:
        quiet = 0  # passes in a row that changed nothing
        for turn in range(ROUNDS * len(passes)):
            new = passes[turn % len(passes)].run(module)
            quiet = quiet + 1 if new is module else 0
            module = new
            if quiet >= len(passes):
                return module
        raise RuntimeError(f"{name} did not settle in {ROUNDS} rounds on module {module.name}: two passes undo each other")

    return Pass(name, run, f"{', '.join(p.name for p in passes)} until nothing changes", passes)
