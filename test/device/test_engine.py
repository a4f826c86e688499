"""Machine code that calls what nobody provides."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from torch_hlo.compiler.llvm.machine_code import machine_code
from torch_hlo.compiler.llvm.target import host
from torch_hlo.device.cpu.engine import engine


def test_a_conversion_without_instruction_is_refused():
    text = "define half @f(double %x) {\n  %y = fptrunc double %x to half\n  ret half %y\n}\n"
    code = machine_code(text, host())[0]
    if b"__truncdfhf2" not in code or llvm.address_of_symbol("__truncdfhf2"):
        pytest.skip("this machine converts doubles to halves")
    with pytest.raises(RuntimeError, match="__truncdfhf2"):
        engine([code], host())
