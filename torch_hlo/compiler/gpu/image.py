"""Device code as text becomes an image: PTX, or a SPIR-V module. What instruction
selection lacks is found out before.

An intrinsic without code is a fatal error inside LLVM that ends the process, so every call of one
is checked against the family's list."""

import re
import subprocess
import sys
from collections.abc import Callable

from ..codegen import CodegenError
from ..llvm.machine_code import parsed
from .gpu_program import GpuProgram, Kernel
from .target import GpuTarget

_INTRINSIC = re.compile(r"@llvm\.([a-z0-9_.]+)\(")


def check_intrinsics(text: str, target: GpuTarget) -> None:
    """Raises CodegenError naming an intrinsic that the target's instruction selection has no code
    for."""
    allowed = target.family.intrinsics
    for found in dict.fromkeys(_INTRINSIC.findall(text)):
        parts = found.split(".")
        if not any(".".join(parts[:n]) in allowed for n in range(1, len(parts) + 1)):
            raise CodegenError(
                f"llvm.{found} has no code on {target.name}: write it with other instructions"
                " (compiler/llvm/math.py)"
            )


def module_text(program: GpuProgram) -> str:
    """The device's LLVM module."""
    target = program.target
    body = program.device_text()
    check_intrinsics(body, target)
    used = set(re.findall(r"@(\w+)\(", body))
    declared = [d for d in target.family.declarations if d[d.index("@") + 1 : d.index("(")] in used]
    return "\n".join(
        [
            *declared,
            "",
            body,
            "attributes #0 = { nounwind }",
            "attributes #1 = { nounwind willreturn memory(none) }",
        ]
    )


def device_image(
    program: GpuProgram, dump: Callable[[str, object], None] | None = None
) -> tuple[bytes, tuple[Kernel, ...]]:
    """(image, its kernels). `dump` gets "llvm" and, where it is text, "asm". Raises CodegenError,
    RuntimeError for invalid text."""
    if not program.kernels:
        return b"", ()
    text = module_text(program)
    if dump is not None:
        dump("llvm", text)
    image = assemble(text, program.target)
    if dump is not None and program.target.family.output == "assembly":
        dump("asm", image.decode())
    return image, tuple(program.kernels)


def assemble(text: str, target: GpuTarget) -> bytes:
    """The image of an LLVM module's text."""
    machine = target.machine()
    if target.family.isolated:
        return _isolated(text, machine.triple, target)
    module = parsed(text, machine)
    if target.family.output == "assembly":
        assembly: str = machine.emit_assembly(module)
        return assembly.encode()
    code: bytes = machine.emit_object(module)
    return code


# Runs in a process of its own, so it imports nothing of this package.
_ASSEMBLER = """
import sys, llvmlite.binding as llvm
llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()
triple, cpu, features = sys.argv[1:]
machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=0)
module = llvm.parse_assembly(sys.stdin.read())
module.triple, module.data_layout = triple, str(machine.target_data)
sys.stdout.buffer.write(machine.emit_object(module))
"""


def _isolated(text: str, triple: str, target: GpuTarget) -> bytes:
    """LLVM's SPIR-V writer keeps tables of blocks by address from one module to the next (LLVM 22):
    the second module may get branches of the first. Above -O0 its combiner also narrows `and`
    without its operand. So: a process per module, unoptimized; drivers optimize."""
    done = subprocess.run(
        [sys.executable, "-c", _ASSEMBLER, triple, target.cpu, target.features],
        input=text.encode(),
        capture_output=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"generated device IR is invalid for {target.name}:"
            f" {done.stderr.decode(errors='replace')[-2000:]}"
        )
    return done.stdout
