"""Code for GPUs without a GPU: what is assembled, what is refused, and the text that address spaces
are put into.

Numbers are checked in test/ptx, which runs the same kernels.
"""

import re
import shutil
import subprocess
import sys

import pytest

from benchmarks.check_gpu import PROGRAMS, program
from torch_hlo.compiler.codegen.block import CodegenError
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.gpu.address_spaces import SpaceError, Spaces
from torch_hlo.compiler.gpu.image import assemble, check_intrinsics
from torch_hlo.compiler.gpu.target import INTRINSICS, KERNEL, gpu_target, nvptx_target
from torch_hlo.hlo.text.parser import parse_module

PTXAS = shutil.which("ptxas")


@pytest.mark.skipif(
    PTXAS is None,
    reason=(
        "ptxas is not installed (it comes with the CUDA toolkit, or with the package"
        " nvidia-cuda-nvcc)"
    ),
)
@pytest.mark.parametrize("cpu", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ptx_is_assembled(name, cpu):
    e = compile_module(program(name), gpu_target(f"nvptx:{cpu}"))
    done = subprocess.run(
        [PTXAS, f"-arch={cpu}", "-v", "-", "-o", "/dev/null"],
        input=e.image,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert e.kernels and all(f"'{k.name}'".encode() in done.stderr for k in e.kernels)


def test_vectors_are_16_bytes_and_rows_use_shuffles():
    text = compile_module(program("softmax"), gpu_target("nvptx:sm_80")).image.decode()
    # LLVM 20 says f32
    for wanted in (
        r"ld\.global\.v4\.[bf]32",
        r"st\.global\.v4\.[bf]32",
        r"shfl\.sync\.bfly",
        r"bar\.sync",
        r"\.maxntid 256",
    ):
        assert re.search(wanted, text), wanted
    # results do not depend on the order of threads
    assert "\tatom" not in text and "\tred." not in text


def test_executables_survive_storage():
    e = compile_module(program("softmax"), gpu_target("nvptx:sm_80"))
    assert Executable.from_bytes(e.to_bytes()) == e


def test_unknown_intrinsics_are_refused_before_they_abort_the_process():
    target = gpu_target("nvptx:sm_80")
    check_intrinsics("call float @llvm.fma.f32(float 1.0, float 1.0, float 1.0)", target)
    with pytest.raises(CodegenError, match=r"llvm.log2.f32 has no code on nvptx:sm_80"):
        check_intrinsics("%v = call float @llvm.log2.f32(float %x)", target)


_ONE = {
    "fma": "float %x, float %x, float %x",
    "copysign": "float %x, float %x",
    "maxnum": "float %x, float %x",
    "minnum": "float %x, float %x",
}


@pytest.mark.parametrize("target", ["nvptx:sm_80", "nvptx:sm_100"])
def test_allowed_float_intrinsics_have_code(target):
    """In a process of its own: a wrong row in the list would end it."""
    names = [
        n
        for n in (
            "fma",
            "fabs",
            "floor",
            "ceil",
            "trunc",
            "rint",
            "roundeven",
            "sqrt",
            "copysign",
            "maxnum",
            "minnum",
        )
        if n in INTRINSICS
    ]
    lines = "".join(
        f"  %v{i} = call float @llvm.{n}.f32({_ONE.get(n, 'float %x')})\n  store volatile float"
        f" %v{i}, ptr addrspace(1) %p\n"
        for i, n in enumerate(names)
    )
    text = (
        f"define {KERNEL} void @k(ptr addrspace(1) %p) {{\n  %x = load float, ptr"
        f" addrspace(1) %p\n{lines}  ret void\n}}\n"
    )
    code = (
        "from torch_hlo.compiler.gpu.image import assemble\nfrom torch_hlo.compiler.gpu.target"
        f" import gpu_target\nassemble({text!r}, gpu_target({target!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_mathematics_needs_no_library():
    text = compile_module(program("functions"), gpu_target("nvptx:sm_80")).image.decode()
    assert ".extern" not in text


def test_address_spaces_follow_pointers():
    text = """define ptx_kernel void @k(i64 %items, ptr %p0, ptr %p1) #0 {
  %s = alloca float
  %a = getelementptr float, ptr %p0, i64 %items
  %b = select i1 true, ptr %a, ptr %p1
  br label %l
l:
  %q = phi ptr [%b, %e], [%n, %l]
  %n = getelementptr float, ptr %q, i64 1
  %v = call <4 x float> @llvm.masked.load.v4f32.p0(ptr %n, i32 4, <4 x i1> %m, <4 x float> zeroinitializer)
  %w = load float, ptr %s
  store float %w, ptr @shared
}"""
    spaces = Spaces()
    spaces.assign("@shared = internal addrspace(3) global float undef")
    found = spaces.assign(text)
    assert (
        "ptr addrspace(1) %p0, ptr addrspace(1) %p1)" in found
        and "phi ptr addrspace(1) [%b" in found
    )
    assert "@llvm.masked.load.v4f32.p1(ptr addrspace(1) %n, i32 4" in found
    assert "load float, ptr %s" in found and "ptr addrspace(3) @shared" in found


def test_mixed_address_spaces_are_refused():
    with pytest.raises(SpaceError, match="select between address spaces"):
        Spaces().assign(
            "define ptx_kernel void @k(ptr %p) {\n  %s = alloca i8\n  %q = select i1 true, ptr %p,"
            " ptr %s\n}"
        )


def test_targets_have_names():
    with pytest.raises(ValueError, match="no GPU target 'nvptx:sm_70'.*nvptx:sm_80"):
        gpu_target("nvptx:sm_70")
    with pytest.raises(ValueError, match="7.5 is not supported"):
        nvptx_target(7, 5)


def test_invalid_text_is_an_error():
    with pytest.raises(RuntimeError, match="generated (device )?IR is invalid"):
        assemble("define void @k() { nonsense }", gpu_target("nvptx:sm_80"))


def test_host_calls_and_loops_read_the_device():
    text = """HloModule w
body { s = s32[] parameter(0)
 o = s32[] constant(1)
 ROOT n = s32[] add(s, o) }
cond { s = s32[] parameter(0)
 l = s32[] constant(10)
 ROOT c = pred[] compare(s, l), direction=LT }
ENTRY main { x = s32[] parameter(0)
 ROOT w = s32[] while(x), condition=cond, body=body }
"""
    assert compile_module(parse_module(text), gpu_target("nvptx:sm_80")).fetches
    assert not compile_module(program("softmax"), gpu_target("nvptx:sm_80")).fetches
