"""From `gelu(x @ w + b)` to machine code, step by step. Read it, then run it: `python
examples/tour.py`.

Each section shows what the library really does on the way; nothing here is written for show.
"""

from __future__ import annotations

import torch

import torch_hlo
from torch_hlo import debug


def title(number: int, text: str) -> None:
    print(f"\n{'=' * 100}\n{number}. {text}\n{'=' * 100}")


def main() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32)

    title(1, "A lazy graph: operations on hlo tensors are recorded, not run")
    # Tensors on "hlo" are HloTensors (torch_hlo/lazy/record/tensor.py). Every aten operation on
    # them reaches HloTensor.__torch_dispatch__ (torch_hlo/lazy/aten/dispatch.py), which appends a
    # Node and returns at once.
    hx, hw, hb = x.to("hlo"), w.to("hlo"), b.to("hlo")
    y = torch.nn.functional.gelu(hx @ hw + hb, approximate="tanh")
    y[0].mul_(2)  # an in-place write through a view: becomes a functional select_scatter
    z = y.sum(dim=1)
    print("the lazy graph of z:\n" + debug.graph_text([z]))

    title(2, "HLO: each node is lowered by a function of torch_hlo/lowering/")
    module = debug.module([z])
    print(module)

    title(3, "The passes: torch_hlo/compiler/pipeline.py, Module -> Module")
    before = len(module.entry.instructions())

    def observe(name, m) -> None:
        nonlocal before
        after = len(m.entry.instructions())
        print(f"passes: after {name:12s} {after:4d} instructions ({after - before:+d})")
        before = after

    optimized = debug.optimized_text([z], observe)
    print("\n" + optimized)

    title(
        4,
        "LLVM IR: torch_hlo/compiler/codegen/ writes explicit vectors, no LLVM passes run",
    )
    seen: dict[str, str] = {}
    from torch_hlo.device import runtime

    program = runtime.compile_program(
        module, lambda stage, value: seen.setdefault(stage, str(value))
    )
    ir = seen["llvm"]
    print(f"LLVM IR, {len(ir.splitlines())} lines; the first kernel:")
    start = ir.index("define")
    print("\n".join(ir[start:].splitlines()[:40]) + "\n  ...")

    title(5, "The result: one native call computes everything")
    # mark_step() does steps 2 to 4 once, keeps the program, and runs it on a background thread.
    torch_hlo.mark_step()
    reference = torch.nn.functional.gelu(x @ w + b, approximate="tanh")
    reference[0].mul_(2)
    difference = (z.cpu() - reference.sum(dim=1)).abs().max().item()
    print(
        f"result on hlo: {z.cpu()[:4]}\nlargest difference from CPU eager: {difference:.2e} "
        f" (program {program.name})"
    )
    assert difference < 1e-4
    print(torch_hlo.metrics.last_compile_reason())


if __name__ == "__main__":
    main()
