"""Python's operators on tensors take a shorter way while nobody else takes part in them; what is
recorded is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_hlo
from test.marks import needs
from torch_hlo.lazy.record import session, tensor
from torch_hlo.lazy.record.tensor import HloTensor
from torch_hlo.lowering.core.tape import TAPE
from torch_hlo.pytorch import quick_operators

pytestmark = needs("operators")
VALUES = [
    torch.tensor([[0.5, 1.5, 2.5]]),
    torch.tensor([[2.0], [3.0]], dtype=torch.float64),
    torch.tensor([3, 1]),
    torch.tensor(2.0),
    torch.tensor([True, False]),
    torch.tensor([0.5 + 2j, 1j]),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
]
NUMBERS = [2, 2.5, True, -0.0]


@pytest.fixture
def ways(monkeypatch):
    """What arrives: (op, whether it came through PyTorch's dispatcher)."""
    seen = []

    def handle(op, types, args=(), kwargs=None):
        seen.append((op, bool(types)))
        return before(op, types, args, kwargs)

    before = tensor.handle
    session.engine().clear_cache()  # no number is known to vary
    tensor.install(handle)
    yield seen
    tensor.install(before)


def outcome(function, *args):
    """The words that a call puts on an empty tape, and its result or error."""
    torch_hlo.sync()
    TAPE.restart()
    try:
        result = function(*args)
    except (RuntimeError, TypeError) as error:
        return type(error), str(error).splitlines()[0]
    words = list(TAPE.words)
    return words, result._meta, result.cpu().tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", quick_operators._BINARY)
def test_binary(name: str, ways) -> None:
    for a in VALUES:
        for b in [*VALUES, *NUMBERS]:
            x = a.to("hlo")
            y = b.to("hlo") if isinstance(b, torch.Tensor) else b
            ways.clear()
            short = outcome(getattr(HloTensor, name), x, y)
            assert not ways or not ways[0][1]
            assert str(short) == str(outcome(getattr(torch.Tensor, name), x, y))
    assert getattr(x, name)("text") is NotImplemented


@torch.no_grad()
@pytest.mark.parametrize("name", quick_operators._UNARY)
def test_unary(name: str, ways) -> None:
    for a in VALUES:
        x = a.to("hlo")
        ways.clear()
        short = outcome(getattr(HloTensor, name), x)
        assert not ways or not ways[0][1]
        assert str(short) == str(outcome(getattr(torch.Tensor, name), x))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = func
        return func(*args, **(kwargs or {}))


def test_others_see_operators(ways) -> None:
    x = torch.ones(3).to("hlo")

    def through() -> list[bool]:
        ways.clear()
        x * x, -x
        return [way for _, way in ways]

    with torch.no_grad():
        assert through() == [False] * 2
        for observer in (
            torch.enable_grad(),
            torch.autocast("hlo"),
            Functions(),
            Dispatches(),
            torch.profiler.profile(),
            torch.autograd.forward_ad.dual_level(),
        ):
            with observer:
                assert all(through()), observer
        with torch.autocast("hlo", torch.bfloat16):
            assert x.bfloat16().exp().dtype is torch.float32  # as torch.exp
    with torch.inference_mode():
        assert through() == [False] * 2 and (x * x).is_inference()
    w = torch.ones(3).to("hlo").requires_grad_()
    (w * 3.0 - w).sum().backward()
    assert w.grad.tolist() == [2.0] * 3
    traced = torch.jit.trace(lambda a: a * a + 1.0, torch.ones(2), check_trace=False)
    assert traced(torch.tensor([3.0, 2.0]).to("hlo")).tolist() == [10.0, 5.0]


@torch.no_grad()
def test_in_transforms() -> None:
    x, y = torch.randn(4, 3), torch.randn(3)
    f = lambda a, b: torch.vmap(lambda row: (row * b + b * b).tanh() / 2.0)(a)
    torch.testing.assert_close(f(x.to("hlo"), y.to("hlo")).cpu(), f(x, y))
    g = lambda a, b: torch.func.jvp(lambda t: t * b * 2.0, (a,), (b,))[1]
    torch.testing.assert_close(g(y.to("hlo"), y.to("hlo")).cpu(), g(y, y))


def test_results_that_nobody_gets() -> None:
    """Composites that are one op with several results make a tensor of the first alone, where
    autograd does not want the others."""
    if "__tensor_flatten__" in HloTensor.__dict__:
        pytest.skip(
            "torch.compile has been used in this process: every op looks at its arguments first"
        )
    x, w = torch.randn(1, 2, 4, 8).to("hlo"), torch.randn(8).to("hlo")
    for function in (
        lambda: F.rms_norm(x, (8,), w),
        lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    ):
        with torch.no_grad():
            torch_hlo.sync()
            before = len(session.current().pending)
            short = function()
            assert len(session.current().pending) == before + 1
            with Dispatches():
                long = function()
        assert len(session.current().pending) > before + 2
        assert short.cpu().equal(long.cpu())


def test_reductions_of_no_dimensions(recorded):
    """They are all dimensions, but for any and all: none."""
    x = torch.tensor([[0.0, 2.0], [float("nan"), 3.0]])
    for reduce in (torch.sum, torch.nansum, torch.nanmean, torch.amax, torch.any, torch.all):
        for keepdim in (False, True):
            expected = reduce(x, dim=[], keepdim=keepdim)
            got = reduce(x.to("hlo"), dim=[], keepdim=keepdim)
            torch.testing.assert_close(got.cpu(), expected, equal_nan=True)


def test_a_reshape_that_loses_elements_is_not_built():
    from torch_hlo.hlo.ir import Shape, ShapeError, instr
    from torch_hlo.lowering.core import reshape

    x = instr("parameter", (), Shape("f32", (2, 3)), index=0)
    with pytest.raises(ShapeError, match="counts differ"):
        reshape(x, (2, 2))


def test_ends_of_a_range_elsewhere(recorded):
    start, end = (torch.tensor(x).to("hlo") for x in (1.0, -3.0))
    assert torch.linspace(start, end, 3, device="cpu").tolist() == [1, -1, -3]
    assert torch.zeros_like(start, device="cpu").item() == 0


def test_an_integer_that_varies_does_not_choose_the_program():
    """What a lowering asks of a number that the program takes is an error: it was not equal."""
    from torch_hlo.hlo.ir import Shape, instr
    from torch_hlo.lowering.core import Weak

    with pytest.raises(TypeError, match="is_number"):
        assert Weak(instr("parameter", (), Shape("s64"), index=0)) == 1
    x, target = torch.linspace(-1, 1, 12).view(3, 4), torch.tensor([1, 3, 0])
    for p in (1, 2, 1, 2):
        grads = []
        for device in ("cpu", "hlo"):
            leaf = x.detach().to(device).requires_grad_()
            F.multi_margin_loss(leaf, target.to(device), p=p).backward()
            grads.append(leaf.grad.cpu())
        torch.testing.assert_close(grads[1], grads[0])
