"""`diff` and `explain`: two programs side by side, one program in numbers."""

import difflib
from collections import Counter

from torch_hlo.compiler.codegen.profile import describe, matrix_flops
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.ir import Dim, Module, Shape, Size, postorder
from torch_hlo.hlo.text.printer import computations, module_text

from .execute import flat


def diff(a: Module, b: Module, names: tuple[str, str] = ("a", "b")) -> str:
    """Unified diff of the canonical texts; "" when they are the same program (names and metadata do
    not count)."""
    if a.entry == b.entry and a.aliases == b.aliases and a.symbols == b.symbols:
        return ""
    left, right = (
        module_text(Module("module", m.entry, m.aliases, m.symbols)).splitlines() for m in (a, b)
    )
    lines = list(difflib.unified_diff(left, right, *names, lineterm="", n=2))
    return "\n".join(lines) if lines else "only the names of computations differ"


def explain(module: Module) -> str:
    """What the program is made of, what it costs, and what it becomes."""
    order = [x for c in computations(module.entry) for x in c.instructions()]
    lines = [f"program {module.name}"]
    lines += [f"  input {i}: {_sized(p.shape)}" for i, p in enumerate(module.entry.params)]
    lines += [f"  result: {_sized(module.entry.root.shape)}"]
    lines += [f"  {name} = size {d} of input {i}" for name, i, d in module.symbols]
    lines += [f"  output {o} may reuse the memory of input {p}" for o, p in module.aliases]
    counts = Counter(x.op for x in order if x.op not in ("parameter", "tuple", "get-tuple-element"))
    lines.append(
        f"{sum(counts.values())} instructions: "
        + ", ".join(f"{n} {op}" for op, n in counts.most_common())
    )
    flops = [matrix_flops(x) for x in order]
    lines.append(
        f"about {_number(sum((f for f in flops), start=0))} multiplications and additions in dots"
        " and convolutions (loop bodies counted once)"
    )
    optimised = optimize(flat(module))
    steps = [
        x
        for x in postorder((optimised.entry.root,))
        if x.op
        not in (
            "parameter",
            "constant",
            "tuple",
            "get-tuple-element",
            "reshape",
            "bitcast",
        )
    ]
    lines.append(f"after the passes {len(steps)} steps:")
    lines += [f"  {step.what}: {_number(step.bytes)} bytes" for step in map(describe, steps)]
    return "\n".join(lines)


def _sized(shape: Shape) -> str:
    return f"{shape} ({_number(shape.nbytes)} bytes)" if not shape.is_tuple else str(shape)


def _number(value: Size) -> str:
    return str(value) if isinstance(value, Dim) else f"{value:,}"
