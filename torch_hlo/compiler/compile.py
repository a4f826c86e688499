"""HLO -> Executable: passes, code generation, machine code.

executable = compile_module(module)
# "hlo:<pass>", "buffers", "llvm", "asm"
compile_module(module, dump=lambda name, value: print(name, value))
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Module, outputs

from .codegen import Program, index
from .codegen.computation import emit_entry
from .codegen.early_kernels import ahead
from .codegen.profile import Profile
from .executable import Executable
from .gpu.gpu_program import GpuProgram, Kernel
from .gpu.image import device_image
from .gpu.target import GpuTarget
from .llvm import CpuTarget, Target, host
from .llvm.machine_code import Objects
from .thresholds import MANY_INSTRUCTIONS

_RECURSION = 200_000  # fused expressions may be deep
_LOCK = threading.RLock()  # index tables are shared; LLVM itself runs outside of it


@frozen
class _Backend:
    """The builder of a target's programs, and what makes the device's code of one."""

    program: type[Program]
    image: Callable[..., tuple[bytes, tuple[Kernel, ...]]]


_BACKENDS: Mapping[type[Target], _Backend] = {
    CpuTarget: _Backend(Program, lambda program, dump: (b"", ())),
    GpuTarget: _Backend(GpuProgram, device_image),
}


def compile_module(
    module: Module,
    target: Target | None = None,
    optimize: bool = True,
    dump: Callable[[str, object], None] | None = None,
    profile: Profile | None = None,
) -> Executable:
    """Compile for `target` (this machine). `optimize`: run the pipeline's passes first; without it
    every instruction is one step.

    `dump(name, value)` gets "hlo:<pass>" with the module after each pass that changed it, and
    texts: "buffers", and "llvm" and "asm" per LLVM module. `profile` is filled with the steps, and
    the code counts their time. Raises CodegenError for an instruction without code."""
    target = target or host()
    if module.excess_precision:
        target = replace(target, excess_precision=True)
    backend = _BACKENDS[type(target)]
    with Objects(target.plan_target, assembly=dump is not None) as objects:
        program = None
        if optimize:
            from . import pipeline

            stages = pipeline.pipeline_for(target)
            observe = _observer(dump)
            module = pipeline.optimize(module, observe, stages.rewrites)
            if backend.program.early and len(module.entry.instructions()) >= MANY_INSTRUCTIONS:
                program = _begun(module, target, profile, objects)
                with _emitting():
                    ahead(program)
                objects.flush()
            module = pipeline.optimize(module, observe, stages.fusions)
        program, report = emit(module, target, profile, objects, program)
        compiled = objects.finish()
    if dump is not None:
        dump("buffers", report)
        for text in objects.texts:
            dump("llvm", text)
        for _, assembly in compiled:
            dump("asm", assembly)
    image, kernels = backend.image(program, dump)
    return Executable(
        name=module.name,
        target=target.key,
        entry="entry",
        objects=tuple(code for code, _ in compiled),
        constants=program.constant_data(),
        arena=program.arena_size,
        parameters=tuple(p.shape for p in module.entry.params),
        outputs=tuple(x.shape for x in outputs(module)),
        aliases=module.aliases,
        symbols=module.symbols,
        externals=tuple(sorted(program.declarations)),
        host_calls=tuple(program.host_calls),
        image=image,
        kernels=kernels,
        fetches=program.fetches,
        exposed=program.exposed,
        buffers=program.largest,
        packings=tuple(program.packings),
    )


def _observer(
    dump: Callable[[str, object], None] | None,
) -> Callable[[str, Module, float], None] | None:
    """`dump` for what passes make."""
    if dump is None:
        return None
    return lambda name, module, _: None if name == "input" else dump(f"hlo:{name}", module)


def emit(
    module: Module,
    target: Target,
    profile: Profile | None = None,
    objects: Objects | None = None,
    program: Program | None = None,
) -> tuple[Program, str]:
    """The program's functions as IR text, and the buffer report. `objects` gets those that run on
    the host, one by one. `program`: what `ahead` has begun."""
    from .pipeline import pipeline_for

    with _emitting():
        plan = pipeline_for(target).plan(module)
        if program is None:
            program = _begun(module, target, profile, objects)
        program.module = module
        return program, emit_entry(program, plan)


def _begun(
    module: Module, target: Target, profile: Profile | None, objects: Objects | None
) -> Program:
    program = _BACKENDS[type(target)].program(module, target, profile)
    if objects is not None:
        program.written = objects.add
        objects.declarations = program.declarations
    return program


@contextmanager
def _emitting() -> Iterator[None]:
    with _LOCK:
        index.reset()
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, _RECURSION))
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)
