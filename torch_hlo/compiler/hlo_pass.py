"""What a pass is: a function Module -> Module that returns the same object when it changed nothing.

@hlo_pass
def algebra(module: Module) -> Module:
    '''Local identities.'''
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    OPCODES,
    Computation,
    Instruction,
    Module,
    Replacements,
    called,
    carry_meta,
    on_operands,
    rewrite_bottom_up,
    with_computations,
)


@frozen
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
    """A pass that repeats `passes` until none of them changes the module. Raises RuntimeError after
    ROUNDS rounds."""
    name = "+".join(p.name for p in passes)

    def run(module: Module) -> Module:
        quiet = 0  # passes in a row that changed nothing
        for turn in range(ROUNDS * len(passes)):
            new = passes[turn % len(passes)].run(module)
            quiet = quiet + 1 if new is module else 0
            module = new
            if quiet >= len(passes):
                return module
        raise RuntimeError(
            f"{name} did not settle in {ROUNDS} rounds on module {module.name}: two passes undo"
            " each other"
        )

    return Pass(name, run, f"{', '.join(p.name for p in passes)} until nothing changes", passes)


# opcodes that run computations
_RUNS = frozenset(
    name for name, opcode in OPCODES.items() if "control" in opcode.traits and name != "fusion"
)


def over_computations(module: Module, fn: Callable[[Computation], Computation]) -> Module:
    """The module with `fn` applied to the entry and to every computation that loops, branches and
    calls run, inner ones first."""
    memo: dict[Computation, Computation] = {}

    def visit(c: Computation) -> Computation:
        if c not in memo:
            memo[c] = fn(_inside(c))
        return memo[c]

    def _inside(c: Computation) -> Computation:
        if not any(x.op in _RUNS for x in c.instructions()):
            return c
        new: Replacements = {}
        for x in c.instructions():
            y = on_operands(x, new)
            if x.op in _RUNS:
                y = with_computations(y, {inner: visit(inner) for inner in called(x)})
            if y is not x:
                carry_meta(x, y)
            new[x] = y
        return c if new[c.root] is c.root else Computation(c.name, c.params, new[c.root])

    return module.with_root(visit(module.entry).root)


def over_loops(module: Module, fn: Callable[[Instruction], Instruction]) -> Module:
    """The module with `fn` applied to every while instruction, inner ones first."""

    def rewritten(c: Computation) -> Computation:
        return c.with_root(rewrite_bottom_up(c.root, lambda x: fn(x) if x.op == "while" else x))

    return over_computations(module, rewritten)
