"""HLO -> Executable: passes, code generation, machine code.

    executable = compile_module(module)
    compile_module(module, dump=lambda name, value: print(name, value))     # "hlo:<pass>", "buffers", "llvm", "asm"
"""
from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding as llvm

from torch_hlo.compiler.codegen import index
from torch_hlo.compiler.codegen.computation import emit_entry
from torch_hlo.compiler.codegen.gpu.image import device_image
from torch_hlo.compiler.codegen.gpu.program import GpuProgram
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.codegen.program import Program
from torch_hlo.compiler.codegen.registry import load_emitters
from torch_hlo.compiler.codegen.target import Target, host
from torch_hlo.compiler.executable import Executable
from torch_hlo.hlo.ir import Module, outputs

MODULE_BYTES = 96 << 10  # IR text per LLVM module: 8 to 16 kernels
WORKERS = 2
_RECURSION = 200_000  # fused expressions may be deep
_LOCK = threading.RLock()  # index tables are shared; LLVM itself runs outside of it
_REFERENCE = re.compile(r"@([\w.$]+)")
_LOOP = re.compile(r"^ *br |<\d+ x ", re.M)
_HEAD = re.compile(r"define (?:internal |private |linkonce_odr |hidden )*(?P<result>.*?)@(?P<name>[\w.$]+)\((?P<params>[^\n]*)\)[^\n]*\{")

_PRELUDE = """@torch_hlo_zeros = internal constant [64 x i8] zeroinitializer, align 64
attributes #0 = {{ nounwind "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}" "no-trapping-math"="true" }}
attributes #1 = {{ nounwind willreturn memory(none) }}
!0 = !{{i32 1}}
"""


def compile_module(
    module: Module, target: Target | None = None, optimize: bool = True, dump: Callable[[str, object], None] | None = None,
    profile: Profile | None = None,
) -> Executable:
    """Compile for `target` (this machine). `optimize`: run the pipeline's passes first; without it every instruction is one step.

    `dump(name, value)` gets "hlo:<pass>" with the module after each pass, and texts: "buffers", and "llvm" and "asm" per LLVM module.
    `profile` is filled with the steps, and the code counts their time. Raises CodegenError for an instruction without code.
    """
    target = target or host()
    native = host() if target.grid else target  # a program for a GPU has a plan that runs here
    if optimize:
        from torch_hlo.compiler.pipeline import optimize as run_passes
        from torch_hlo.compiler.pipeline import passes_for

        module = run_passes(module, passes=passes_for(target), dump=None if dump is None else lambda name, m, _: dump(f"hlo:{name}", m))
    program, report = emit(module, target, profile)
    texts = list(_modules(program, native))
    if dump is not None:
        dump("buffers", report)
        for text in texts:
            dump("llvm", text)
    objects = _compile_all(texts, native, dump)
    image, kernels = device_image(program, dump) if target.grid else (b"", ())
    return Executable(
        name=module.name, target=target.key, entry="entry", objects=tuple(objects), constants=program.constant_data(), arena=program.arena_size,
        parameters=tuple(p.shape for p in module.entry.params), outputs=tuple(x.shape for x in outputs(module)), aliases=module.aliases,
        symbols=module.symbols, externals=tuple(sorted(program.declarations)), host_calls=tuple(program.host_calls), image=image, kernels=kernels,
        fetches=target.grid and program.fetches,
        exposed=program.exposed, buffers=program.largest,
    )  # fmt: skip


def emit(module: Module, target: Target, profile: Profile | None = None) -> tuple[Program, str]:
    """The program's functions as IR text, and the buffer report."""
    with _LOCK:
        load_emitters()
        index.reset()
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, _RECURSION))
        try:
            program = (GpuProgram if target.grid else Program)(module, target, profile)
            return program, emit_entry(program)
        finally:
            sys.setrecursionlimit(limit)


def prelude(target: Target) -> str:
    """What every LLVM module starts with."""
    return _PRELUDE.format(bits=target.vector_bytes * 8)


def _modules(program: Program, target: Target):
    """Functions packed into LLVM modules, each with declarations of what it uses from others."""
    heads: dict[str, str] = {}
    functions = program.plan if target is not program.target else program.functions
    for name, text in functions.items():
        match = _HEAD.search(text)
        if match is None or match["name"] != name:
            raise ValueError(f"function {name} is not defined by its text: {text[:200]!r}")
        params = re.sub(r"%[\w.$]+", "", match["params"])
        heads[name] = f"declare {match['result']}@{name}({params})"
    head = prelude(target)
    calls = {n for n, text in functions.items() if n.startswith("entry") and not _LOOP.search(text)}
    for names in ([n for n in functions if n not in calls], [n for n in functions if n in calls]):
        group: list[str] = []
        size = 0
        for name in names:
            group.append(name)
            size += len(functions[name])
            if size >= MODULE_BYTES:
                yield _module(program, functions, heads, group, head)
                group, size = [], 0
        if group:
            yield _module(program, functions, heads, group, head)


def _module(program: Program, functions: dict[str, str], heads: dict[str, str], group: list[str], prelude: str) -> str:
    bodies = [functions[n].replace("define internal ", "define ", 1) for n in group]
    used: dict[str, None] = {}
    for body in bodies:
        used.update(dict.fromkeys(_REFERENCE.findall(body)))
    own = set(group)
    declared = [heads.get(n) or program.declarations.get(n, "") for n in used if n not in own]
    return "\n".join([prelude, *filter(None, declared), "", *bodies])


def _compile_all(texts: list[str], target: Target, dump) -> list[bytes]:
    def one(text: str) -> tuple[bytes, str]:
        return machine_code(text, target, assembly=dump is not None)

    if sum(map(len, texts)) < MODULE_BYTES:  # a thread is not worth its while
        results = list(map(one, texts))
    else:
        with ThreadPoolExecutor(min(WORKERS, len(texts))) as pool:
            results = list(pool.map(one, texts))
    if dump is not None:
        for _, assembly in results:
            dump("asm", assembly)
    return [code for code, _ in results]


def machine_code(text: str, target: Target, assembly: bool = False) -> tuple[bytes, str]:
    """Object code of an IR module, and its assembly when asked for. No IR pass runs: the text is explicit."""
    # The list of steps is long and each runs once: optimising it would take a fifth of a program's compile time for nothing.
    machine = target.machine(2 if _LOOP.search(text) else 0)
    context = llvm.create_context()
    try:
        parsed = llvm.parse_assembly(text, context)
    except RuntimeError as error:
        raise RuntimeError(f"generated IR is invalid: {error}") from None
    parsed.triple = machine.triple
    parsed.data_layout = str(machine.target_data)
    asm = machine.emit_assembly(parsed) if assembly else ""
    return machine.emit_object(parsed), asm
