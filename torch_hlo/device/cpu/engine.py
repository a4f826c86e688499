"""Machine code in the process."""

import re
from collections.abc import Sequence

import llvmlite.binding as llvm

from torch_hlo.compiler.llvm import CpuTarget, host
from torch_hlo.compiler.llvm.machine_code import machine_code

# conversions that a processor has no instruction for
_CONVERSION = re.compile(rb"\0_?(__(?:trunc|extend|fix|float)[a-z0-9]+)(?=\0)")


def engine(objects: Sequence[bytes], target: CpuTarget) -> llvm.ExecutionEngine:
    """One MCJIT engine per program; it takes its TargetMachine over, so that must be a new one."""
    # In the global context: one of our own would have to outlive the engine, which garbage
    # collection does not promise.
    empty = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(empty, target.machine())
    for data in objects:
        for name in _CONVERSION.findall(data):
            if not llvm.address_of_symbol(name.decode()):  # it would be called at address 0
                raise RuntimeError(f"LLVM calls {name.decode()}, which this process does not have")
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine


def loaded(text: str) -> llvm.ExecutionEngine:
    """The engine of LLVM text that is short, or waits: it is not optimised."""
    return engine([machine_code(text, host(), level=0)[0]], host())


def constant_function(first: int, second: int) -> int:
    """Address of a C function that returns these two words in registers, whatever it is called
    with. It stays until the process ends."""
    text = (
        f"define {{i64, i64}} @torch_hlo_constant() {{\n  ret {{i64, i64}} {{i64 {first}, i64"
        f" {second}}}\n}}\n"
    )
    code = loaded(text)
    address = code.get_function_address("torch_hlo_constant")
    code.detach()
    return address
