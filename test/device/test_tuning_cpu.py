"""Ways to cut products on the CPU: the same bits whichever is taken; measured once, kept on disk,
and not looked at without the flag."""

from __future__ import annotations

import numpy as np
import pytest

from torch_hlo import config
from torch_hlo.compiler import tune
from torch_hlo.compiler.compile import compile_module
from torch_hlo.device.cpu import loader, native
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Computation, Module
from torch_hlo.hlo.ir.numeric import encode
from torch_hlo.hlo.ir.shape import Shape

M, N, K = 200, 192, 260


@pytest.fixture
def cached(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    with config.override(CACHE=str(directory), TUNE=1000.0):
        yield


def product(dtype: str) -> Module:
    x, w = b.parameter(0, Shape(dtype, (M, K))), b.parameter(1, Shape(dtype, (N, K)))
    return Module("product", Computation("main", (x, w), b.tanh(b.dot(x, w, (1,), (1,)))))


def asked(dtype: str) -> dict[str, tuple[str, ...]]:
    """What the emitters ask about."""
    with tune.collecting() as wanted:
        compile_module(product(dtype), native.target())
    return wanted


def value(executable) -> bytes:
    rng = np.random.default_rng(0)
    inputs = [
        np.frombuffer(
            encode(rng.standard_normal(s.dims).astype("float32"), s.dtype), np.uint8
        ).copy()
        for s in executable.parameters
    ]
    out = np.zeros(executable.outputs[0].nbytes, np.uint8)
    loader.load(executable).call([a.ctypes.data for a in inputs], [out.ctypes.data])
    return out.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_every_way_gives_the_same_bits(cached, dtype):
    static = value(compile_module(product(dtype)))
    for step, names in asked(dtype).items():
        assert names[0] == "static" and len(names) > 1
        for name in names:
            with tune.trying(step, name):
                assert value(compile_module(product(dtype))) == static, name


def test_ways_are_measured_and_the_fastest_is_taken(cached, monkeypatch):
    ((step, names),) = asked("f32").items()
    assert len(names) > 3
    programs = []

    def seconds(executable, module):
        programs.append(executable)
        return 1.0 if len(programs) == 3 else 2.0

    monkeypatch.setattr(native, "_seconds", seconds)
    native.compile_program(product("f32"))
    assert len(programs) == len(names) and not asked("f32")
    assert tune.choose(native.target().cache_key, step, names) == names[2]
    native.compile_program(product("f32"))
    assert len(programs) == len(names)


def test_real_times(cached, monkeypatch):
    monkeypatch.setattr(native, "TRIAL_SECONDS", 0.001)
    ((step, names),) = asked("f32").items()
    native.compile_program(product("f32"))
    found = tune.measured(native.target().cache_key, step)
    assert set(found) == set(names) and all(0 < t < 10 for t in found.values())


def test_nothing_is_asked_without_the_flag():
    with config.override(TUNE=0.0):
        assert not asked("f32")
