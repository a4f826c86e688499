"""Ops that run on the CPU."""

import warnings

import pytest
import torch

import torch_hlo  # noqa: F401
from torch_hlo import config, log, metrics
from torch_hlo.lazy.record import session
from torch_hlo.lazy.record.fallback import run_fallback

step = session.engine()

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_evaluator():
    with config.override(DEVICE="evaluator", FALLBACK="warn"):
        log.forget_warnings()
        metrics.clear_all()
        yield
        step.sync()


def hlo(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).to("hlo")


@pytest.mark.filterwarnings("ignore")
def test_functional():
    y = run_fallback(aten.sin.default, (hlo(0.0, 1.0),), {})
    assert y.device.type == "hlo"
    torch.testing.assert_close(y.cpu(), torch.tensor([0.0, 1.0]).sin())
    assert metrics.counter_value("aten::sin") == 1


@pytest.mark.filterwarnings("ignore")
def test_kernels_that_conjugate_inside():
    a, b = (
        torch.randn(4, 3, dtype=torch.complex64),
        torch.randn(4, 3, dtype=torch.complex64),
    )
    residuals = torch.linalg.lstsq(a.to("hlo"), b.to("hlo")).residuals
    torch.testing.assert_close(residuals.cpu(), torch.linalg.lstsq(a, b).residuals)


def test_in_place_also_through_views():
    x = torch.zeros(3, 4).to("hlo")
    row = x[1]
    assert run_fallback(aten.add_.Scalar, (row, 2), {}) is row
    assert x.sum().item() == 8 and row.tolist() == [2] * 4


@pytest.mark.filterwarnings("ignore")
def test_out_variants_resize():
    out = torch.empty(2).to("hlo")
    assert run_fallback(aten.add.out, (hlo(1.0, 2.0), hlo(3.0, 4.0)), {"out": out}) is out
    assert out.tolist() == [4, 6]
    empty = torch.empty(0).to("hlo")
    run_fallback(aten.add.out, (hlo(1.0, 2.0), hlo(3.0, 4.0)), {"out": empty})
    assert empty.tolist() == [4, 6]


@pytest.mark.filterwarnings("ignore")
def test_lists():
    xs = [hlo(1.0), hlo(2.0)]
    ys = run_fallback(aten._foreach_add.Scalar, (xs, 1), {})
    assert [y.item() for y in ys] == [2, 3]
    run_fallback(aten._foreach_mul_.Scalar, (xs, 3), {})
    assert [x.item() for x in xs] == [3, 6]


@pytest.mark.filterwarnings("ignore")
def test_tuples_and_plain_results():
    values, indices = run_fallback(aten.sort.default, (hlo(3.0, 1.0, 2.0),), {})
    assert values.tolist() == [1, 2, 3] and indices.tolist() == [1, 2, 0]
    assert run_fallback(aten.is_nonzero.default, (hlo(1.0),), {}) is True


@pytest.mark.filterwarnings("ignore")
def test_the_same_tensor_twice_is_one_copy():
    x = hlo(1.0, 2.0)
    run_fallback(aten.add_.Tensor, (x, x), {})
    assert x.tolist() == [2, 4]


@pytest.mark.filterwarnings("ignore")
def test_device_arguments_become_the_cpu():
    y = run_fallback(aten.zeros.default, ([2],), {"device": torch.device("hlo")})
    assert y.device.type == "hlo" and y.tolist() == [0, 0]


def test_one_warning_per_op_with_the_reason():
    with pytest.warns(
        RuntimeWarning,
        match=r"aten.sin.default \(f32\[1\]\) runs on the CPU: torch_hlo has no lowering",
    ):
        run_fallback(aten.sin.default, (hlo(1.0),), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_fallback(aten.sin.default, (hlo(1.0),), {})
    assert metrics.counter_value("aten::sin") == 2
    assert metrics.executed_fallback_ops() == ["aten::sin"]


def test_silent():
    with config.override(FALLBACK="allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run_fallback(aten.cos.default, (hlo(1.0),), {})
    assert metrics.counter_value("aten::cos") == 1


def test_error_mode_names_op_shapes_and_what_to_do():
    with config.override(FALLBACK="error"), pytest.raises(NotImplementedError) as error:
        run_fallback(aten.add.Tensor, (hlo(1.0, 2.0), 3), {"alpha": 2})
    text = str(error.value)
    assert "aten.add.Tensor (f32[2], 3, alpha=2)" in text and "TORCH_HLO_FALLBACK=warn" in text
    assert metrics.counter_value("aten::add") is None


def test_unknown_mode():
    with (
        config.override(FALLBACK="maybe"),
        pytest.raises(ValueError, match="warn, allow, error"),
    ):
        run_fallback(aten.sin.default, (hlo(1.0),), {})


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_counts_of_known_classes_stay_on_the_device(weights, dtype):
    x = torch.randint(100, (20_000,), dtype=dtype)
    w = None if weights is None else torch.rand(20_000, dtype=weights)
    mine = None if w is None else w.to("hlo")
    for least in (100, 3, 0):
        expected, found = (
            torch.bincount(x, w, least),
            torch.bincount(x.to("hlo"), mine, least),
        )
        assert found.device.type == "hlo" and found.dtype == expected.dtype
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.bincount(x.to("hlo") - 1, minlength=200)


def test_a_library_has_a_kernel_for_private_devices():
    """It is called, on tensors of this device; the CPU has none."""
    library = torch.library.Library("hlo_test_own", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "PrivateUse1")
    x = torch.arange(3.0).to("hlo")
    assert torch.ops.hlo_test_own.twice(x).tolist() == [0, 2, 4]
