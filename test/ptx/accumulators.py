"""Registers of warpgroup products (PTX ISA, section 9.7.15.5 and 9.7.15.7.1): who reads a result
before wgmma.wait_group, and who forgets wgmma.fence.

The products run beside the threads, so an execution one by one cannot see it; this looks at the
code instead: a forward data flow over registers. `mov` renames: assemblers put copies between
products, and know what to wait for."""

from __future__ import annotations

from test.ptx.syntax import Instruction, Reg, Vec
from test.ptx.table import Code

_UNFENCED = -1  # written by something else since the last wgmma.fence
Facts = dict[str, int]  # register -> groups committed since its product was issued, or _UNFENCED


def check(code: Code, blocks: list[tuple[int, int, tuple[int, ...]]]) -> None:
    """`blocks`: (first instruction, end, successors). Raises PtxError naming the instruction and
    the register."""
    body = code.function.body
    if not any(x.opcode == "wgmma" for x in body):
        return
    entry: list[Facts | None] = [None] * len(blocks)
    entry[0] = {}
    work = [0]
    while work:
        number = work.pop()
        first, end, successors = blocks[number]
        facts = dict(entry[number] or {})
        for x in body[first:end]:
            _step(code, x, facts)
        for s in successors:
            old = entry[s]
            new = (
                dict(facts)
                if old is None
                else {
                    r: min(
                        facts.get(r, old.get(r, 1 << 30)),
                        old.get(r, facts.get(r, 1 << 30)),
                    )
                    for r in facts.keys() | old.keys()
                }
            )
            if new != old:
                entry[s] = new
                work.append(s)


def _registers(operand) -> list[str]:
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in _registers(item)]
    return [operand.name] if isinstance(operand, Reg) else []


def _step(code: Code, x: Instruction, facts: Facts) -> None:
    if x.opcode == "wgmma":
        return _product(code, x, facts)
    if (
        x.opcode == "mov"
        and isinstance(x.operands[0], Reg)
        and isinstance(x.operands[1], Reg)
        and x.guard is None
    ):
        target, source = x.operands[0].name, x.operands[1].name
        facts[target] = facts.get(source, _UNFENCED)
        return
    written = code.results(x)
    for name in code.uses(x):
        if facts.get(name, _UNFENCED) >= 0:
            verb = "writes" if name in written else "reads"
            raise code.fail(
                x,
                f"{verb} {name}, which wgmma.mma_async is still working on: no wgmma.wait_group"
                " since",
            )
    for name in written:
        facts[name] = _UNFENCED


def _product(code: Code, x: Instruction, facts: Facts) -> None:
    what = x.modifiers[0]
    if what == "fence":
        for name in [n for n, age in facts.items() if age == _UNFENCED]:
            del facts[name]
    elif what == "commit_group":
        for name, age in facts.items():
            if age >= 0:
                facts[name] = age + 1
    elif what == "wait_group":
        keep = x.operands[0].value
        for name in [n for n, age in facts.items() if age > keep]:
            del facts[name]  # the thread may read it; a product may go on with it
    else:
        accumulators = _registers(x.operands[0])
        for name in accumulators + (
            _registers(x.operands[1]) if isinstance(x.operands[1], Vec) else []
        ):
            if facts.get(name) == _UNFENCED:
                raise code.fail(x, f"{name} was written without a wgmma.fence since")
        for name in accumulators:
            facts[name] = 0
