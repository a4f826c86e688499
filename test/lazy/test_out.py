"""`out=` arguments, and ops whose C++ kernels write through aliases that schemas do not mention."""

import pytest
import torch

from torch_hlo import metrics
from torch_hlo.lazy.record import checks, tensor


def both(fn):
    """fn("cpu") and fn("hlo"), the latter copied to the CPU."""
    return fn("cpu"), [t.cpu() for t in fn("hlo")]


def assert_same(fn):
    for want, got in zip(*both(fn), strict=True):
        torch.testing.assert_close(got, want)


def test_out_lists_given_by_keyword():
    def run(device):
        x = torch.arange(6.0, device=device).reshape(2, 3)
        outs = [torch.empty(3, device=device) for _ in range(2)]
        torch.unbind_copy(x, 0, out=outs)
        return outs

    assert_same(run)


def test_out_beside_arguments_updated_in_place():
    def run(device):
        x = torch.arange(24.0, device=device).reshape(2, 3, 4)
        mean, variance = torch.zeros(3, device=device), torch.ones(3, device=device)
        outs = [torch.empty(0, device=device) for _ in range(3)]
        result = torch.ops.aten._native_batch_norm_legit.out(
            x,
            None,
            None,
            mean,
            variance,
            True,
            0.1,
            1e-5,
            out=outs[0],
            save_mean=outs[1],
            save_invstd=outs[2],
        )
        assert all(r is o for r, o in zip(result, outs, strict=True))
        return mean, variance, *outs

    assert_same(run)


def test_numbers_of_the_device_fill_a_cpu_tensor():
    out = torch.empty(0)
    torch.linspace(torch.tensor(1.0, device="hlo"), 2.0, 5, out=out)
    torch.testing.assert_close(out, torch.linspace(1.0, 2.0, 5))


def test_kron_writes_through_an_unsafe_view():
    def run(device):
        x, out = (
            torch.arange(6.0, device=device).reshape(2, 3),
            torch.empty(4, 9, device=device),
        )
        torch.kron(x, x, out=out)
        return [out]

    assert_same(run)


def test_unsafe_view_aliases():
    x = torch.zeros(2, 3, device="hlo")
    torch.ops.aten._unsafe_view(x, [6]).fill_(1)
    assert x.cpu().sum() == 6


def test_matrix_rank_out():
    def run(device):
        out = torch.empty(0, dtype=torch.int64, device=device)
        torch.linalg.matrix_rank(torch.eye(3, device=device).expand(2, 3, 3), out=out)
        return [out]

    assert_same(run)


def test_factorizations_stay_in_the_program():
    metrics.clear_all()

    def run(device):
        x = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]], device=device)
        return (
            torch.linalg.eigvalsh(x),
            torch.linalg.svdvals(x),
            torch.linalg.pinv(x),
            torch.linalg.eigvals(x).real.sort()[0],
        )

    assert_same(run)
    assert metrics.counter_value("MarkStep") in (None, 0) and not [
        n for n in metrics.counter_names() if n.startswith("aten::")
    ]


def test_empty_out_shared_or_not():
    """`arange` fills an empty tensor without resizing it; one whose storage others share keeps
    sharing it."""
    alone = torch.empty(0, dtype=torch.int64, device="hlo")
    assert torch.arange(4, out=alone) is alone
    assert alone.tolist() == [0, 1, 2, 3]
    shared = torch.empty(0, dtype=torch.int64, device="hlo")
    other = shared.detach()
    torch.arange(4, out=shared)
    assert shared.untyped_storage() == other.untyped_storage()
    assert shared.tolist() == [0, 1, 2, 3]
    assert other.shape == (0,)


def test_draws_into_numbers_of_another_dtype(recorded):
    out = torch.zeros(3, dtype=torch.int64, device="hlo")
    assert torch.bernoulli(torch.tensor([1.0, 0.0, 1.0]).to("hlo"), out=out) is out
    assert out.tolist() == [1, 0, 1]
    for p, other in ((torch.ones(2).to("hlo"), torch.ones(2)), (torch.ones(2), out)):
        with pytest.raises(RuntimeError, match="on the same device"):
            torch.bernoulli(p, out=other)


@pytest.mark.parametrize("make", [torch.arange, torch.linspace, torch.logspace])
def test_numbers_in_a_row_keep_the_shape_of_out(make):
    count = 4 if make is torch.arange else (0, 3, 4)
    both = []
    for device in ("cpu", "hlo"):
        memory = torch.zeros(2, 6, device=device)
        make(*(count if type(count) is tuple else (count,)), out=memory[:, 1:3])
        both.append(memory.cpu())
    torch.testing.assert_close(both[1], both[0])


def test_exponential_numbers_are_not_zero(monkeypatch):
    """What they are drawn from may be 1, once in 16 million times."""
    from torch_hlo.lowering.core.expr import Expr
    from torch_hlo.lowering.core.promote import full
    from torch_hlo.lowering.random import distributions

    monkeypatch.setattr(
        distributions, "open_uniform", lambda dims, dtype, key: Expr(full(1, dtype, dims))
    )
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert torch.empty(3, 7, dtype=dtype, device="hlo").exponential_().min() > 0


def test_a_tensor_that_cannot_be_made_is_not_made_ahead():
    """A wait makes what the step before asked for."""
    with pytest.raises(RuntimeError, match="overflow"):
        torch.empty_strided((-2, 3), (1, 2), device="hlo")
    tensor.make_ahead(lambda: False)


def test_whole_numbers_below_a_bound_are_not_rounded_to_it():
    drawn = torch.empty(4096, dtype=torch.bfloat16, device="hlo").random_(0, 2000)
    assert drawn.max() < 2000
    assert torch.randperm(256, dtype=torch.uint8, device="hlo").double().sum() == 255 * 128


def test_the_cpu_judges_a_result_among_the_operands_once(monkeypatch):
    """Its kernel computes the whole product."""
    asked = []
    judge = checks.run_on_cpu
    monkeypatch.setattr(checks, "run_on_cpu", lambda *call: (asked.append(call[0]), judge(*call)))

    def run(device):
        x = torch.arange(12.0, device=device).view(3, 4) / 10
        y = torch.ones(3, 3, device=device)
        for _ in range(3):
            torch.addmm(y, x, x.mT, beta=0.5, alpha=0.25, out=y)
        return (y,)

    assert_same(run)
    run("hlo")
    assert len(asked) == 1


def test_complex_numbers_between_0_and_1():
    x = torch.rand(3, 400, dtype=torch.complex64, device="hlo")
    for drawn in (x, torch.rand_like(x), torch.rand(3, 400, out=torch.empty_like(x))):
        parts = torch.view_as_real(drawn).cpu()
        assert parts.min() >= 0 and parts.max() < 1 and 0.45 < parts.mean() < 0.55
