"""A module as an object file with the C interface of abi.py: nothing in it needs a library, an
allocator or global state.

    library = compile_library(module, "digits", inputs, outputs, platform_target("host"))
    library.object, library.header, library.weights          # bytes of digits.o, text of digits.h,
                                                             # bytes of digits.weights or b""
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dim, Module, Size, called, outputs, postorder, substitute, symbol

from ..codegen import CodegenError, HostCall, Program
from ..compile import emit
from ..llvm import CpuTarget
from ..llvm.machine_code import machine_code, prelude
from ..pipeline import optimize
from . import abi, runtime
from .abi import ARRAY, KINDS, MODEL, Array
from .check import WEIGHTS_HEAD, Condition, Interface, escaped, model_functions
from .objects import undefined

WEIGHTS_MAGIC = b"torchhlo"
_LINKER_NAMES = (
    "_GLOBAL_OFFSET_TABLE_",
    "__indirect_function_table",
    "__stack_pointer",
    "__memory_base",
    "__linear_memory",
)


@frozen
class Library:
    """`workspace`: bytes of scratch memory of a run, maybe symbolic. `weights`: contents of the
    weights file; empty when they are embedded."""

    name: str
    object: bytes
    header: str
    weights: bytes
    workspace: Size


def compile_library(
    module: Module,
    name: str,
    inputs: Sequence[Array],
    results: Sequence[Array],
    target: CpuTarget,
    *,
    weights: str = "embed",
    conditions: Sequence[Condition] = (),
    metadata: dict[str, object] | None = None,
) -> Library:
    """Compile for `target` (platform_target). `inputs` and `results` describe the module's
    parameters and outputs, names included.

    `weights`: "embed" keeps constants in the object file, "beside" puts them into a file of their
    own. `conditions`: what sizes have to fulfil. Raises CodegenError for what needs a host: calls
    of Python or LAPACK, and functions of libm that have no code of our own."""
    if weights not in ("embed", "beside"):
        raise ValueError(f"weights={weights!r}: expected 'embed' or 'beside'")
    if name != abi.identifier(name):
        raise ValueError(f"{name!r} is no C identifier: give a name")
    optimized = optimize(module)
    program = _emitted(optimized, target)
    constants = program.constant_data()
    constants += b"\0" * (-len(constants) % 8)
    head = _weights_head(constants) if weights == "beside" and constants else b""
    rename = _Renaming(module, inputs)
    model = Interface(
        name,
        rename.arrays(inputs),
        rename.arrays(results),
        rename.symbols,
        rename.size(program.arena_size),
        tuple(map(rename.size, _sizes(optimized))),
        tuple(
            Condition(c.predicate, rename.size(c.left), rename.size(c.right)) for c in conditions
        ),
        "@torch_hlo_constants" if constants and not head else "null",
        head,
        len(head) + len(constants) if head else 0,
        tuple(runtime.needed(target, program.functions)),
    )
    blobs = {"torch_hlo_constants": constants} if constants and not head else {}
    about = json.dumps(metadata or {}, separators=(",", ":"), sort_keys=True)
    tables = _tables(model, blobs, about)
    text = _module_text(program, model, blobs, tables, target)
    code, _ = machine_code(text, target)
    code = _filled(code, blobs)
    _check_complete(code, target)
    machine = f"{target.triple} {target.cpu}"
    header = abi.header(
        name,
        model.inputs,
        model.outputs,
        model.symbols,
        model.workspace,
        model.weights_bytes,
        machine,
    )
    return Library(name, code, header, head + constants if head else b"", model.workspace)


def _emitted(optimized: Module, target: CpuTarget) -> Program:
    program, _ = emit(optimized, target)
    if program.host_calls:
        found = ", ".join(dict.fromkeys(_call_text(c) for c in program.host_calls))
        raise CodegenError(
            f"{found}: computed by Python, NumPy or LAPACK, which a compiled library does without;"
            " move it out of the model"
        )
    return program


def _module_text(
    program: Program,
    model: Interface,
    blobs: dict[str, bytes],
    tables: str,
    target: CpuTarget,
) -> str:
    """The program's LLVM IR with the functions that its callers know."""
    functions = model_functions(model)
    wanted = [
        *program.declarations,
        *runtime.called_for(program.functions.values(), target),
    ]
    text = "\n".join(
        [
            prelude(target),
            runtime.PLAIN_X86 if target.arch == "x86_64" else "attributes #2 = { nounwind }",
            runtime.machine_check(model.features) if model.features else "",
            *map(_internal, program.functions.values()),
            runtime.definitions(wanted, target),
            tables,
            *(
                f"@{n} = internal constant {_placeholder(n, data)}, align 64"
                for n, data in blobs.items()
            ),
            functions,
        ]
    )
    return text if target.fuses else text.replace("@llvm.fma.", "@llvm.fmuladd.")


def _call_text(call: HostCall) -> str:
    return (
        f"{call.name} {call.attrs}({', '.join(map(str, call.inputs))}) ->"
        f" ({', '.join(map(str, call.outputs))})"
    )


def _internal(text: str) -> str:
    return (
        text
        if text.startswith("define internal ")
        else text.replace("define ", "define internal ", 1)
    )


# -- sizes
def _sizes(module: Module) -> Iterator[Size]:
    """Every symbolic size in the program."""
    sizes: dict[Size, None] = {}
    pending = [module.entry]
    seen = {module.entry}
    while pending:
        for x in postorder((pending.pop().root,)):
            sizes.update(
                dict.fromkeys(
                    d for s in x.shape.arrays for d in (*s.dims, s.nbytes) if isinstance(d, Dim)
                )
            )
            inner = [c for c in called(x) if c not in seen]
            seen.update(inner)
            pending += inner
    return iter(sizes)


class _Renaming:
    """Symbols called by where they are read: tokens_size1."""

    def __init__(self, module: Module, inputs: Sequence[Array]) -> None:
        names = [abi.identifier(f"{inputs[i].name}_size{d}") for _, i, d in module.symbols]
        names = [n if names.count(n) == 1 else f"{n}_{k}" for k, n in enumerate(names)]
        self.symbols = tuple((n, i, d) for n, (_, i, d) in zip(names, module.symbols))
        self._new = {
            old: symbol(new) for (old, _, _), (new, _, _) in zip(module.symbols, self.symbols)
        }

    def size(self, size: Size) -> Size:
        return substitute(size, self._new)

    def arrays(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(
            replace(a, shape=replace(a.shape, dims=tuple(map(self.size, a.shape.dims))))
            for a in arrays
        )


# -- data
def checksum(data: bytes) -> int:
    """Sum of 64-bit words times odd numbers that depend on the position, modulo 2^64: a change of
    any one word shows."""
    total = 0
    words = np.frombuffer(data, np.uint64)
    for start in range(0, len(words), 1 << 20):
        part = words[start : start + (1 << 20)]
        m = np.arange(start + 1, start + 1 + len(part), dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        odd = (m ^ (m >> np.uint64(29))) | np.uint64(1)
        total += int((part * odd).sum(dtype=np.uint64))
    return total & (1 << 64) - 1


def _weights_head(constants: bytes) -> bytes:
    """magic, bytes of the file, version, checksum; then what identifies program and data; zeros up
    to WEIGHTS_HEAD bytes."""
    sums = struct.pack("<QQQ", len(constants) + WEIGHTS_HEAD, abi.VERSION, checksum(constants))
    digest = hashlib.sha256(constants).digest()
    return WEIGHTS_MAGIC + sums + digest


def _placeholder(name: str, data: bytes) -> str:
    """A constant of the size of `data`, recognisable in the object file. Writing megabytes as text
    and parsing them takes far too long."""
    mark = _mark(name)
    if len(data) <= len(mark):
        return f'[{len(data)} x i8] c"{escaped(data)}"'
    return (
        f"{{ [{len(mark)} x i8], [{len(data) - len(mark)} x i8] }} {{ [{len(mark)} x i8]"
        f' c"{escaped(mark)}", [{len(data) - len(mark)} x i8] zeroinitializer }}'
    )


def _mark(name: str) -> bytes:
    return hashlib.sha512(name.encode()).digest()


def _filled(code: bytes, blobs: dict[str, bytes]) -> bytes:
    """The object file with the data in the place of the placeholders."""
    result = bytearray(code)
    for name, data in blobs.items():
        mark = _mark(name)
        if len(data) > len(mark):
            at = code.find(mark)
            if (
                at < 0
                or code.find(mark, at + 1) >= 0
                or any(result[at + len(mark) : at + len(data)])
            ):
                raise RuntimeError(f"the place of {name} is not in the object file")
            result[at : at + len(data)] = data
    return bytes(result)


def _tables(model: Interface, blobs: dict[str, bytes], metadata: str) -> str:
    """The constant NAME_model and what it points to."""
    lines = [abi.TYPES]

    def string(label: str, text: str) -> str:
        data = text.encode() + b"\0"
        lines.append(f'@{label} = private constant [{len(data)} x i8] c"{escaped(data)}"')
        return f"ptr @{label}"

    def table(label: str, arrays: Sequence[Array]) -> str:
        rows = []
        for i, a in enumerate(arrays):
            sizes = "ptr null"
            if a.shape.rank:
                numbers = ", ".join(f"i64 {d if isinstance(d, int) else -1}" for d in a.shape.dims)
                lines.append(
                    f"@torch_hlo_{label}{i}_sizes = private constant [{a.shape.rank} x i64]"
                    f" [{numbers}]"
                )
                sizes = f"ptr @torch_hlo_{label}{i}_sizes"
            initial = "ptr null"
            if a.initial:
                blobs[f"torch_hlo_{label}{i}_initial"] = a.initial
                initial = f"ptr @torch_hlo_{label}{i}_initial"
            name = string(f"torch_hlo_{label}{i}_name", a.name)
            rows.append(
                f"{ARRAY} {{ {name}, {sizes}, {initial}, i32 {abi.DTYPE_CODES[a.shape.dtype]}, i32"
                f" {a.shape.rank}, i32 {KINDS.index(a.kind)}, i32 {a.pair} }}"
            )
        if not rows:
            return "ptr null"
        lines.append(
            f"@torch_hlo_{label} = private constant [{len(rows)} x {ARRAY}] [{', '.join(rows)}]"
        )
        return f"ptr @torch_hlo_{label}"

    pointers = [
        string("torch_hlo_name", model.name),
        table("inputs", model.inputs),
        table("outputs", model.outputs),
        string("torch_hlo_metadata", metadata),
        f"ptr @{model.name}_plan",
        f"ptr @{model.name}_run",
        f"ptr @{model.name}_check_weights" if model.weights_bytes else "ptr null",
    ]
    workspace = model.workspace if isinstance(model.workspace, int) else -1
    lines.append(
        f"@{model.name}_model = constant {MODEL} {{ i32 {abi.VERSION}, i32 {len(model.inputs)}, i32"
        f" {len(model.outputs)}, i32 0, {', '.join(pointers)}, i64 {model.weights_bytes}, i64"
        f" {workspace} }}"
    )
    # A name that does not depend on the model, for programs that load any library; weak, so that
    # several objects link into one program.
    lines.append(f"@torch_hlo_library = weak alias {MODEL}, ptr @{model.name}_model")
    return "\n".join(lines)


def _check_complete(code: bytes, target: CpuTarget) -> None:
    missing = [n for n in undefined(code) if n not in _LINKER_NAMES]
    if missing:
        raise CodegenError(
            f"code for {target.triple} calls {', '.join(missing)}, which a compiled library would"
            " have to take from elsewhere; it has no code of its own for this yet"
        )


def describe(
    module: Module, names: Sequence[str] = (), result_names: Sequence[str] = ()
) -> tuple[list[Array], list[Array]]:
    """Inputs and outputs of a module that comes without names: in0, in1, … and out0, out1, …"""
    inputs = [
        Array(names[i] if i < len(names) else f"in{i}", p.shape)
        for i, p in enumerate(module.entry.params)
    ]
    results = [
        Array(result_names[i] if i < len(result_names) else f"out{i}", x.shape)
        for i, x in enumerate(outputs(module))
    ]
    return inputs, results


__all__ = ["Array", "Condition", "Library", "compile_library", "describe"]
