"""The flat list of passes, and `optimize`, which runs them.

optimized = optimize(module)
optimize(module, dump=lambda name, module, ms: ...)       # called with the input and after every pass that changed something
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from torch_hlo import config
from torch_hlo.compiler.passes.algebra import algebra
from torch_hlo.compiler.passes.attention import attention
from torch_hlo.compiler.passes.attention import on_grid as attention_on_grid
from torch_hlo.compiler.passes.attention_match import attention_match
from torch_hlo.compiler.passes.attention_operands import attention_operands
from torch_hlo.compiler.passes.base import Pass, fixpoint, hlo_pass
from torch_hlo.compiler.passes.collective_async import collective_async
from torch_hlo.compiler.passes.conv_layout import conv_layout, for_matrix_units
from torch_hlo.compiler.passes.conv_narrow import conv_narrow
from torch_hlo.compiler.passes.conv_planar import conv_planar
from torch_hlo.compiler.passes.convert_motion import convert_motion
from torch_hlo.compiler.passes.dce import dce
from torch_hlo.compiler.passes.dot_canon import dot_canon
from torch_hlo.compiler.passes.dot_merge import dot_merge
from torch_hlo.compiler.passes.fold import fold
from torch_hlo.compiler.passes.fourier import fourier
from torch_hlo.compiler.passes.fusion import fusion
from torch_hlo.compiler.passes.legalize import legalize
from torch_hlo.compiler.passes.linalg import linalg
from torch_hlo.compiler.passes.loop_fill import loop_fill
from torch_hlo.compiler.passes.loop_rows import loop_rows
from torch_hlo.compiler.passes.partial_sort import partial_sort
from torch_hlo.compiler.passes.rematerialize import rematerialize
from torch_hlo.compiler.passes.reshape_motion import reshape_motion
from torch_hlo.compiler.passes.scatter_fusion import scatter_fusion
from torch_hlo.compiler.passes.window_gradient import window_gradient
from torch_hlo.hlo.dim import symbols
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.shape import Shape, numpy_dtype
from torch_hlo.hlo.verify import verify

Dump = Callable[[str, Module, float], None]

PIPELINE: list[Pass] = [
    attention,  # calls that say they are attention -> one kernel each
    linalg,  # the same for factorizations
    legalize,  # composite opcodes -> primitive ones
    fourier,  # transforms of any length and dimension -> those that have kernels
    conv_layout,  # channels last
    conv_narrow,  # few features fill vectors
    # local identities; constants; rearrangements and conversions meet and cancel; one form of dot; values nobody reads
    fixpoint(algebra, fold, reshape_motion, convert_motion, dot_canon, dce),
    conv_planar,  # channels first where nothing wants them last
    attention_match,  # attention that was written out
    attention_operands,  # its masks, biases and dropout: expressions, not arrays
    dot_merge,  # products that belong together
    scatter_fusion,  # scatters compute their updates
    partial_sort,  # sorts of which a few elements are read
    collective_async,  # work goes on while bytes travel
    loop_fill,  # what a loop writes from end to end is not filled before
    loop_rows(os.cpu_count() or 1),  # loops over time, each thread with rows of its own
    hlo_pass(fusion),  # what becomes one kernel
    rematerialize,  # what is computed again instead of kept, when there is a budget
]

_OF_CORES = (
    fourier,
    conv_narrow,
    conv_planar,
    attention_match,
    attention_operands,
    scatter_fusion,
    partial_sort,
    loop_fill,
)  # not for GPUs


def passes_for(target) -> list[Pass]:
    """The enabled passes for a target: layouts and selections are those of its kernels, loops are cut for its cores."""
    own = {"loop_rows": [loop_rows(target.cores)]}
    if target.grid:
        types = (
            ("bf16", "f16", *(("f32",) if target.tf32 else ()))
            if target.family.name == "nvptx"
            else ()
        )
        own |= {
            conv_layout.name: [window_gradient, for_matrix_units(frozenset(types))],
            attention.name: [attention_on_grid],
            **{p.name: [] for p in _OF_CORES},
        }
    return [q for p in enabled(PIPELINE) for q in own.get(p.name, [p])]


class PassError(RuntimeError):
    """A pass failed, or at CHECK 2 and 3 its result breaks an invariant or has another value; names the pass."""


def disabled() -> frozenset[str]:
    return frozenset(name for name in config.get("DISABLE").split(",") if name)


def enabled(passes: Sequence[Pass]) -> list[Pass]:
    """The passes without those in the DISABLE flag; a fixpoint loses the members named there. Raises ValueError for a name that is no pass."""
    off = disabled()
    known = {p.name for group in passes for p in (group, *group.members)}
    if off - known:
        raise ValueError(
            f"TORCH_HLO_DISABLE: no pass {min(off - known)!r}; passes are {', '.join(sorted(known))}"
        )
    kept = []
    for p in passes:
        if p.name in off:
            continue
        members = [m for m in p.members if m.name not in off]
        if p.members and len(members) < len(p.members):
            if members:
                kept.append(fixpoint(*members))
        else:
            kept.append(p)
    return kept


def optimize(
    module: Module,
    dump: Dump | None = None,
    passes: Sequence[Pass] | None = None,
    before_fusion: Callable[[Module], None] | None = None,
) -> Module:
    """Run the passes (all of PIPELINE by default). The CHECK flag says how much is verified on the way. `before_fusion` is called with the module that
    fusion gets, whose products and attention are final."""
    check = config.get("CHECK")
    if check:
        verify(module)
    if dump is not None:
        dump("input", module, 0.0)
    for p in enabled(PIPELINE) if passes is None else passes:
        if before_fusion is not None and p.name == fusion.__name__:
            before_fusion(module)
        start = time.perf_counter()
        try:
            result = p.run(module)
        except Exception as error:
            error.add_note(f"in pass {p.name} on module {module.name}")
            raise
        elapsed = (time.perf_counter() - start) * 1e3
        if result is not module:
            if check >= 2:
                _check(p, module, result, check)
            if dump is not None:
                dump(p.name, result, elapsed)
        module = result
    if check:
        verify(module)
    return module


def _check(p: Pass, before: Module, after: Module, level: int) -> None:
    from torch_hlo.hlo.parse import parse_module
    from torch_hlo.hlo.text import module_text

    try:
        verify(after)
        if parse_module(module_text(after)).entry.root is not after.entry.root:
            raise PassError("the text does not read back as the same program")
        if level >= 3:
            compare(before, after)
    except Exception as error:
        raise PassError(f"pass {p.name} on module {before.name}: {error}") from error


def compare(before: Module, after: Module, seed: int = 0, rtol: float = 1e-4) -> None:
    """Raises PassError unless the evaluator gives both programs the same values (within `rtol`) on random inputs, on all their devices."""
    from torch_hlo.hlo.evaluate_collective import devices_of, evaluate_spmd

    inputs = [random_inputs(before, seed + device) for device in range(devices_of(before))]
    for device, values in enumerate(
        zip(evaluate_spmd(before, inputs), evaluate_spmd(after, inputs), strict=True)
    ):
        for i, (x, y) in enumerate(zip(*values, strict=True)):
            if x.dtype.kind in "fc":
                same = np.allclose(x, y, rtol=rtol, atol=rtol, equal_nan=True)
            else:
                same = np.array_equal(x, y)
            if not same:
                raise PassError(
                    f"output {i} changed: {x.ravel()[:8]} became {y.ravel()[:8]}"
                    + (f" on device {device}" if len(inputs) > 1 else "")
                )


def random_inputs(module: Module, seed: int = 0, special: bool = False) -> list:
    """One random array per entry parameter; symbolic sizes get small values. `special`: with some inf, nan and -0 among the floats."""
    from torch_hlo.hlo.dim import substitute

    generator = np.random.default_rng(seed)
    names = sorted({n for p in module.entry.params for d in p.shape.dims for n in symbols(d)})
    sizes = {n: 3 + i for i, n in enumerate(names)}

    def value(s: Shape):
        if s.is_tuple:
            return tuple(value(e) for e in s.elements)
        dims = tuple(substitute(d, sizes) for d in s.dims)
        if s.kind == "p":
            return generator.integers(0, 2, dims).astype(bool)
        if s.kind in "su":
            return generator.integers(-3 if s.kind == "s" else 0, 4, dims).astype(
                numpy_dtype(s.dtype)
            )
        normal = generator.standard_normal(dims)
        if special and s.kind == "f":
            normal = np.where(
                generator.random(dims) < 0.3,
                generator.choice([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan], dims),
                normal,
            )
        return (normal + 1j * generator.standard_normal(dims) if s.kind == "c" else normal).astype(
            numpy_dtype(s.dtype)
        )

    return [value(p.shape) for p in module.entry.params]
