"""Run a Module on arrays: compiled, by the evaluator, or by XLA where its CPU plugin is
installed."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import numpy as np

from torch_hlo import config
from torch_hlo.device import runtime
from torch_hlo.hlo.evaluate import interpreter
from torch_hlo.hlo.evaluate.evaluate import bind_symbols, evaluate, fitting, leaves
from torch_hlo.hlo.evaluate.interpreter import EvaluateError
from torch_hlo.hlo.ir import (
    DTYPES,
    Computation,
    Instruction,
    Module,
    Replacements,
    Shape,
    build as b,
    decode,
    encode,
    instr,
    numpy_dtype,
    outputs,
    rebuild,
    replace,
    substitute,
)

Results = list[tuple[np.ndarray, str]]  # values and their HLO type


def flat(module: Module) -> Module:
    """The module with arrays only at its boundary: tuple parameters and results become their parts,
    tokens vanish."""
    entry = module.entry
    root = entry.root
    if not any(p.is_tuple or p.dtype == "token" for p in entry.params) and _is_flat(root):
        return module
    params: list[Instruction] = []
    swaps: Replacements = {}
    moved: dict[int, int] = {}
    for i, p in enumerate(entry.params):
        moved[i] = len(params)
        swaps[p] = _parameter(p.shape, params, p.get("sharding"))
    flattened = b.tuple_(*_parts(rebuild(root, swaps)))
    if (sharding := root.get("sharding")) is not None:
        flattened = replace(flattened, sharding=tuple(leaves(sharding)))
    symbols = tuple((name, moved[i], d) for name, i, d in module.symbols)
    ins = tuple(leaves(module.in_shardings))
    outs = tuple(leaves(module.out_shardings))
    entry = Computation(entry.name, tuple(params), flattened)
    return with_fields(
        module,
        entry=entry,
        aliases=(),
        symbols=symbols,
        in_shardings=ins,
        out_shardings=outs,
    )


def _is_flat(root: Instruction) -> bool:
    if root.op == "tuple":
        return not any(o.is_tuple or o.dtype == "token" for o in root.operands)
    return not root.is_tuple and root.dtype != "token"


def _parameter(shape: Shape, params: list[Instruction], sharding: Any = None) -> Instruction:
    if shape.is_tuple:
        parts = sharding if isinstance(sharding, tuple) else (sharding,) * len(shape.elements)
        return b.tuple_(
            *(_parameter(e, params, s) for e, s in zip(shape.elements, parts, strict=True))
        )
    if shape.dtype == "token":
        return instr("after-all", ())
    params.append(instr("parameter", (), shape, index=len(params), sharding=sharding))
    return params[-1]


def _parts(x: Instruction) -> list[Instruction]:
    if x.is_tuple:
        return [part for i in range(len(x.elements)) for part in _parts(b.get_tuple_element(x, i))]
    return [] if x.dtype == "token" else [x]


def flat_inputs(inputs: Sequence) -> list:
    return [
        v
        for item in inputs
        for v in (flat_inputs(item) if isinstance(item, (tuple, list)) else [item])
    ]


def prepared(module: Module, inputs: Sequence) -> tuple[Module, list[np.ndarray], dict[str, int]]:
    """(flat module, arrays of its parameters' types, values of its symbols). Raises EvaluateError
    when they do not fit."""
    module = flat(module)
    values = flat_inputs(inputs)
    params = module.entry.params
    if len(values) != len(params):
        raise EvaluateError(f"{module.name} takes {len(params)} arrays, got {len(values)}")
    arrays = [
        fitting(i, v, p.shape).astype(numpy_dtype(p.dtype))
        for i, (v, p) in enumerate(zip(values, params, strict=True))
    ]
    return module, arrays, bind_symbols(module.entry, [a.shape for a in arrays])


def runner(module: Module, inputs: Sequence) -> Callable[[], Results]:
    """Compile for these inputs; the function runs the program once."""
    module, arrays, sizes = prepared(module, inputs)
    program = runtime.compile_program(module)
    results = [
        Shape(x.shape.dtype, tuple(substitute(d, sizes) for d in x.shape.dims))
        for x in outputs(module)
    ]

    def run() -> Results:
        buffers = [
            runtime.from_bytes(Shape(p.shape.dtype, a.shape), encode(a, p.shape.dtype))
            for p, a in zip(module.entry.params, arrays, strict=True)
        ]
        shared = {output: buffers[param] for output, param in program.aliases}
        outs = [shared.get(i) or runtime.allocate(s) for i, s in enumerate(results)]
        program.run(buffers, outs)
        found = [
            (decode(o.bytes.tobytes(), s.dtype, s.dims), s.dtype)
            for o, s in zip(outs, results, strict=True)
        ]
        for what, judge in JUDGES[: {1: 2, 2: 1}.get(config.get("NAN"), 0)]:
            if _count(judge, [value for value, _ in found]):
                _name_bad(module, arrays, what, judge)
        return found

    return run


# what is looked for: by TORCH_HLO_NAN=2 the first alone
JUDGES: Sequence[tuple[str, Callable]] = (("NaN", np.isnan), ("infinities", np.isinf))


def _count(judge: Callable, values: object) -> int:
    """How many such numbers a value has, or several."""
    if isinstance(values, (tuple, list)):
        return sum(_count(judge, x) for x in values)
    array = np.asarray(values)
    return int(judge(array).sum()) if array.dtype.kind in "fc" else 0


def _name_bad(module: Module, arrays: Sequence[np.ndarray], what: str, judge: Callable) -> None:
    """Raise FloatingPointError: the first instruction that makes a NaN, or an infinity, of
    operands without. Infinities that the program has as constants are results like others."""
    times = Counter[Instruction]()

    def watch(x: Instruction, operands: list, value: object) -> None:
        times[x] += 1
        count = _count(judge, value)
        if count and x.op != "constant" and not _count(judge, operands):
            raise FloatingPointError(
                f"{x.op}({x.operand_shapes}) -> {x.shape} makes {count} {what},"
                f" in its run {times[x]}"
            )

    interpreter.WATCHERS.append(watch)
    try:
        evaluate(module, arrays)
    finally:
        interpreter.WATCHERS.remove(watch)
    if judge is np.isnan:
        raise FloatingPointError("a result is NaN, and none of the evaluator: see `run --compare`")


def run_module(module: Module, inputs: Sequence) -> Results:
    """Compile and run once."""
    return runner(module, inputs)()


def run_evaluator(module: Module, inputs: Sequence) -> Results:
    """The reference values."""
    module, arrays, _ = prepared(module, inputs)
    return list(zip(evaluate(module, arrays), (x.dtype for x in outputs(module)), strict=True))


def xla_plugin() -> str | None:
    """Path of the PJRT plugin of XLA's CPU backend (pip install xla-cpu-pjrt), if it is
    installed."""
    try:
        found = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    except ModuleNotFoundError:
        return None
    path = Path(found.origin).with_name("xla_cpu_pjrt.so") if found and found.origin else None
    return str(path) if path and path.exists() else None


def run_xla(module: Module, inputs: Sequence) -> Results:
    """What XLA computes for the program. Raises RuntimeError when its plugin is not installed."""
    path = xla_plugin()
    if path is None:
        raise RuntimeError("comparing with XLA needs its CPU plugin: pip install xla-cpu-pjrt")
    with config.override(DEVICE=f"pjrt:{path}"):
        return run_module(module, inputs)


ENGINES: dict[str, Callable[[Module, Sequence], Results]] = {
    "compiled": run_module,
    "evaluator": run_evaluator,
    "xla": run_xla,
}

# Relative tolerance by type: what reassociated sums of a thousand terms may differ by
TOLERANCE = {
    "f64": 1e-9,
    "c128": 1e-9,
    "f32": 1e-4,
    "c64": 1e-4,
    "f16": 1e-2,
    "bf16": 3e-2,
}


def difference(got: Results, want: Results) -> str:
    """A sentence on the first output that differs, or ""."""
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for i, ((x, dtype), (y, _)) in enumerate(zip(got, want, strict=True)):
        if x.shape != y.shape:
            return f"output {i}: sizes {list(x.shape)} instead of {list(y.shape)}"
        tolerance = TOLERANCE.get(dtype, 0.25 if dtype.startswith("f8") else 0)
        if DTYPES[dtype].kind in "fc":
            scale = float(np.max(np.abs(y[np.isfinite(y)]), initial=0))
            same = np.isclose(
                x,
                y,
                rtol=tolerance,
                atol=tolerance * max(scale, 1e-3),
                equal_nan=True,
            )
        else:
            same = x == y
        if not np.all(same):
            at = tuple(int(n) for n in np.argwhere(~same)[0])
            return (
                f"output {i} ({dtype}{list(x.shape)}): {int(np.sum(~same))} of {x.size} elements"
                f" differ, first at {list(at)}: {x[at]} instead of {y[at]}"
            )
    return ""
