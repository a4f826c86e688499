"""Which function writes the code of what: the tables that code generation is extended through.

| table | a row is named | the function is |
|---|---|---|
| CPU, GPU | an opcode; for fusions what `row_of` says | (program, x) -> None: emits one step |
| | `loop nest`, `rows` | what steps of these forms differ in |
| VALUES | an opcode | (kernel, x, index) -> Value: an element of `x` inside a kernel |
| HOST_CALLS | a name | (outputs, inputs, **attrs) -> None: Python on NumPy arrays |

A step emitter reads its operands' buffers and fills its own, see program.py. A value emitter gives
the element of `x` at `index` (one Index per dimension): W lanes along the innermost loop, or one
scalar when the index does not depend on that loop; fusion is recursion through `kernel.value`:

    def negate(kernel, x, index):
        return scalar.emit(kernel, x, [kernel.value(x.operand, index)])

Host calls are for rare operations: the interpreter lock is taken.

Modules are imported when a row of theirs is first asked for: all of them take 20 ms, a fifth of the
first step of a small program. A new function is named in a row here."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch_hlo.hlo.ir import POINTWISE, Instruction
from torch_hlo.tables import entry

Function = Callable[..., Any]
_PACKAGE = __name__.rpartition(".codegen.")[0]


class Table(MutableMapping[str, Function]):
    """`rows`: name -> "module:function"; functions may be added while the program runs."""

    def __init__(self, rows: Mapping[str, str]) -> None:
        self.rows = dict(rows)
        self._found: dict[str, Function] = {}

    def __getitem__(self, name: str) -> Function:
        found = self._found.get(name)
        if found is None:
            module, _, function = self.rows[name].partition(":")
            found = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), function)
            self._found[name] = found
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __contains__(self, name: object) -> bool:
        return name in self._found or name in self.rows

    def __setitem__(self, name: str, function: Function) -> None:
        self._found[name] = function

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows | self._found)

    def __len__(self) -> int:
        return len(self.rows | self._found)


def _rows(functions: Mapping[str, str]) -> dict[str, str]:
    """name -> function, of function -> names."""
    rows: dict[str, str] = {}
    for function, names in functions.items():
        for name in names.split():
            if name in rows:
                raise ValueError(f"{name} has two emitters: {rows[name]} and {function}")
            rows[name] = function
    return rows


# what the first words of a backend_config say that a fusion of kind=custom is
_CONFIG = re.compile(r'\{"(\w+)":\s*(?:"(\w+)")?')


def row_of(x: Instruction) -> str:
    """The row of a step: its opcode, and for fusions what they are made of."""
    if x.op != "fusion":
        return x.op
    kind = x.get("kind", "loop")
    config = _CONFIG.match(x.get("backend_config") or "") if kind == "custom" else None
    if config is not None:
        return ":".join(("fusion", *filter(None, config.groups())))
    opcodes = {y.op for y in x["calls"].instructions()}
    if kind == "output":
        return f"fusion:output:{'convolution' if 'convolution' in opcodes else 'dot'}"
    if "reduce" in opcodes:
        return "fusion:rows"
    return "fusion:loop" if kind in ("loop", "reduce", "row") else f"fusion:{kind}"


_ELEMENTWISE = "broadcast iota transpose slice reverse pad dynamic-slice copy gather"
_EXCHANGES = """all-reduce all-gather reduce-scatter all-to-all collective-permute
    collective-broadcast ragged-all-to-all"""
_STEPS = _rows(
    {
        # loops
        "loops.elementwise_loops:elementwise": f"{' '.join(POINTWISE)} {_ELEMENTWISE}",
        "loops.elementwise_loops:emit_fusion_loops": "fusion:loop",
        "loops.elementwise_loops:constant": "constant",
        "loops.elementwise_loops:in_memory": "parameter tuple get-tuple-element",
        "loops.elementwise_loops:reshape": "reshape bitcast",
        "loops.elementwise_loops:bitcast_convert": "bitcast-convert",
        "loops.elementwise_loops:concatenate": "concatenate",
        "loops.elementwise_loops:dynamic_update_slice": "dynamic-update-slice",
        "loops.fusion_step:fusion": "fusion:rows",
        "loops.fusion_step:reduce": "reduce",
        # products
        "attention.attention_step:emit_attention":
            "fusion:attention:forward fusion:attention:backward",
        "convolution.convolution:convolution": "convolution",
        "convolution.convolution:fusion": "fusion:output:convolution",
        "matmul.dot:dot": "dot",
        "matmul.dot:fusion": "fusion:output:dot",
        "matmul.gemv:emit_groups": "fusion:product:groups",
        "matmul.ragged_dot:ragged_dot": "ragged-dot",
        # windows, indices, orders
        "gather.gather_scatter:scatter": "scatter",
        "gather.gather_scatter:emit_fused_scatter": "fusion:scatter:fused",
        "sort.sort:sort": "sort",
        "sort.top_k:emit_selection": "fusion:first fusion:nth",
        "window.reduce_window:reduce_window": "reduce-window",
        "window.select_scatter:select_and_scatter": "select-and-scatter",
        # factorizations and transforms
        "fourier.fft:emit_across": "fusion:fft:across",
        "fourier.fft:fft": "fft",
        "linalg.blocked_factors:emit_lu": "fusion:linalg:lu",
        "linalg.cholesky:cholesky": "cholesky",
        "linalg.cholesky:triangular_solve": "triangular-solve",
        "linalg.qr:emit_qr": "fusion:linalg:qr",
        # control flow, other devices, the host
        "control.host_calls:custom_call": "custom-call",
        "collectives.collective_step:device_id": "partition-id replica-id",
        "collectives.collective_step:done":
            "all-reduce-done all-gather-done collective-permute-done",
        "collectives.collective_step:exchange": _EXCHANGES,
        "collectives.collective_step:start":
            "all-reduce-start all-gather-start collective-permute-start",
        "control.control_flow:after_all": "after-all",
        "control.control_flow:async_done": "async-done",
        "control.control_flow:async_start": "async-start",
        "control.control_flow:call": "call",
        "control.control_flow:conditional": "conditional",
        "control.control_flow:copy_done": "copy-done",
        "control.control_flow:copy_start": "copy-start",
        "control.control_flow:forward":
            "opt-barrier add-dependency domain async-update dynamic-reshape",
        "control.control_flow:get_dimension_size": "get-dimension-size",
        "control.control_flow:set_dimension_size": "set-dimension-size",
        "control.control_flow:while_": "while",
    }
)  # fmt: skip

CPU = Table(
    _STEPS
    | {
        "loop nest": "loops.elementwise_loops:LoopNest",
        "rows": "loops.row_kernel:RowForms",
    }
)

GPU = Table(
    _STEPS
    | {
        "loop nest": "loops.gpu_loops:GpuLoopNest",
        "rows": "loops.gpu_rows:GpuRowForms",
        "convolution": "convolution.gpu_conv:convolution",
        "dot": "matmul.gpu.gpu_dot:dot",
        "fft": "control.host_calls:fft",
        "fusion:attention:backward": "attention.gpu_attention:emit_attention",
        "fusion:attention:forward": "attention.gpu_attention:emit_attention",
        "fusion:output:convolution": "convolution.gpu_conv:fusion",
        "fusion:output:dot": "matmul.gpu.gpu_dot:fusion",
        "ragged-dot": "matmul.ragged_dot:by_masks",
        "reduce-window": "window.gpu_scan:reduce_window",
        "scatter": "gather.gpu_scatter:scatter",
        "sort": "sort.gpu_sort:sort",
    }
)

VALUES = Table(
    _rows(
        {
            "codegen.views:pointwise": " ".join(POINTWISE),
            "codegen.views:bitcast_convert": "bitcast-convert",
            "codegen.views:broadcast": "broadcast",
            "codegen.views:concatenate": "concatenate",
            "codegen.views:constant": "constant",
            "codegen.views:copy": "copy opt-barrier",
            "codegen.views:dynamic_slice": "dynamic-slice",
            "codegen.views:dynamic_update_slice": "dynamic-update-slice",
            "codegen.views:iota": "iota",
            "codegen.views:pad": "pad",
            "codegen.views:reshape": "reshape bitcast",
            "codegen.views:reverse": "reverse",
            "codegen.views:slice_": "slice",
            "codegen.views:transpose": "transpose",
            "gather.gather_scatter:gather": "gather",
            "loops.reducer:few": "reduce",
            "loops.reducer:one_of_few": "get-tuple-element",
            "window.reduce_window:window_value": "reduce-window",
        }
    )
)

HOST_CALLS = Table(
    {
        "collective": "collectives.collective_step:exchange_on_host",
        "collective-done": "collectives.collective_step:done_on_host",
        "collective-start": "collectives.collective_step:start_on_host",
        "device-id": "collectives.collective_step:device_id_on_host",
        "fft": "control.host_calls:fft_on_host",
        "lapack": "control.host_calls:lapack_on_host",
    }
)


def host_call(*names: str) -> Callable[[Function], Function]:
    """Add `(outputs, inputs, **attrs) -> None`, called with NumPy arrays over the buffers:
    `outputs` are writable and must be filled in place; bf16 and f8 buffers appear as uint16 and
    uint8 (see hlo.ir.numeric to decode them).

        @host_call("my_target")
        def my_target(outputs, inputs, **attrs):
            outputs[0][...] = ...
    """
    return entry(HOST_CALLS, names)
