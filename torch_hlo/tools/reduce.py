"""`reduce`: the smallest program that still fails.

small = shrink(module, lambda m: fails(m))      # greedy: fewer results, then shorter cones
"""

from collections.abc import Callable, Iterator

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Module,
    Shape,
    build as b,
    outputs,
    postorder,
    rebuild,
)
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.text.printer import instruction_text

from . import UsageError

Fails = Callable[[Module], bool]


def shrink(
    module: Module,
    fails: Fails,
    log: Callable[[str], None] = lambda line: None,
    budget: int = 500,
) -> Module:
    """A smaller module for which `fails` still holds, after at most `budget` trials. Raises
    UsageError when `module` does not fail."""
    if not fails(module):
        raise UsageError("the program does not fail, there is nothing to reduce")
    trials = 0
    progress = True
    while progress and trials < budget:
        progress = False
        for candidate, what in _candidates(module):
            trials += 1
            if trials > budget:
                break
            try:
                verify(candidate)
                failing = fails(candidate)
            except Exception:  # a candidate that is no program is no reduction
                continue
            if failing:
                log(f"{size(candidate)} instructions: {what}")
                module = candidate
                progress = True
                break
    return module


def size(module: Module) -> int:
    return len(postorder((module.entry.root,)))


def _candidates(module: Module) -> Iterator[tuple[Module, str]]:
    """Smaller programs, the boldest first."""
    results = outputs(module)
    root = module.entry.root
    if len(results) > 1:
        for i, x in enumerate(results):
            yield _with_root(module, b.tuple_(x)), f"only output {i}"
    order = postorder((root,))
    # A cone cut off at an instruction in the middle; then every instruction replaced by an operand,
    # a constant or a parameter.
    inner = [
        x
        for x in order
        if x.op not in ("parameter", "constant", "tuple") and not x.is_tuple and x.dtype != "token"
    ]
    for x in inner[len(inner) // 2 :: max(1, len(inner) // 16)]:
        if x not in results:
            yield (
                _with_root(module, b.tuple_(x)),
                f"the value of {instruction_text(x)}",
            )
    for x in reversed(inner):
        for y in x.operands:
            if y.shape == x.shape:
                yield (
                    _with_root(module, rebuild(root, {x: y})),
                    f"{x.op} became its operand",
                )
        yield _as_parameter(module, x), f"{x.op} became a parameter"
        if x.is_static:
            yield (
                _with_root(module, rebuild(root, {x: _ones(x.shape)})),
                f"{x.op} became a constant",
            )
    used = [p for p in module.entry.params if p in order]
    if len(used) < len(module.entry.params):
        yield _without(module, used), "unused parameters gone"


def _ones(shape: Shape) -> Instruction:
    return b.full(1, shape.dtype, shape.dims)


def _with_root(module: Module, root: Instruction) -> Module:
    return Module(
        module.name,
        Computation(module.entry.name, module.entry.params, root),
        (),
        module.symbols,
        module.mesh,
    )


def _as_parameter(module: Module, x: Instruction) -> Module:
    params = module.entry.params
    fresh = b.parameter(len(params), x.shape)
    root = rebuild(module.entry.root, {x: fresh})
    used = {p for p in postorder((root,)) if p.op == "parameter"}
    grown = Module(
        module.name,
        Computation(module.entry.name, (*params, fresh), root),
        (),
        module.symbols,
        module.mesh,
    )
    return _without(grown, [p for p in grown.entry.params if p in used])


def _without(module: Module, kept: list[Instruction]) -> Module:
    """Only these parameters, renumbered; parameters that bind symbols stay."""
    bound = {i for _, i, _ in module.symbols}
    kept = [p for p in module.entry.params if p in kept or p["index"] in bound]
    renumbered = {p: b.parameter(i, p.shape) for i, p in enumerate(kept)}
    places = {p["index"]: i for i, p in enumerate(kept)}
    symbols = tuple((name, places[i], d) for name, i, d in module.symbols)
    entry = Computation(
        module.entry.name, tuple(renumbered.values()), rebuild(module.entry.root, renumbered)
    )
    return Module(module.name, entry, (), symbols, module.mesh)
