"""Attention: softmax(q k^T scale + bias) v and its gradient without an array of scores.

A `fusion` of kind=custom with backend_config={"attention": "forward" | "backward", …} (see passes/attention.py) is one parallel step:

    attention_amx.py     bf16 on AMX tiles
    attention_few.py     a few queries, as in decoding
    attention_lanes.py   every other type and machine
"""

from __future__ import annotations

from torch_hlo.compiler.codegen import attention_amx, attention_few, attention_lanes, gemm
from torch_hlo.compiler.codegen.attention_kernel import AttentionKernel, arrays_of, sizes_of
from torch_hlo.compiler.passes.attention import MIN_SIZE, Attention, attention_of, merged
from torch_hlo.hlo.ir import Instruction

_USUAL = 256  # rows or columns when they are symbolic, for the estimated time
_FMA_NS = 0.014  # per multiply-add, on one thread


def _kernel(target, a: Attention) -> type[AttentionKernel]:
    if attention_few.fits(a):
        return attention_few.Forward
    on_tiles = (
        a.dtypes[0] == "bf16"
        and target.has("amx-bf16")
        and not (isinstance(a.rows, int) and a.rows < MIN_SIZE)
    )
    return (attention_amx if on_tiles else attention_lanes).KERNELS[a.kind]


def emit_attention(program, x: Instruction) -> None:
    """Emit a fusion that `attention_of` describes; results are f32. Symbolic sizes are arguments of the kernel."""
    if program.target.grid:
        from torch_hlo.compiler.codegen.gpu import attention as grid

        return grid.emit_attention(program, x)
    a = merged(attention_of(x))
    t = gemm.tile("float", program.target.vector_bytes)
    kernel = _kernel(program.target, a)
    arrays = arrays_of(program, x)
    name, heap_bytes = program.once(
        ("attention", a, arrays, t), lambda: kernel(program, a, arrays, t).define()
    )
    places = [program.place(o) for o in x.operands] + [
        program.place(x, i) for i in range(len(x.shape.elements))
    ]
    if not program.target.threads:  # one range of items at a time: its memory can be the program's
        places.append(program.scratch(heap_bytes))
    items, rows = kernel.items(a, t)
    rows, columns = (n if isinstance(n, int) else _USUAL for n in (rows, a.columns))
    work = (
        (1 if a.kind == "forward" else 2.5)
        * rows
        * columns
        * (a.size + a.width)
        / (2 if a.causal else 1)
    )
    arguments = [f"ptr {program.at(p)}" for p in places] + [
        f"i64 {program.size(n)}" for n in sizes_of(a, arrays)
    ]
    program.parallel(name, arguments, program.size(items), cost=work * _FMA_NS)
