"""The flat list of passes of every kind of target, and `optimize`, which runs them.

optimized = optimize(module)
optimize(module, dump=lambda name, module, ms: ...)       # called with the input and after every
pass that changed something"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torch_hlo import config
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Computation, Instruction, Module, Shape, numpy_dtype, symbols
from torch_hlo.hlo.ir.verify import verify

from .attention.attention import attention, on_grid as attention_on_grid
from .attention.attention_match import attention_match
from .attention.attention_operands import attention_operands
from .collectives.collective_async import collective_async
from .control.loop_fill import loop_fill
from .control.loop_rows import loop_rows
from .convolution.conv_layout import conv_layout, for_matrix_units
from .convolution.conv_planar import conv_planar
from .fourier.fourier import fourier
from .fusion.fusion import fusion
from .fusion.fusion_narrow import narrow_arrays
from .gather.scatter_fusion import scatter_fusion
from .gpu.target import GpuTarget
from .hlo_pass import Pass, fixpoint, hlo_pass
from .linalg.linalg import linalg
from .llvm import CpuTarget, Target, host
from .loops.column_split import column_split
from .matmul.dot_canon import dot_canon
from .matmul.dot_merge import dot_merge
from .matmul.dot_narrow import dot_narrow, group_products
from .schedule.memory import Assignment, assign
from .schedule.plan import Plan
from .schedule.rematerialize import rematerialize
from .schedule.schedule import schedule
from .simplify.algebra import algebra
from .simplify.dce import dce
from .simplify.fold import fold
from .simplify.legalize import legalize
from .simplify.reshape_motion import reshape_motion
from .sort.partial_sort import partial_sort
from .window.window_gradient import window_gradient

Dump = Callable[[str, Module, float], None]
Aliases = Sequence[tuple[int, int]]

# local identities; constants; rearrangements meet and cancel; one form of dot; values nobody reads
simplify = fixpoint(algebra, fold, reshape_motion, dot_canon, dce)


@frozen
class Pipeline:
    """What a target does with a program until code is written, from top to bottom."""

    rewrites: tuple[Pass, ...]  # after these products and attention are final
    fusions: tuple[Pass, ...]
    schedule: Callable[[Computation, Aliases], Sequence[Instruction]]
    memory: Callable[[Computation, Sequence[Instruction], Aliases], Assignment]

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Programs -> programs."""
        return self.rewrites + self.fusions

    def plan(self, module: Module) -> Plan:
        """The last two stages."""
        order = self.schedule(module.entry, module.aliases)
        return Plan(order, self.memory(module.entry, order, module.aliases))


def cpu_pipeline(target: Target) -> Pipeline:
    return Pipeline(
        rewrites=(
            attention,  # calls that say they are attention -> one kernel each
            linalg,  # the same for factorizations
            group_products,  # and for products with packed four-bit numbers
            legalize,  # composite opcodes -> primitive ones
            fourier,  # transforms of any length and dimension -> those that have kernels
            conv_layout,  # channels last
            simplify,
            conv_planar,  # channels first where nothing wants them last
            attention_match,  # attention that was written out
            attention_operands,  # its masks, biases and dropout: expressions, not arrays
            dot_narrow,  # vectors times matrices of bytes
            dot_merge,  # products that belong together
            scatter_fusion,  # scatters compute their updates
            partial_sort,  # sorts of which a few elements are read
            collective_async,  # work goes on while bytes travel
            loop_fill,  # what a loop writes from end to end is not filled before
            # loops over time, each thread with rows of its own
            loop_rows(target.cores, target.vector_bytes),
        ),
        fusions=(
            hlo_pass(fusion),  # what becomes one kernel
            rematerialize,  # what is computed again instead of kept, when there is a budget
        ),
        schedule=schedule,  # the order of the steps
        memory=assign,  # where every array lies
    )


def gpu_pipeline(target: Target) -> Pipeline:
    assert isinstance(target, GpuTarget)
    return Pipeline(
        rewrites=(
            attention_on_grid,  # calls that say they are attention -> one kernel each
            legalize,  # composite opcodes -> primitive ones
            window_gradient,  # gradients of pooling -> windows
            for_matrix_units(target.matrix_types),  # channels where matrix units want them
            simplify,
            dot_merge,  # products that belong together
            column_split,  # sums of few long columns -> sums of many parts
            collective_async,  # work goes on while bytes travel
        ),
        fusions=(
            hlo_pass(fusion),  # what becomes one kernel
            narrow_arrays,  # what is between them is as narrow as its values
            rematerialize,  # what is computed again instead of kept, when there is a budget
        ),
        schedule=schedule,  # the order of the steps
        memory=assign,  # where every array lies
    )


_PIPELINES: Mapping[type[Target], Callable[[Target], Pipeline]] = {
    CpuTarget: cpu_pipeline,
    GpuTarget: gpu_pipeline,
}


def pipeline_for(target: Target) -> Pipeline:
    """The target's pipeline, without disabled passes."""
    found = _PIPELINES[type(target)](target)
    rewrites, fusions = (tuple(enabled(part)) for part in (found.rewrites, found.fusions))
    return replace(found, rewrites=rewrites, fusions=fusions)


def passes_for(target: Target) -> tuple[Pass, ...]:
    """The enabled passes for a target."""
    return pipeline_for(target).passes


class PassError(RuntimeError):
    """A pass failed, or at CHECK 2 and 3 its result breaks an invariant or has another value; names
    the pass."""


def disabled() -> frozenset[str]:
    return frozenset(name for name in config.get("DISABLE").split(",") if name)


def enabled(passes: Sequence[Pass]) -> list[Pass]:
    """The passes without those in the DISABLE flag; a fixpoint loses the members named there.
    Raises ValueError for a name that is no pass of any target."""
    off = disabled()
    if not off:
        return list(passes)
    every = (*passes, *cpu_pipeline(host()).passes)
    known = {p.name for group in every for p in (group, *group.members)}
    if off - known:
        raise ValueError(
            f"TORCH_HLO_DISABLE: no pass {min(off - known)!r}; passes are"
            f" {', '.join(sorted(known))}"
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
) -> Module:
    """Run the passes (all for this machine by default). The CHECK flag says how much is verified on
    the way."""
    check = config.get("CHECK")
    if check:
        verify(module)
    if dump is not None:
        dump("input", module, 0.0)
    for p in passes_for(host()) if passes is None else passes:
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
    from torch_hlo.hlo.text.parser import parse_module
    from torch_hlo.hlo.text.printer import module_text

    try:
        verify(after)
        if parse_module(module_text(after)).entry.root is not after.entry.root:
            raise PassError("the text does not read back as the same program")
        if level >= 3:
            compare(before, after)
    except Exception as error:
        raise PassError(f"pass {p.name} on module {before.name}: {error}") from error


def compare(before: Module, after: Module, seed: int = 0, rtol: float = 1e-4) -> None:
    """Raises PassError unless the evaluator gives both programs the same values (within `rtol`) on
    random inputs, on all their devices."""
    from torch_hlo.hlo.evaluate.communication import devices_of
    from torch_hlo.hlo.evaluate.multi_device import evaluate_spmd

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


def random_inputs(module: Module, seed: int = 0, special: bool = False) -> list[Any]:
    """One random array per entry parameter; symbolic sizes get small values. `special`: with some
    inf, nan and -0 among the floats."""
    from torch_hlo.hlo.ir import fixed, substitute

    generator = np.random.default_rng(seed)
    names = sorted({n for p in module.entry.params for d in p.dims for n in symbols(d)})
    sizes = {n: 3 + i for i, n in enumerate(names)}

    def value(s: Shape) -> Any:
        if s.is_tuple:
            return tuple(value(e) for e in s.elements)
        dims = tuple(fixed(substitute(d, sizes)) for d in s.dims)
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
