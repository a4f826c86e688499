"""Measured choices: what is asked, kept and taken."""

import numpy as np
import pytest

from benchmarks import check_gpu
from test.compiler.matmul.test_gpu_products import kernels, product
from torch_hlo import config
from torch_hlo.compiler import cache, tune
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device import runtime, tuning
from torch_hlo.hlo.evaluate.evaluate import evaluate


@pytest.fixture
def cached(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    with config.override(CACHE=str(directory), DEVICE="test.ptx.driver:sm_80", TUNE=1000.0):
        yield


def test_the_fastest_way_is_kept_and_taken(cached):
    module = product("bf16 bf16 f32", 64, 64, 64, "kk")
    (before,) = kernels(module)
    tried = []

    def seconds(executable, alone):
        name = executable.kernels[0].name
        tried.append(name)
        return 1.0 if "64x128" in name else 2.0 + len(tried)

    target = runtime.driver().target
    assert tuning.measure(target, module, seconds)
    assert len(set(tried)) == len(tried) > 3
    (after,) = kernels(module)
    assert "64x128" in after and "64x128" not in before
    with config.override(TUNE=0.0):
        assert kernels(module) == [before]
    tried.clear()
    assert tuning.measure(target, module, seconds) and not tried  # known
    inputs = random_inputs(module, seed=1)
    np.testing.assert_allclose(
        check_gpu.run(module, inputs)[0], evaluate(module, inputs)[0], atol=1e-5
    )


def test_choices(cached):
    assert tune.choose("t", "step", ("a", "b")) == "a"
    with tune.collecting() as wanted:
        tune.choose("t", "step", ("a", "b"))
    assert wanted == {"step": ("a", "b")}
    assert tune.record("t", "step", {"a": 2.0, "b": 1.0, "gone": 0.5})
    assert (
        tune.choose("t", "step", ("a", "b")) == "b"
        and tune.choose("other", "step", ("a", "b")) == "a"
    )
    with tune.trying("step", "a"):
        assert (
            tune.choose("t", "step", ("a", "b")) == "a"
            and tune.choose("t", "else", ("x", "y")) == "x"
        )
    cache.store(tune._key("t", "bad"), b"[no json")
    assert tune.choose("t", "bad", ("a", "b")) == "a"


def test_out_of_time_is_not_complete(cached):
    with config.override(TUNE=1e-9):
        assert not tuning.measure(
            runtime.driver().target, product("bf16 bf16 f32", 64, 64, 72, "kk"), None
        )
