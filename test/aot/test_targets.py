"""Code for other machines: x86-64 levels on this one, WebAssembly under wasmtime, AArch64 under
qemu."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_hlo import aot
from torch_hlo.aot import link
from torch_hlo.compiler.aot import abi
from torch_hlo.compiler.aot.objects import undefined
from torch_hlo.compiler.llvm.target import PLATFORMS, host, platform_target
from torch_hlo.device import library as loader

from .models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Functions(nn.Module):
    """Functions with code of our own on every machine, also where the C library would be asked."""

    def forward(self, x):
        y = x.double()
        return (
            torch.sin(x * 1e7),
            torch.cos(x),
            torch.tan(y * 1e8),
            y.abs() ** 1.7,
            torch.fmod(y, 0.3),
            torch.erf(y),
            torch.round(x),
            x.half(),
            torch.nn.functional.gelu(x),
            torch.sort(x).values,
            x.long() // 3,
            torch.log1p(x.abs()),
            (x.reshape(10, -1) @ x.reshape(-1, 10)).amax(1),
        )


@functools.cache
def case(name):
    """(exported program, arguments, eager results)."""
    torch.manual_seed(0)
    module, args, dynamic = (
        (Functions(), (torch.randn(400) * 20,), None) if name == "functions" else MODELS[name]()
    )
    with torch.no_grad():
        return (
            torch.export.export(module, args, dynamic_shapes=dynamic),
            args,
            module(*args),
        )


def names(*quick):
    """The models; those that are not `quick` are for the long sweeps."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow)
        for name in (*MODELS, "functions")
    ]


def linker(kind: str, arch: str) -> None:
    try:
        link.find(kind, arch)
    except aot.LinkError as error:
        pytest.skip(str(error))


def close(got, want):
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(g, w.detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="this machine is no x86-64")
@pytest.mark.parametrize(
    "name,cpu",
    [("functions", "x86-64-v2"), ("cnn", "x86-64-v3"), ("transformer", "x86-64-v2")],
)
def test_x86_levels(tmp_path, name, cpu):
    if cpu == "x86-64-v3" and not host().has("avx2"):
        pytest.skip("this machine has no AVX2")
    program, args, want = case(name)
    files = aot.compile(program, target="x86_64-linux-gnu", cpu=cpu, output=tmp_path / "model.so")
    close(aot.load(files.library)(*args), want)


@pytest.mark.parametrize("name", names("functions", "transformer"))
def test_wasm(tmp_path, name, cpu="simd128"):
    linker("wasm", "wasm32")
    pytest.importorskip("wasmtime", reason="wasmtime is not installed")
    from .wasm import WasmModel

    program, args, want = case(name)
    files = aot.compile(program, target="wasm32", cpu=cpu, output=tmp_path / "model.wasm")
    model = WasmModel(files.library, "model")
    close(model(*args), want)
    with pytest.raises(RuntimeError, match="input_count is 0, it must be"):
        model()


@pytest.mark.parametrize("name", names("functions"))
def test_wasm_without_vectors(tmp_path, name):
    test_wasm(tmp_path, name, "mvp")


# Reads each input, runs the model, writes each output; without a C library, by system calls of
# AArch64 Linux.
_DRIVER = """
#include "model.h"
static long call3(long number, long a, const void *b, long c) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x2 __asm__("x2") = c;
    register const void *x1 __asm__("x1") = b;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}
static char memory[64 << 20] __attribute__((aligned(64)));
static unsigned long top;
static void *take(unsigned long n) { void *p = memory + top; top = (top + n + 63) & ~63ul; return p; }
static void move(long number, char *p, unsigned long n) {
    while (n) { long done = call3(number, number == 64, p, (long)n); if (done <= 0) call3(93, 9, 0, 0); p += done; n -= (unsigned long)done; }
}
void _start(void) {
    torch_hlo_tensor in[MODEL_INPUTS + 1], out[MODEL_OUTPUTS + 1];
    torch_hlo_error *error = take(sizeof *error);
    uint64_t *need = take(8);
    int32_t code;
    for (int i = 0; i < MODEL_INPUTS; i++) {
        in[i].rank = model_model.inputs[i].rank;
        in[i].dtype = model_model.inputs[i].dtype;
        in[i].sizes = take(64);
        move(63, (char *)in[i].sizes, 8ul * (unsigned)in[i].rank);
        move(63, (char *)&in[i].nbytes, 8);
        in[i].data = take(in[i].nbytes);
        move(63, in[i].data, in[i].nbytes);
    }
    for (int i = 0; i < MODEL_OUTPUTS; i++) out[i].sizes = take(64);
    code = model_plan(in, MODEL_INPUTS, out, MODEL_OUTPUTS, need, error);
    for (int i = 0; !code && i < MODEL_OUTPUTS; i++) out[i].data = take(out[i].nbytes);
    if (!code) code = model_run(in, MODEL_INPUTS, out, MODEL_OUTPUTS, take(*need), *need, 0, 0, error);
    if (code) move(64, error->message, 252);
    for (int i = 0; !code && i < MODEL_OUTPUTS; i++) move(64, out[i].data, out[i].nbytes);
    call3(93, code, 0, 0);
}
"""


def aarch64_compiler() -> list[str]:
    if path := shutil.which("aarch64-linux-gnu-gcc"):
        return [path]
    if link._has_zig():
        return [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            "aarch64-freestanding-none",
        ]
    pytest.skip("no C compiler for AArch64: install aarch64-linux-gnu-gcc or ziglang")


@pytest.mark.parametrize("name", names("functions", "transformer"))
def test_aarch64(tmp_path, name):
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if qemu is None:
        pytest.skip("qemu-aarch64 is not installed (Debian: qemu-user)")
    compiler = aarch64_compiler()
    program, args, want = case(name)
    aot.compile(program, target="aarch64-linux-gnu", output=tmp_path / "model.o")
    (tmp_path / "driver.c").write_text(_DRIVER)
    program = tmp_path / "program"
    subprocess.run(
        [
            *compiler,
            "-nostdlib",
            "-static",
            "-ffreestanding",
            "-fno-stack-protector",
            "-O1",
            "-o",
            program,
            tmp_path / "driver.c",
            tmp_path / "model.o",
        ],
        check=True,
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig")},
    )
    given = bytearray()
    for t in args:
        given += (
            torch.tensor([*t.shape, t.nbytes]).numpy().tobytes() + t.contiguous().numpy().tobytes()
        )
    done = subprocess.run([qemu, program], input=bytes(given), capture_output=True)
    assert done.returncode == 0, done
    data, at = bytearray(done.stdout), 0
    results = []
    for w in pytree.tree_leaves(want):
        results.append(torch.frombuffer(data[at : at + w.nbytes], dtype=w.dtype).reshape(w.shape))
        at += w.nbytes
    assert at == len(data)
    close(results, want)


@pytest.mark.parametrize("target", PLATFORMS)
def test_objects_need_nothing(tmp_path, target):
    for cpu in PLATFORMS[target].cpus:
        files = aot.compile(
            case("functions")[0], target=target, cpu=cpu, output=tmp_path / "model.o"
        )
        found = undefined(files.library.read_bytes())
        assert not [
            n
            for n in found
            if n not in ("__stack_pointer", "__linear_memory", "__indirect_function_table")
        ], found


def test_targets_are_checked():
    assert platform_target("aarch64-linux-gnu").arch == "aarch64"
    assert not platform_target("wasm32").fuses and platform_target("aarch64-linux-gnu").fuses
    with pytest.raises(
        ValueError, match="unknown cpu 'pentium' for wasm32; there are simd128, mvp"
    ):
        platform_target("wasm32", "pentium")


def test_a_missing_linker_is_explained(monkeypatch):
    monkeypatch.setattr(link, "_has_zig", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(aot.LinkError, match="no linker for wasm32 found: install wasm-ld"):
        link.find("wasm", "wasm32")
    with pytest.raises(aot.LinkError, match="no linker for aarch64 found: install one of: ld.lld"):
        link.find("elf", "aarch64")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 code asks for features")
def test_a_processor_that_lacks_something(tmp_path, monkeypatch):
    """Leaf 7 has reserved bits: a feature that no processor has."""
    from torch_hlo.compiler.aot import runtime

    x = torch.randn(3)
    monkeypatch.setitem(runtime.X86_FEATURES, "sse4.2", (7, 0, "c", 15))
    files = aot.compile(
        nn.Tanh(),
        (x,),
        target="x86_64-linux-gnu",
        cpu="x86-64-v2",
        output=tmp_path / "model.so",
    )
    with pytest.raises(aot.LibraryError, match=r"lacks one of .*sse4\.2") as error:
        aot.load(files.library)(x)
    assert error.value.code == abi.ERRORS.index("MACHINE")


def test_matrix_tiles_in_a_process_of_their_own(tmp_path):
    """bf16 products: on AMX a library asks the system for the tiles itself."""
    torch.manual_seed(0)
    module, x = nn.Linear(96, 80).bfloat16(), torch.randn(64, 96, dtype=torch.bfloat16)
    files = aot.compile(module, (x,), output=tmp_path / "model.so")
    (tmp_path / "x").write_bytes(bytes(x.reshape(-1).view(torch.uint8).tolist()))
    jobs = [
        {
            "library": str(files.library),
            "inputs": [[str(tmp_path / "x"), abi.DTYPE_CODES["bf16"], [64, 96]]],
            "outputs": [str(tmp_path / "y")],
        }
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    bare = Path(__file__).parent / "bare.py"
    done = subprocess.run(
        [sys.executable, "-I", bare, loader.__file__, tmp_path / "jobs.json"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", done.stderr
    got = torch.frombuffer(bytearray((tmp_path / "y").read_bytes()), dtype=torch.bfloat16).reshape(
        64, 80
    )
    torch.testing.assert_close(got, module(x), rtol=2e-2, atol=2e-2)
