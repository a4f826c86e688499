"""Device code as text becomes an image: PTX. What instruction selection lacks is found out before.

An intrinsic without code is a fatal error inside LLVM that ends the process, so every call of one
is checked against the family's list."""

import re
from collections.abc import Callable

from ..codegen import CodegenError
from ..llvm.machine_code import parsed
from .gpu_program import GpuProgram, Kernel
from .target import INTRINSICS, GpuTarget

_INTRINSIC = re.compile(r"@llvm\.([a-z0-9_.]+)\(")


def check_intrinsics(text: str, target: GpuTarget) -> None:
    """Raises CodegenError naming an intrinsic that the target's instruction selection has no code
    for."""
    for found in dict.fromkeys(_INTRINSIC.findall(text)):
        parts = found.split(".")
        if not any(".".join(parts[:n]) in INTRINSICS for n in range(1, len(parts) + 1)):
            raise CodegenError(
                f"llvm.{found} has no code on {target.name}: write it with other instructions"
                " (compiler/llvm/math.py)"
            )


def module_text(program: GpuProgram) -> str:
    """The device's LLVM module."""
    target = program.target
    body = program.device_text()
    check_intrinsics(body, target)
    return "\n".join(
        [
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
    if dump is not None:
        dump("asm", image.decode())
    return image, tuple(program.kernels)


def assemble(text: str, target: GpuTarget) -> bytes:
    """The image of an LLVM module's text."""
    machine = target.machine()
    assembly: str = machine.emit_assembly(parsed(text, machine))
    return assembly.encode()
