"""PJRT plugins as the device: XLA's CPU backend (pip install xla-cpu-pjrt)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import torch_hlo
from torch_hlo import config
from torch_hlo.device import runtime
from torch_hlo.device.memory import Buffer
from torch_hlo.device.pjrt.pjrt_api import Api, PjrtError
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.tools.execute import xla_plugin

ROOT = Path(__file__).parents[2]
PLUGIN = xla_plugin()
needs_plugin = pytest.mark.skipif(PLUGIN is None, reason="needs xla-cpu-pjrt")


def hlo(*lines: str) -> str:
    return "HloModule m\n\nENTRY main {\n" + "\n".join(lines) + "\n}\n"


@pytest.fixture
def plugin():
    with config.override(DEVICE=f"pjrt:{PLUGIN}"):
        yield


def run_in_process(*command: str) -> str:
    environment = {**os.environ, "TORCH_HLO_DEVICE": f"pjrt:{PLUGIN}"}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_plugin
def test_programs_of_every_boundary_type(plugin):
    for (
        dtype
    ) in "pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 bf16 c64 c128 f8e4m3fn f8e5m2".split():
        shape = Shape(dtype, (2, 3))
        text = hlo(
            f"x = {dtype}[2,3] parameter(0)",
            f"ROOT y = {dtype}[3,2] transpose(x), dimensions={{1,0}}",
        )
        data = np.arange(6).reshape(2, 3) % 2
        want = data.T
        (got,) = torch_hlo.run_text(text, data.astype(numpy_dtype(shape.dtype)))
        assert (got.astype(np.complex128) == want).all(), dtype


@needs_plugin
def test_results_stay_on_the_device_until_read(plugin):
    module = parse_module(hlo("x = f32[3] parameter(0)", "ROOT y = f32[3] add(x, x)"))
    program = runtime.compile_program(module)
    x = runtime.from_bytes(Shape("f32", (3,)), np.arange(3, dtype="f").view(np.uint8))
    y, z = runtime.allocate(Shape("f32", (3,))), runtime.allocate(Shape("f32", (3,)))
    program.run([x], [y])
    program.run([y], [z])
    assert y.memory.device is not None and y.memory._host is None
    assert z.bytes.view(np.float32).tolist() == [0, 4, 8]
    assert z.memory.device is None  # the host may write it now
    z.bytes.view(np.float32)[:] = 1
    program.run([z], [y])
    assert y.bytes.view(np.float32).tolist() == [2, 2, 2]


@needs_plugin
def test_donated_input_is_updated_in_place(plugin):
    module = parse_module(
        hlo("x = f32[3] parameter(0)", "ROOT y = f32[3] add(x, x)").replace(
            "HloModule m", "HloModule m, input_output_alias={ {}: (0, {}, may-alias) }"
        )
    )
    program = runtime.compile_program(module)
    assert program.aliases == ((0, 0),)
    x = runtime.from_bytes(Shape("f32", (3,)), np.ones(3, "f").view(np.uint8))
    y = Buffer(x.shape, x.memory)
    for _ in range(3):
        program.run([x], [y])
    assert x.bytes.view(np.float32).tolist() == [8, 8, 8]


@needs_plugin
def test_host_calls_split_the_program(plugin):
    text = hlo(
        "x = f32[3,3] parameter(0)",
        "t = f32[3,3] transpose(x), dimensions={1,0}",
        "s = f32[3,3] add(x, t)",
        'e = (f32[3,3], f32[3], s32[]) custom-call(s), custom_call_target="lapack_ssyevd_ffi",'
        " backend_config={mode = 86 : ui8, uplo = 76 : ui8}",
        "w = f32[3] get-tuple-element(e), index=1",
        "d = f32[3] add(w, w)",
        "r = f32[3] reverse(w), dimensions={0}",
        "ROOT out = (f32[3], f32[3,3], f32[3], f32[3]) tuple(d, s, w, r)",
    )
    x = np.random.default_rng(0).standard_normal((3, 3)).astype("f")
    want = np.linalg.eigvalsh(x + x.T)
    for got, expected in zip(
        torch_hlo.run_text(text, x), (2 * want, x + x.T, want, want[::-1]), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@needs_plugin
def test_errors_carry_the_plugins_message(plugin):
    with pytest.raises(PjrtError, match="no_such_target"):
        torch_hlo.run_text(
            hlo(
                "x = f32[3] parameter(0)",
                'ROOT y = f32[3] custom-call(x), custom_call_target="no_such_target"',
            ),
            np.ones(3, "f"),
        )


@pytest.mark.parametrize("device", ["pjrt", "pjrt:", "tpu", "cpu:0"])
def test_unknown_devices_are_named(device):
    with (
        config.override(DEVICE=device),
        pytest.raises(ValueError, match="TORCH_HLO_DEVICE='" + device),
    ):
        runtime.backend_name()


def test_missing_and_foreign_libraries():
    with (
        config.override(DEVICE="pjrt:/no/such/file.so"),
        pytest.raises(PjrtError, match="no such plugin"),
    ):
        torch_hlo.run_text(hlo("ROOT y = f32[] constant(1)"))
    import llvmlite.binding.ffi as ffi

    with pytest.raises(PjrtError, match="not a PJRT plugin"):
        Api(ffi.lib._name)


@needs_plugin
def test_tensors_fallbacks_and_sizes():
    out = run_in_process(
        "-c",
        """if True:
        import torch, torch_hlo
        x = torch.arange(6.).view(2, 3).to("hlo")
        y = x.clone(); y[0] = 7; y.add_(1)
        torch_hlo.mark_step()
        print(y.cpu().tolist(), (x @ x.T).cpu().tolist())
        print(torch.nonzero(x > 2).cpu().tolist())          # sizes that depend on values
        print(torch.allclose(torch.linalg.svdvals(x @ x.T + 1).cpu() * 2, torch.linalg.svdvals(x.cpu() @ x.cpu().T + 1) * 2, 1e-3))
        torch_hlo.mark_step()
        print(torch.special.i0(torch.linalg.eigvals(x @ x.T).abs().cpu()).shape)
        print(x.dtype, x.half().cpu().sum(), torch.rand(3, device="hlo").cpu().shape)
    """,
    )
    assert "[[8.0, 8.0, 8.0], [4.0, 5.0, 6.0]] [[5.0, 14.0], [14.0, 50.0]]" in out
    assert "True" in out


@needs_plugin
@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None or importlib.util.find_spec("rich") is None,
    reason="the example's needs",
)
@pytest.mark.slow
def test_training_the_digits():
    out = run_in_process(
        "-c",
        """if True:
        import sys; sys.path.insert(0, "examples")
        import torch_hlo
        from train_digits import train
        losses, accuracy, _ = train("mlp", "hlo", 3)
        print(len(losses), losses[0] > 2, losses[-1] < 0.5, accuracy > 0.85)
    """,
    )
    assert out.splitlines()[-1].split()[1:4] == ["True"] * 3, out
