"""How a back end is chosen, and what every one offers."""

import importlib

import pytest

from torch_hlo import config
from torch_hlo.device import runtime
from torch_hlo.device.interfaces import Backend


@pytest.mark.parametrize("name", runtime.BACKENDS)
def test_every_back_end_is_one(name):
    made = importlib.import_module(runtime.BACKENDS[name]).backend("7" if name == "cuda" else "")
    assert isinstance(made, Backend)
    assert made.on_host == (name in ("cpu", "evaluator"))
    count, rows = made.saturating
    assert count > 0 and rows > 0


@pytest.mark.parametrize("name", ["cpu:1", "gpu", "pjrt", "ptx", "no.such.module", "evaluator:x"])
def test_unknown_devices_are_named(name):
    with config.override(DEVICE=name), pytest.raises(ValueError, match=f"{name}'.*choose cpu"):
        runtime.backend_name()


def test_a_module_names_a_back_end():
    with config.override(DEVICE="test.ptx.driver:sm_80"):
        assert runtime.backend_name() == "test.ptx.driver:sm_80"
        assert runtime.driver().target.cpu == "sm_80"
        assert runtime.backend() is runtime.backend() and runtime.backend().place() is None


def test_memory_is_the_host_s():
    for name in ("cpu", "evaluator"):
        with config.override(DEVICE=name):
            assert runtime.driver() is None and runtime.backend().place() == (1, 0)
