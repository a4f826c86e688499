"""Linear algebra on the device against PyTorch's CPU."""

import re

import pytest
import torch

import torch_hlo  # noqa: F401 - registers the device
from torch_hlo import metrics
from torch_hlo.compiler.codegen import registry
from torch_hlo.compiler.linalg.lapack import SYMBOLS
from torch_hlo.compiler.linalg.linalg import linalg
from torch_hlo.debug import hlo_text
from torch_hlo.device.cpu import symbols
from torch_hlo.hlo.text.parser import parse_module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_matrix_exp(dtype, scale):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 5, dtype=dtype) * scale
    exact = torch.matrix_exp(x.to(torch.complex128 if dtype.is_complex else torch.float64))
    error = (torch.matrix_exp(x.to("hlo")).cpu() - exact).abs().max() / exact.abs().max()
    assert error < (1e-12 if dtype == torch.float64 else 1e-5)


def test_matrix_exp_of_infinite_values_ends():
    x = torch.tensor([[float("inf"), 1.0], [1.0, 1.0]], device="hlo")
    assert not torch.matrix_exp(x).cpu().isfinite().any()


@pytest.mark.parametrize("beta", [0, 0.0, 0.3])
def test_a_bias_times_zero_plays_no_part(beta):
    """Not even where it is nan, and the zero is known when the program runs."""
    for op, sizes in (
        (torch.addmm, ((2, 2), (2, 3), (3, 2))),
        (torch.addr, ((2, 3), (2,), (3,))),
        (torch.addmv, ((2,), (2, 3), (3,))),
    ):
        values = [torch.randn(size) for size in sizes]
        if not beta:
            values[0][...] = float("nan")
        want = op(*values, beta=beta, alpha=0.5)
        got = op(*[v.to("hlo") for v in values], beta=beta, alpha=0.5)
        torch.testing.assert_close(got.cpu(), want)


def test_logcumsumexp_is_accurate_enough_for_its_gradient():
    torch.manual_seed(0)
    x = torch.randn(5, 40) * 5
    results = []
    for device in ("cpu", "hlo"):
        y = x.to(device).requires_grad_()
        results.append(
            torch.autograd.grad(
                (torch.logcumsumexp(y, 1) * torch.linspace(-1, 2, 40, device=device)).sum(),
                y,
            )[0].cpu()
        )
    torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("transposed", [False, True])
def test_solve_and_its_gradient(dtype, transposed):
    torch.manual_seed(0)
    a, b = (
        torch.randn(3, 4, 4, dtype=dtype) + 4 * torch.eye(4),
        torch.randn(3, 4, 2, dtype=dtype),
    )
    results = []
    for device in ("cpu", "hlo"):
        x, y = a.to(device).requires_grad_(), b.to(device).requires_grad_()
        solution = torch.linalg.solve(x.mT if transposed else x, y)
        results.append(
            [
                t.cpu()
                for t in (
                    solution.detach(),
                    *torch.autograd.grad(solution.abs().sum(), [x, y]),
                )
            ]
        )
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_qr_and_its_gradient_of_a_tall_matrix():
    torch.manual_seed(0)
    results = []
    x = torch.randn(5, 2)
    for device in ("cpu", "hlo"):
        y = x.to(device).requires_grad_()
        q, r = torch.linalg.qr(y)
        weights = torch.linspace(0.5, 1.5, 10, device=device).reshape(5, 2)
        results.append(
            torch.autograd.grad((q * weights).sum() + (r * weights[:2]).sum(), y)[0].cpu()
        )
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "fn", [torch.linalg.det, torch.logdet, lambda x: torch.linalg.slogdet(x)[1]]
)
def test_determinant_of_a_transposed_matrix(fn):
    """Column by column, as torch.linalg.qr gives matrices: no fallback, and autograd solves with
    the right factors."""
    torch.manual_seed(0)
    metrics.clear_counters()
    for x in (
        torch.linalg.qr(torch.randn(6, 6))[0],
        torch.randn(3, 5, 5).mT,
        torch.eye(4).flip(0).t(),
    ):
        a, b = x.clone().requires_grad_(), x.to("hlo").requires_grad_()
        expected, got = fn(a), fn(b)
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        for g, e in zip(
            torch.autograd.grad(got.nan_to_num().sum(), b),
            torch.autograd.grad(expected.nan_to_num().sum(), a),
        ):
            torch.testing.assert_close(g.cpu(), e, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert not metrics.executed_fallback_ops()


@pytest.mark.parametrize(
    "fn",
    [
        torch.linalg.det,
        lambda x: torch.linalg.slogdet(x)[1],
        lambda x: torch.linalg.lu(x)[2],
        torch.linalg.inv,
    ],
)
def test_complex_factorizations(fn):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 4, dtype=torch.complex64)
    results = []
    for device in ("cpu", "hlo"):
        y = x.to(device).requires_grad_()
        value = fn(y)
        results.append((value.detach().cpu(), torch.autograd.grad(value.abs().sum(), y)[0].cpu()))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_gradients_of_a_complex_linear_layer_are_conjugated():
    torch.manual_seed(0)
    x, w = (
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(4, 3, dtype=torch.complex64),
    )
    results = []
    for device in ("cpu", "hlo"):
        leaves = [t.to(device).requires_grad_() for t in (x, w)]
        results.append(
            [
                g.cpu()
                for g in torch.autograd.grad(
                    torch.nn.functional.linear(*leaves).abs().sum(), leaves
                )
            ]
        )
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(
    "dtype, wanted",
    [
        (torch.complex64, torch.float32),
        (torch.float32, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_softmax_converts_first(dtype, wanted):
    x = torch.arange(6).reshape(2, 3).to(dtype)
    for fn in (torch.softmax, torch.log_softmax):
        with torch.inference_mode():
            torch.testing.assert_close(
                fn(x.to("hlo"), 1, dtype=wanted).cpu(), fn(x, 1, dtype=wanted)
            )


@pytest.mark.parametrize("shape", [(3, 7, 7), (2, 37, 37), (70, 40), (40, 70)])
def test_lu_in_blocks(shape):
    """The same pivots as LAPACK's across blocks, for any number of rows and columns."""
    torch.manual_seed(0)
    a = torch.randn(shape, dtype=torch.float64)
    packed, pivots, info = torch.linalg.lu_factor_ex(a)
    found = [x.cpu() for x in torch.linalg.lu_factor_ex(a.to("hlo"))]
    torch.testing.assert_close(found[0], packed)
    assert found[1].equal(pivots) and found[2].equal(info)


def test_lu_of_singular_matrices():
    a = torch.randn(20, 20)
    a[:, 3] = 0
    packed, _, info = torch.linalg.lu_factor_ex(torch.stack([a, torch.zeros(20, 20)]).to("hlo"))
    assert info.tolist() == [4, 1] and packed.isfinite().all()


FACTORS = {
    "eigh": lambda a: torch.linalg.eigh(a + a.mT),
    "eigh of the upper triangle": lambda a: torch.linalg.eigh(a, "U"),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mT),
    "svd": lambda a: torch.linalg.svd(a[..., :5]),
    "thin svd": lambda a: torch.linalg.svd(a[..., :5, :], full_matrices=False),
    "svdvals": lambda a: torch.linalg.svdvals(a),
    "eig": lambda a: torch.linalg.eig(a),
    "eigvals": lambda a: torch.linalg.eigvals(a),
}


def up_to_phase(vectors: torch.Tensor) -> torch.Tensor:
    """Columns turned so that their largest element is positive: LAPACK leaves the phase of an
    eigenvector open, and its kernels for other processors choose another."""
    if not vectors.numel():
        return vectors
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * (largest.conj() / largest.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 7, 7), (20, 20), (0, 6, 6)])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_by_lapack_are_those_of_pytorch_without_calling_it(name, shape, dtype, monkeypatch):
    """Machine code calls LAPACK's symbols itself."""
    if shape[0] and symbols.has(SYMBOLS):
        monkeypatch.setitem(
            registry.HOST_CALLS,
            "torch_op",
            lambda *_, **__: pytest.fail("called PyTorch"),
        )
    torch.manual_seed(0)
    a = torch.randn(*shape, dtype=dtype)
    want, got = (FACTORS[name](a.to(device)) for device in ("cpu", "hlo"))
    if name == "eig":
        want, got = ((x[0].cpu(), up_to_phase(x[1].cpu())) for x in (want, got))
    for w, g in (
        zip([want], [got], strict=True)
        if isinstance(want, torch.Tensor)
        else zip(want, got, strict=True)
    ):
        torch.testing.assert_close(
            g.cpu(),
            w,
            rtol=2e-5 if dtype == torch.float32 else 1e-12,
            atol=2e-5 if dtype == torch.float32 else 1e-12,
        )


@pytest.mark.parametrize(
    "fn",
    [torch.linalg.eigvalsh, torch.linalg.svdvals, lambda x: torch.linalg.eig(x)[0]],
)
def test_a_failure_of_lapack_is_pytorchs_error(fn):
    bad = torch.full((4, 4), float("nan"))
    with pytest.raises(RuntimeError) as eager:
        fn(bad)
    result = fn(bad.to("hlo"))
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value)[:40])):
        result.cpu()
    result.zero_()  # else it is still to be computed


def test_factors_without_lapacks_symbols(monkeypatch):
    monkeypatch.setattr(symbols, "has", lambda names: False)
    a = torch.arange(36.0).reshape(6, 6).sin()
    torch.testing.assert_close(
        torch.linalg.eigvalsh(a.to("hlo")).cpu(),
        torch.linalg.eigvalsh(a),
        rtol=1e-5,
        atol=1e-5,
    )


def test_vectors_that_nobody_reads_are_not_computed():
    x = torch.randn(6, 6).to("hlo").requires_grad_()  # PyTorch asks for the vectors
    values = torch.linalg.eigvalsh(x @ x.mT)
    assert '"used": [0]' in str(linalg(parse_module(hlo_text([values.detach()])))).replace("\\", "")
