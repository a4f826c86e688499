"""torch_hlo.debug.compare: the first operation that is less precise than it should be is named."""

import inspect
from dataclasses import replace as rep
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_hlo
from torch_hlo import config, debug
from torch_hlo.compiler import pipeline
from torch_hlo.compiler.hlo_pass import hlo_pass
from torch_hlo.compiler.llvm import CpuTarget
from torch_hlo.hlo.ir import Computation, replace
from torch_hlo.hlo.ir.build import full_like, multiply, subtract
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run import drift
from torch_hlo.lowering.core.registry import LOWERINGS


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))  # here
        return self.second(hidden).log_softmax(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


def line(cls, text):
    lines, first = inspect.getsourcelines(cls)
    at = next(i for i, x in enumerate(lines) if text in x)
    return f"{inspect.getsourcefile(cls)}:{first + at}"


@pytest.fixture
def broken():
    """Makes the lowering of an operation wrong by a factor."""
    with config.override(CACHE=""), mock.patch.dict(LOWERINGS):

        def wrong(op, factor):
            right = LOWERINGS[op]

            def lowering(*args, **kwargs):
                y = right(*args, **kwargs)
                return multiply(y, full_like(y, factor))

            LOWERINGS[op] = lowering
            session.engine().clear_cache()

        yield wrong
    session.engine().clear_cache()


@pytest.mark.parametrize("device", ["cpu", "hlo"])
def test_a_right_model(device):
    torch.manual_seed(0)
    found = debug.compare(Network().to(device), torch.randn(5, 8, device=device))
    assert found, found
    ops = {x.op for x in found.alone.results}
    assert {"linear", "tanh", "tanh_backward", "linear_backward"} <= ops
    assert not found.alone.left and "none drifts" in str(found)
    assert max(x.torch for x in found.alone.results) > 0 and found.together.results


def test_attention_and_random_numbers():
    torch.manual_seed(0)
    found = debug.compare(Attention(), torch.randn(2, 6, 16, requires_grad=True))
    assert found, found
    assert found.alone.left == {"native_dropout"}
    compared = {x.op for x in found.alone.results}
    assert "_scaled_dot_product_fused_attention_overrideable_backward" in compared


@pytest.mark.parametrize("device", ["cpu", "hlo"])
def test_a_wrong_kernel(broken, device):
    broken(torch.ops.aten.tanh.default, 1 + 1e-5)
    torch.manual_seed(0)
    model = Network().to(device)
    found = debug.compare(model, torch.randn(5, 8))
    assert not found
    assert (found.first.op, found.first.line) == ("tanh", line(Network, "# here"))
    assert found.first.ours == pytest.approx(1e-5, rel=0.1)
    assert found.first.torch < 1e-6
    text = str(found)
    assert text.startswith("tanh drifts by itself, at") and "f32[5,16] -> f32[5,16]" in text
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_gradient(broken):
    broken(torch.ops.aten.tanh_backward.default, 0.9)
    torch.manual_seed(0)
    found = debug.compare(Network(), torch.randn(5, 8))
    assert found.first.op == "tanh_backward" and line(Network, "# here") in found.first.line
    assert debug.compare(Network(), torch.randn(5, 8), backward=False)


def test_only_what_is_left_as_it_was_is_not_compared(broken):
    broken(torch.ops.aten.tanh.default, 1 + 1e-5)
    with mock.patch.object(drift.nan_checks, "name", lambda node: "nonempty"):
        assert debug.compare(torch.tanh, torch.randn(5)).first.op == "nonempty"
    assert debug.compare(lambda x: (x.new_empty(3), torch.empty_like(x)), torch.randn(5))


def test_whole_numbers_and_what_is_not_finite(broken):
    def function(x):
        return (x > 0).sum(), x.log(), x.sort()[0], x.argmax()

    x = torch.tensor([-1.0, 0.0, 2.0, 2.0])
    assert debug.compare(function, x)
    broken(torch.ops.aten.log.default, 0.0)  # 0 * inf
    assert debug.compare(function, x).first.op == "log"


def test_a_sum_that_cancels_is_allowed_what_its_operands_are():
    torch.manual_seed(0)
    x = torch.randn(10000) * 1e4
    found = debug.compare(torch.sum, torch.cat([x, -x])[torch.randperm(20000)])
    assert found and found.alone.results[0].ours > 1e-3


def test_random_numbers_go_on_as_if_nothing_was_compared():
    state = torch.hlo.get_rng_state()
    debug.compare(nn.Dropout(0.5), torch.ones(8))
    assert torch.equal(state, torch.hlo.get_rng_state())


def test_a_fault_that_only_the_whole_program_has():
    """A pass that is wrong where several operations meet."""
    from torch_hlo.lazy.run import drift

    right = drift._device

    def wrong(value):
        x = right(value)
        node = getattr(value, "node", None)
        fused = node is not None and node.args and getattr(node.args[0], "array", 0) is None
        return x * 1.01 if fused and x is not None else x

    with mock.patch.object(drift, "_device", wrong):
        found = debug.compare(lambda x: (x + 1).exp(), torch.randn(8), backward=False)
    assert found.alone.first is None and found.together.first.op == "exp"
    assert "not by itself" in str(found)


def turns(x, carry):
    def body(carry, x):
        carry = torch.tanh(carry + x)  # turn
        return carry, carry * 2

    return torch_hlo.scan(body, carry, x)


def branch(x, carry):
    return torch_hlo.cond(x.sum() > 0, lambda x: torch.tanh(x) * 3, lambda x: x, (x,))  # turn


@pytest.mark.parametrize("function", [turns, branch])
def test_loops_and_branches(broken, function):
    given = torch.ones(3, 4), torch.zeros(4)
    right = debug.compare(function, *given)
    assert right and not right.alone.left, right
    broken(torch.ops.aten.tanh.default, 1.01)
    found = debug.compare(function, *given)
    assert found.first.op == "tanh" and found.first.line == line(function, "# turn")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks(kind):
    torch.manual_seed(0)
    found = debug.compare(kind(4, 6, 2, bidirectional=True), torch.randn(5, 2, 4))
    assert found and not found.alone.left, found
    assert {"torch_hlo.recurrent", "torch_hlo.recurrent_backward"} <= {
        x.op for x in found.alone.results
    }


def test_what_the_cpu_has_no_kernel_for():
    found = debug.compare(nn.LayerNorm(16).bfloat16(), torch.randn(3, 16).bfloat16())
    assert found and not found.alone.left, found


def test_the_operation_in_the_middle_of_a_wrong_program_is_named(monkeypatch):
    """A pass that takes out `maximum` behind `multiply`."""

    @hlo_pass
    def wrong(module):
        new = {}
        for x in module.entry.instructions():
            ops = tuple(new.get(o, o) for o in x.operands)
            first = next((o for o in ops if o.op == "multiply"), None)
            new[x] = first if x.op == "maximum" and first else replace(x, ops)
        c = module.entry
        done = all(a is b for a, b in new.items())
        return module if done else rep(module, entry=Computation(c.name, c.params, new[c.root]))

    def cpu(target):
        p = pipeline.cpu_pipeline(target)
        return pipeline.Pipeline((*p.rewrites, wrong), p.fusions, p.schedule, p.memory)

    monkeypatch.setitem(pipeline._PIPELINES, CpuTarget, cpu)
    session.engine().clear_cache()
    with config.override(CACHE=""):
        found = debug.compare(lambda x: F.relu(x * 3) + 1, torch.linspace(-1, 1, 9))
    session.engine().clear_cache()
    assert found.alone.first is None and found.together.first.op == "relu"


def test_an_elementwise_kernel_that_is_wrong_for_small_numbers(broken):
    """Relative to the largest number of the result nothing is wrong."""
    x = torch.cat([torch.randn(20) * 1e-5, torch.randn(5)])
    assert debug.compare(torch.expm1, x)
    broken(torch.ops.aten.exp.default, 1.0)
    LOWERINGS[torch.ops.aten.expm1.default] = lambda x: subtract(
        LOWERINGS[torch.ops.aten.exp.default](x), full_like(x, 1)
    )
    found = debug.compare(torch.expm1, x).first
    assert found.op == "expm1" and found.ours > 1e-3 and found.torch < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elementwise_functions_that_lose_digits_everywhere(dtype):
    """What cancels in PyTorch's kernels, and numbers that are nearly 0, may differ."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(80), torch.randn(40) * 1e-4, torch.linspace(-90, 90, 40)])
    for fn in (torch.sin, F.mish, F.tanhshrink, F.softplus, torch.lgamma, torch.frac, torch.exp):
        assert (found := debug.compare(fn, x.to(dtype))), found
    for how in ("none", "tanh"):
        found = debug.compare(lambda x: F.gelu(x, approximate=how), x.to(dtype).requires_grad_())
        assert found, found
