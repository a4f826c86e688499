"""HLO -> Executable: passes, code generation, machine code.

executable = compile_module(module)
compile_module(module, dump=lambda name, value: print(name, value))     # "hlo:<pass>", "buffers", "llvm", "asm"
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_hlo.compiler.codegen import index
from torch_hlo.compiler.codegen.ahead import MANY, ahead
from torch_hlo.compiler.codegen.computation import emit_entry
from torch_hlo.compiler.codegen.gpu.image import device_image
from torch_hlo.compiler.codegen.gpu.program import GpuProgram
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.codegen.program import Program
from torch_hlo.compiler.codegen.registry import load_emitters
from torch_hlo.compiler.codegen.target import Target, host
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.machine_code import Objects
from torch_hlo.hlo.ir import Module, outputs

_RECURSION = 200_000  # fused expressions may be deep
_LOCK = threading.RLock()  # index tables are shared; LLVM itself runs outside of it


def compile_module(
    module: Module,
    target: Target | None = None,
    optimize: bool = True,
    dump: Callable[[str, object], None] | None = None,
    profile: Profile | None = None,
) -> Executable:
    """Compile for `target` (this machine). `optimize`: run the pipeline's passes first; without it every instruction is one step.

    `dump(name, value)` gets "hlo:<pass>" with the module after each pass that changed it, and texts: "buffers", and "llvm" and "asm" per LLVM module.
    `profile` is filled with the steps, and the code counts their time. Raises CodegenError for an instruction without code.
    """
    target = target or host()
    native = host() if target.grid else target  # a program for a GPU has a plan that runs here
    with Objects(native, assembly=dump is not None) as objects:
        program = None

        def begin(before_fusion: Module) -> None:
            nonlocal program
            if len(before_fusion.entry.instructions()) >= MANY:
                program = _begun(before_fusion, target, profile, objects)
                with _emitting(target):
                    ahead(program)
                objects.flush()

        if optimize:
            from torch_hlo.compiler.pipeline import optimize as run_passes
            from torch_hlo.compiler.pipeline import passes_for

            observe = (
                None
                if dump is None
                else lambda name, m, _: name == "input" or dump(f"hlo:{name}", m)
            )
            module = run_passes(
                module,
                passes=passes_for(target),
                dump=observe,
                before_fusion=None if target.grid else begin,
            )
        program, report = emit(module, target, profile, objects, program)
        compiled = objects.finish()
    if dump is not None:
        dump("buffers", report)
        for name, texts in (
            ("llvm", objects.texts),
            ("asm", [assembly for _, assembly in compiled]),
        ):
            for text in texts:
                dump(name, text)
    image, kernels = device_image(program, dump) if target.grid else (b"", ())
    return Executable(
        name=module.name, target=target.key, entry="entry", objects=tuple(code for code, _ in compiled), constants=program.constant_data(), arena=program.arena_size,
        parameters=tuple(p.shape for p in module.entry.params), outputs=tuple(x.shape for x in outputs(module)), aliases=module.aliases,
        symbols=module.symbols, externals=tuple(sorted(program.declarations)), host_calls=tuple(program.host_calls), image=image, kernels=kernels,
        fetches=target.grid and program.fetches,
        exposed=program.exposed, buffers=program.largest, packings=tuple(program.packings),
    )  # fmt: skip


def emit(
    module: Module,
    target: Target,
    profile: Profile | None = None,
    objects: Objects | None = None,
    program: Program | None = None,
) -> tuple[Program, str]:
    """The program's functions as IR text, and the buffer report. `objects` gets those that run on the host, one by one. `program`: what `ahead` has begun."""
    with _emitting(target):
        if program is None:
            program = _begun(module, target, profile, objects)
        program.module = module
        return program, emit_entry(program)


def _begun(
    module: Module, target: Target, profile: Profile | None, objects: Objects | None
) -> Program:
    program = (GpuProgram if target.grid else Program)(module, target, profile)
    if objects is not None:
        program.written, objects.declarations = objects.add, program.declarations
    return program


@contextmanager
def _emitting(target: Target) -> Iterator[None]:
    with _LOCK:
        load_emitters(target.grid)
        index.reset()
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, _RECURSION))
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)
