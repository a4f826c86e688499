"""Attention: softmax(q k^T scale + bias) v and its gradient without an array of scores.

A `fusion` of kind=custom with backend_config={"attention": "forward" | "backward", …} (see
compiler/attention/attention.py) is one parallel step:

    attention_amx.py     bf16 on AMX tiles
    attention_few.py     a few queries, as in decoding
    attention_lanes*.py  every other type and machine
"""

from torch_hlo.hlo.ir import Instruction, Size

from ..codegen import CodegenError, Program
from ..llvm import Target
from ..matmul.amx_kernels import element
from ..matmul.tile import product_tile
from . import attention_amx, attention_few
from .attention import MIN_SIZE, Attention, known_attention, merged
from .attention_kernel import AttentionKernel, arrays_of, sizes_of
from .attention_lanes_backward import Backward
from .attention_lanes_forward import Forward

_USUAL = 256  # rows or columns when they are symbolic, for the estimated time
_FMA_NS = 0.014  # per multiply-add, on one thread


def _kernel(target: Target, a: Attention[Size]) -> type[AttentionKernel]:
    if attention_few.fits(a):
        return attention_few.Forward
    on_tiles = (
        a.dtypes[0] == "bf16"
        and element(target, ("bf16",)) is not None
        and not (isinstance(a.rows, int) and a.rows < MIN_SIZE)
    )
    if on_tiles:
        return attention_amx.KERNELS[a.kind]
    return Forward if a.kind == "forward" else Backward


def emit_attention(program: Program, x: Instruction) -> None:
    """Emit a fusion that `attention_of` describes; results are f32. Symbolic sizes are arguments of
    the kernel."""
    a = merged(known_attention(x))
    if set(a.results) != {"f32"}:
        raise CodegenError(f"attention with results {x.shape}: kernels for CPUs write f32")
    t = product_tile("float", program.target.vector_bytes)
    kernel = _kernel(program.target, a)
    arrays = arrays_of(program, x)
    name, heap_bytes = program.once(
        ("attention", a, arrays, t), lambda: kernel(program, a, arrays, t).define()
    )
    places = [program.place(o) for o in x.operands] + [
        program.place(x, i) for i in range(len(x.elements))
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
    arguments = program.arguments(places, sizes_of(a, arrays))
    program.parallel(name, arguments, items, cost=work * _FMA_NS)
