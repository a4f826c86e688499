"""Conditions on values: errors that PyTorch raises, at the call or when the value has been
computed, without steps that are cut for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, Distribution, MultivariateNormal, Normal

import torch_hlo
from torch_hlo import config, metrics
from torch_hlo.lazy.record import conditions


@pytest.fixture(autouse=True)
def _validated():
    """Arguments of distributions are validated: Dynamo turns that off for a process that
    compiles."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    with config.override(CPU_NUMBERS=True):
        yield
    Distribution.set_default_validate_args(before)


def steps() -> int:
    """How many graphs have been cut."""
    return (metrics.metric_data("TensorsGraphSize") or [0])[0]


def computed(*values: float) -> torch.Tensor:
    """A tensor whose values only the device knows."""
    x = torch.tensor(values).to("hlo") * 1
    torch_hlo.sync()
    return x


def test_numbers_come_from_a_program_where_that_is_asked_for():
    x = torch.tensor([1.0, 2.0]).to("hlo")
    before = steps()
    assert (x + 1).sum().item() == 5 and steps() == before
    with config.override(CPU_NUMBERS=False):
        assert (x + 1).sum().item() == 5 and steps() == before + 1
        assert torch.tensor(3.0).to("hlo").item() == 3 and steps() == before + 1


def test_arguments_from_the_cpu_are_judged_at_the_call():
    x = torch.tensor([1.0, -2.0]).to("hlo")
    with pytest.raises(ValueError, match="parameter scale of distribution Normal .*GreaterThan"):
        Normal(x, x * 2)
    with pytest.raises(ValueError, match="within the support .* of the distribution Categorical"):
        Categorical(logits=torch.zeros(2, 3).to("hlo")).log_prob(torch.tensor([1, 3]).to("hlo"))


def test_computed_arguments_are_judged_with_their_step():
    d = Normal(computed(0.0, 1.0), computed(1.0, -1.0))
    with pytest.raises(ValueError, match="parameter scale of distribution Normal"):
        d.mean.sum().item()
    torch_hlo.sync()  # told once
    assert d.mean.tolist() == [0.0, 1.0]


def test_assertions_are_judged_with_their_step():
    torch._assert_async(computed(1.0).sum(), "never")
    torch._assert_async(computed(0.0).sum(), "a sum is zero")
    with pytest.raises(RuntimeError, match="a sum is zero"):
        torch_hlo.sync()


def test_the_first_of_several_errors_keeps_the_others():
    x = computed(0.0)
    for text in ("first", "second", "third"):
        torch._assert_async(x.sum(), text)
    for text in ("first", "second", "third"):
        with pytest.raises(RuntimeError, match=text):
            torch_hlo.sync()


WEIGHTS = {
    "negative": [[1.0, 2.0], [-1.0, 2.0]],
    "zero": [[1.0, 2.0], [0.0, 0.0]],
    "infinite": [[torch.inf, 1.0]],
    "nan": [[torch.nan, 1.0]],
}


@pytest.mark.parametrize("samples, replacement", [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_draws_are_judged(name, samples, replacement):
    weights = torch.tensor(WEIGHTS[name])
    with pytest.raises(RuntimeError) as expected:
        torch.multinomial(weights, samples, replacement)
    with pytest.raises(RuntimeError) as at_the_call:
        torch.multinomial(weights.to("hlo"), samples, replacement)
    assert str(at_the_call.value) == str(expected.value)
    weights = weights.to("hlo") * 1
    torch_hlo.sync()
    drawn = torch.multinomial(weights, samples, replacement)
    with pytest.raises(RuntimeError) as later:
        drawn.cpu()
        torch_hlo.sync()
    assert str(later.value) == str(expected.value)


JUDGED = {
    "bernoulli": (lambda x: torch.bernoulli(x), [0.5, 1.5], "p_in"),
    "bernoulli of nan": (lambda x: torch.bernoulli(x), [0.5, torch.nan], "p_in"),
    "bernoulli_": (lambda x: torch.ones_like(x).bernoulli_(x), [0.5, -0.5], "p_in"),
    "normal": (lambda x: torch.normal(x.abs(), x), [0.5, -1.0], "all elements of std"),
    "normal of one mean": (lambda x: torch.normal(0.0, x), [0.5, -1.0], "all elements of std"),
    "poisson": (lambda x: torch.poisson(x), [0.5, -1.0], "invalid Poisson rate"),
    "bce": (lambda x: F.binary_cross_entropy(x, x.abs()), [-0.5, 1.0], "between 0 and 1"),
    "histc": (lambda x: torch.histc(x, 3), [1.0, torch.inf], r"range of \[1, inf\] is not finite"),
    "histc of 100": (torch.histc, [1.0, torch.inf], r"range of \[1, inf\] is not finite"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JUDGED)
def test_values_that_pytorch_judges(name):
    function, values, words = JUDGED[name]
    seen = [torch.tensor(values), torch.tensor(values).to("hlo")]
    for x in seen if name == "bce" else [*seen, computed(*values)]:
        with pytest.raises(RuntimeError, match=words):
            function(x).cpu()
            torch_hlo.sync()
        right = x.nan_to_num(0.5, 0.5).abs().clamp(max=1)
        function(right).cpu()
        torch_hlo.sync()


@pytest.mark.parametrize("divisor", [0, [1, 0], [True, False], [2, 1]])
@pytest.mark.parametrize(
    "divide",
    [
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: x.floor_divide_(y),
    ],
)
def test_integers_are_not_divided_by_zero(divide, divisor):
    def outcome(device):
        y = torch.tensor(divisor).to(device) if type(divisor) is list else divisor
        try:
            return divide(torch.tensor([6, 7]).to(device), y).tolist()
        except RuntimeError as error:
            return str(error)

    assert outcome("hlo") == outcome("cpu")
    assert divide(torch.tensor([6]).to("hlo"), computed(0.0).long()).shape == (1,)  # not seen


def test_weights_that_can_be_drawn_from():
    for weights in (computed(0.0, 1.0), computed(0.0, 1.0).half()):
        assert torch.multinomial(weights, 3, replacement=True).tolist() == [1, 1, 1]
        assert torch.multinomial(weights, 1).tolist() == [1]
    assert torch.multinomial(torch.zeros(0, 2, device="hlo"), 1).shape == (0, 1)


def test_distributions_do_not_cut_the_graph():
    mean, scale, x = computed(0.0, 1.0), computed(1.0, 2.0), computed(0.5, 0.25)
    before = steps()
    a = Normal(mean, scale).log_prob(x)
    b = MultivariateNormal(mean, torch.eye(2, device="hlo")).log_prob(x)
    assert steps() == before
    torch.testing.assert_close(a.cpu(), Normal(mean.cpu(), scale.cpu()).log_prob(x.cpu()))
    torch.testing.assert_close(
        b.cpu(), MultivariateNormal(mean.cpu(), torch.eye(2)).log_prob(x.cpu())
    )


def test_a_captured_step_with_distributions_replays():
    w = torch.nn.Parameter(computed(0.1, 0.2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    @torch_hlo.compile
    def step(x):
        optimizer.zero_grad()
        loss = -Normal(w, w.exp()).log_prob(x).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.tensor([1.0, 2.0]).to("hlo")
    losses = [step(x).item() for _ in range(6)]
    assert losses == sorted(losses, reverse=True)


def test_all_true_is_a_tensor_for_everybody_else():
    assert torch._is_all_true(computed(1.0).bool()).device.type == "hlo"
    assert not torch._is_all_true(computed(1.0, 0.0).bool())


def test_numbers_of_constants_do_not_cut_the_graph():
    pending = computed(1.0, 2.0) + 1
    before = steps()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6, device="hlo")
    assert bool((mask == torch.full((6, 6), float("-inf"), device="hlo").triu(1)).all())
    labels = torch.tensor([3, 1, 2]).to("hlo")
    assert (labels + 1)[0].item() == 4 and int(labels.max()) == 3
    assert steps() == before
    assert pending.tolist() == [2.0, 3.0]


def test_a_captured_transformer_replays():
    model = torch.nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def step(a, b):
        mask = model.generate_square_subsequent_mask(3, device=a.device)
        return model(a, b, tgt_mask=mask).detach()

    want = step(torch.ones(2, 4, 8), torch.ones(2, 3, 8))
    model.to("hlo")
    captured = torch_hlo.compile(step)
    for _ in range(4):
        found = captured(torch.ones(2, 4, 8).to("hlo"), torch.ones(2, 3, 8).to("hlo"))
        torch.testing.assert_close(found.cpu(), want)


def test_a_captured_function_computes_with_numbers():
    @torch_hlo.compile(full_graph=True)
    def step(x):
        return x * x.max().item()

    for i in range(1, 6):
        assert step(torch.full((2,), float(i)).to("hlo")).tolist() == [float(i * i)] * 2


def test_long_ways_to_a_number_are_the_device_s():
    x = torch.tensor(1.0).to("hlo")
    for _ in range(3000):
        x = x + 1
    before = steps()
    assert x.item() == 3001
    assert steps() > before


def test_ops_without_a_kernel_for_the_cpu_are_the_device_s():
    x = torch.tensor([1.0, 2.0]).to("hlo")
    w = torch.ones(3, 2).to("hlo").requires_grad_()
    torch.nn.functional.linear(x, w).sum().backward()
    assert w.grad.sum().item() == 9


def test_a_loop_that_reads_computes_each_number_once(monkeypatch):
    """Each read starts from what the CPU has computed for the one before."""
    ran = []
    original = conditions.HOST_OPS.get(torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Tensor)

    def mul(*args):
        ran.append(args)
        return original(*args)

    monkeypatch.setitem(conditions.HOST_OPS, torch.ops.aten.mul.Tensor, mul)
    x, turns = torch.tensor(1000.0).to("hlo"), 0
    before = steps()
    while x.item() > 1:
        x, turns = x * 0.9, turns + 1
    assert (turns, len(ran), steps()) == (66, 66, before)
    assert x.cpu().item() == pytest.approx(1000 * 0.9**66, rel=1e-5)


def test_numbers_of_memory_that_others_may_write_to():
    x = torch.tensor([1.0, 2.0]).to("hlo")
    assert (x + 1).sum().item() == 5
    shared = torch.from_dlpack(x)
    shared[0] = 10.0
    assert (x + 1).sum().item() == 14
