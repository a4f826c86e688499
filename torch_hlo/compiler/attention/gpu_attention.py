"""Attention on a grid: softmax(q k^T scale + bias) v and its gradient without an array of scores;
see gpu_attention_kernel.py for the kernels."""

from __future__ import annotations

from torch_hlo.hlo.ir import Instruction

from ..gpu.gpu_program import GpuProgram
from . import gpu_attention_fma, gpu_attention_mma
from .attention import known_attention
from .attention_kernel import symbolic_sizes


def emit_attention(program: GpuProgram, x: Instruction) -> None:
    """Emit a fusion that `attention_of` describes; results are f32. Symbolic sizes are arguments of
    the kernels."""
    a = known_attention(x)
    kernels = (
        gpu_attention_mma.KERNELS
        if gpu_attention_mma.fits(program.target, a)
        else gpu_attention_fma.KERNELS
    )
    inputs = [program.pointer(o) for o in x.operands]
    outputs = [program.pointer(x, i) for i in range(len(x.elements))]

    def launch(part: str, *pointers: str) -> None:
        kernel = kernels[part]
        name = program.once(("grid attention", kernel, a), lambda: kernel(program, a).define())
        program.parallel(
            name,
            program.arguments(pointers, symbolic_sizes(a)),
            kernel.items(a),
        )

    if a.kind == "forward":
        return launch("forward", *inputs, *outputs)
    deltas = program.at(program.scratch(a.heads * a.rows * 4))
    dq, dk, dv = outputs
    launch("dq", *inputs, dq, deltas)
    launch("dkv", *inputs, deltas, dk, dv)
