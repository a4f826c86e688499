"""torch_hlo.debug.nan_checks: the operation that made the first NaN is named."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_hlo
from torch_hlo import config, debug
from torch_hlo.lazy.record import session


def line(fn, text):
    """`file:line` of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(fn)
    at = next(i for i, x in enumerate(lines) if text in x)
    return f"{inspect.getsourcefile(fn)}:{first + at}"


def found(fn, *args):
    with pytest.raises(FloatingPointError) as error, debug.nan_checks():
        fn(*args)
    return str(error.value)


def logarithm(x):
    y = x.log()  # here
    z = (y * 2).exp().sum()
    return z.item()


def attention(q):
    scores = q @ q.mT
    scores = scores.masked_fill(scores > -1e9, float("-inf"))
    weights = scores.softmax(-1)  # here
    return weights.sum().item()


def through_infinity(x):
    large = x.exp()  # first
    y = large - large  # here
    return y.sum().item()


def test_forward():
    text = found(logarithm, torch.tensor([1.0, 0.0, -1.0]).to("hlo"))
    assert text.startswith(f"log makes 1 NaN of 3 numbers at {line(logarithm, '# here')}")
    assert "f32[3]: -1 to 1, mean 0, 1 zeros" in text


def test_a_row_that_is_masked_out_altogether():
    text = found(attention, torch.ones(2, 4).to("hlo"))
    assert "softmax makes 4 NaN" in text and line(attention, "# here") in text


def test_infinities():
    def divided(x):
        y = 1 / x  # here
        torch_hlo.mark_step()
        return y

    zeros = torch.zeros(2).to("hlo")
    where = line(divided, "# here")
    assert f"reciprocal makes 2 infinities of 2 numbers at {where}" in found(divided, zeros)
    text = found(torch.compile(lambda x: divided(x), backend="hlo"), zeros.cpu())
    assert "makes infinities" in text and where in text
    with debug.nan_checks(infinities=False):
        assert divided(zeros).isinf().all()


def test_infinities_that_python_has_written():
    def masked(x):
        mask = torch.full((3, 3), float("-inf"), device="hlo").triu(1)
        return (x + mask).softmax(-1).sum().item()

    with debug.nan_checks():
        assert masked(torch.zeros(3, 3).to("hlo")) == pytest.approx(3)


def test_the_infinity_that_a_nan_follows_from():
    text = found(through_infinity, torch.full((2,), 1000.0).to("hlo"))
    assert text.startswith(f"sub makes 2 NaN of 2 numbers at {line(through_infinity, '# here')}")
    assert f"after exp made an infinity at {line(through_infinity, '# first')}" in text


def backward(x):
    loss = x.square().sum().sqrt()  # here
    loss.backward()  # from
    torch_hlo.mark_step()


def test_backward():
    text = found(backward, torch.zeros(4, device="hlo", requires_grad=True))
    here, start = line(backward, "# here"), line(backward, "# from")
    assert f"at {here}, in the backward pass from {start}" in text


def test_optimizer():
    layer = nn.Linear(2, 2).to("hlo")
    optimizer = torch.optim.AdamW(layer.parameters(), fused=False, foreach=False, eps=0.0)

    def step():
        optimizer.zero_grad()
        (layer(torch.ones(1, 2, device="hlo")).sum() * 0).backward()
        optimizer.step()  # here

    text = found(step)
    assert line(step, "# here") in text and "zeros" in text


def test_a_nan_that_was_there_before():
    x = torch.tensor([1.0, float("nan")]).to("hlo")
    text = found(lambda: (x * 2).sum().item())
    assert (
        f"f32[2], which the step reads, was NaN before it; first used by mul at {__file__}" in text
    )


def captured(layer, x):
    h = layer(x)
    return torch.sqrt(h).sum()  # here


def test_captured_steps_that_have_been_launched():
    layer = nn.Linear(2, 1).to("hlo")
    with torch.no_grad():
        layer.weight.fill_(1.0)
    step = torch_hlo.compile(lambda x: captured(layer, x))
    for _ in range(4):
        step(torch.ones(3, 2, device="hlo"))
    text = found(lambda: step(-9 * torch.ones(3, 2, device="hlo")))
    assert f"sqrt makes 3 NaN of 3 numbers at {line(captured, '# here')}" in text
    assert step(torch.ones(3, 2, device="hlo")).isfinite().item()


@pytest.mark.parametrize("train", [False, True])
def test_torch_compile_of_tensors_of_the_cpu(train):
    layer = nn.Linear(2, 1).requires_grad_(train)
    step = torch.compile(lambda x: captured(layer, x), backend="hlo")
    text = found(step, torch.full((3, 2), float("-inf")))
    assert "makes NaN" in text
    with torch.no_grad():
        layer.weight.fill_(1.0)
    text = found(step, -9 * torch.ones(3, 2))
    assert "sqrt" in text and line(captured, "# here") in text


def test_tensors_are_as_they_would_be_without():
    x = torch.ones(3).to("hlo")
    with debug.nan_checks():
        x.mul_(2)
        torch_hlo.mark_step()
        y = F.relu(x - 2)
        x.add_(1)
    assert x.tolist() == [3, 3, 3] and y.tolist() == [0, 0, 0]


def looked_up(x, target):
    rows = F.embedding((x * 10).long(), torch.eye(8, device=x.device))  # here
    return F.cross_entropy(rows, target)


@pytest.mark.parametrize("how", ["recorded", "captured", "compile", "cpu"])
def test_indices_that_the_device_has_computed(how, monkeypatch):
    wrap = {"recorded": lambda f: f, "captured": torch_hlo.compile}
    f = wrap.get(how, lambda f: torch.compile(f, backend="hlo"))(looked_up)
    monkeypatch.setattr(session.current(), "sources", True)
    device = "cpu" if how == "cpu" else "hlo"
    x = torch.full((20000,), 0.5).to(device) * 1.0
    target = torch.full((20000,), 2).to(device) * 1
    with config.override(CHECK_INDEX=True):
        f(x, target.where(target > 2, -100)).item()  # what is ignored may lie outside
        with pytest.raises(IndexError) as error:
            f(x + 0.4, target).item()
    where = line(looked_up, "# here")
    assert "aten.embedding.default: index 9, which" in str(error.value)
    assert f"not in [0, 8) at {where}" in str(error.value)
    if how == "recorded":  # without it the nearest row is read; captured functions keep theirs
        assert f(x + 0.4, target).item() > 0


def differentiated(w, x):
    a = w * 2
    b = (a * x).sqrt()  # here
    return b.sum()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", ["captured", "compile"])
def test_the_line_of_a_gradient_in_a_graph(how, whole):
    torch._dynamo.reset()
    wrap = torch_hlo.compile if how == "captured" else lambda f: torch.compile(f, backend="hlo")

    def step(w, x):
        loss = differentiated(w, x)
        loss.backward()
        return loss.detach()

    f = wrap(step if whole else differentiated)

    def run():
        loss = f(w, x)
        if not whole:
            loss.backward()
        torch_hlo.sync()

    w, x = torch.ones(2, device="hlo").requires_grad_(), torch.ones(2, device="hlo")
    for _ in range(3):
        run()
    with torch.no_grad():
        w.fill_(0), x.fill_(0)
    assert f"{line(differentiated, '# here')}, in the backward pass from" in found(run)


def scaled(scale, spoil=1.0):
    weight = torch.ones(8, 8, device="hlo", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("hlo", init_scale=scale)
    with torch.autocast("hlo", torch.float16):
        y = torch.ones(4, 8, device="hlo") @ weight
        loss = (y.float() * spoil).sqrt().mean()  # here
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    torch_hlo.sync()


def test_gradients_that_the_scaler_finds_too_large_are_its_own():
    with debug.nan_checks():
        scaled(2.0**40)
    assert line(scaled, "# here") in found(scaled, 1.0, -1.0)


def test_what_a_compiled_optimizer_writes():
    weight = torch.zeros(3)

    def step(x):
        weight.add_(x / x)  # here

    assert line(step, "# here") in found(torch.compile(step, backend="hlo"), torch.zeros(3))
