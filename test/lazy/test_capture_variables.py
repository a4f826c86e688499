"""torch_hlo.compile: Python's variables that a captured step sees, compared before a replay, and
left as the function leaves them."""

from array import array
from collections import deque

import pytest
import torch
from torch import nn

import torch_hlo

from .support import no_recording


def test_what_python_sees_is_compared():
    import random

    options, draw = {"scale": 1}, random.Random(0)
    fn = torch_hlo.compile(lambda x: x * options["scale"])
    for scale in (1, 1, 1, 2, 2, 2, 1):
        options["scale"] = scale
        assert fn(torch.ones(2).to("hlo")).tolist() == [scale] * 2
    flips = torch_hlo.compile(lambda x: x.flip(0) if draw.random() < 0.5 else x)
    with pytest.raises(RuntimeError, match="random numbers of Python"):
        for _ in range(20):
            flips(torch.ones(2).to("hlo"))
    layer = nn.Linear(2, 2).to("hlo")
    fn = torch_hlo.compile(lambda x: layer(x).sum().backward())
    for wanted in (True, True, True, False, False, True):
        layer.weight.requires_grad_(wanted)
        layer.zero_grad()
        fn(torch.ones(1, 2).to("hlo"))
        assert (layer.weight.grad is not None) is wanted


class Block(nn.Module):
    """What modules keep besides parameters."""

    def __init__(self):
        super().__init__()
        self.layer, self.skip, self.aux = nn.Linear(4, 4), False, None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = x if self.skip else self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.aux = y.square().mean()
        return y.relu()


def changed_outside(device):
    """Name -> (function of x, what is changed after four calls)."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Dropout(0.0)).to(device)
    other, weight, tables = (
        nn.Linear(4, 4).to(device),
        torch.ones(4, 4, device=device),
        [torch.ones(4, device=device), torch.zeros(4, device=device)],
    )
    holder = {"table": tables[0]}
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return model[1].layer.weight.sum().detach()

    return {
        "a module is replaced": (
            lambda x: model(x),
            lambda: setattr(model[1], "layer", other),
        ),
        "a module is removed": (lambda x: model(x), lambda: model.__delitem__(1)),
        "a flag of a module": (
            lambda x: model(x),
            lambda: setattr(model[1], "skip", True),
        ),
        "an option of a module of PyTorch": (
            lambda x: model(x),
            lambda: setattr(model[2], "p", 1.0),
        ),
        "a hook": (
            lambda x: model(x),
            lambda: model[0].register_forward_hook(lambda module, given, result: result * 2),
        ),
        "the data of a parameter": (
            lambda x: model(x),
            lambda: setattr(model[0].layer.weight, "data", weight),
        ),
        "a tensor in a dictionary": (
            lambda x: model(x) + holder["table"],
            lambda: holder.update(table=tables[1]),
        ),
        "a buffer": (lambda x: model(x), lambda: setattr(model[0], "mean", tables[0])),
        "a group of parameters": (
            step,
            lambda: optimizer.add_param_group({"params": list(model[1].parameters())}),
        ),
    }


@pytest.mark.parametrize("name", changed_outside("cpu"))
def test_what_changes_outside_is_seen(name):
    found = []
    for device in ("cpu", "hlo"):
        fn, change = changed_outside(device)[name]
        if device == "hlo":
            fn = torch_hlo.compile(fn)
        results = []
        for i in range(8):
            if i == 4:
                change()
            results.append(fn(torch.full((2, 4), 1.0 + i).to(device)).detach().cpu())
        found.append(torch.stack(results))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Meter:
    def __init__(self):
        self.sum, self.count, self.average = 0.0, 0, 0.0

    def update(self, value, n):
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


def leaving(device):
    """Name -> (function of x, what it has left)."""
    torch.manual_seed(0)
    model, state, losses, numbers, last, meter = (
        nn.Sequential(Block(), Block()).to(device),
        {"mean": torch.zeros(4, device=device)},
        [],
        [],
        deque(maxlen=3),
        Meter(),
    )
    weight, hidden = (
        nn.Parameter(torch.ones(4, 4, device=device)),
        [(torch.zeros(2, 4, device=device), torch.ones(2, 4, device=device))],
    )
    training = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)

    def rebinds(x):
        state["mean"] = 0.9 * state["mean"] + x.mean(0)

    def appends(x):
        losses.append(x.square().mean())
        numbers.append(x.sum().item())

    def keeps_the_last(x):
        last.append(x.sum())
        state["mean"] = sum(last) / len(last)

    def meters(x):
        meter.update(x.mean().item(), len(x))

    def sets_data(x):
        (x @ weight).sum().backward()
        weight.data = weight.data - 0.1 * weight.grad
        weight.grad = None

    def recurs(x):
        h, c = hidden[0]
        c = c * 0.5 + x
        hidden[0] = h.tanh() + c, c

    def switches(x):
        training.train()
        training(x)
        training.eval()
        state["mean"] = training(x).detach()

    return {
        "modules": (
            lambda x: model(x).sum() + model[0].aux,
            lambda: [model[0].aux, model[1].aux, model[0].mean, model[1].mean],
        ),
        "rebinds": (rebinds, lambda: [state["mean"]]),
        "appends": (appends, lambda: [*losses, *numbers]),
        "meters": (meters, lambda: [meter.sum, meter.count, meter.average]),
        "keeps the last": (keeps_the_last, lambda: [*last, state["mean"]]),
        "sets data": (sets_data, lambda: [weight]),
        "recurs": (recurs, lambda: hidden[0]),
        "switches": (
            switches,
            lambda: [state["mean"], training.training, *training.buffers()],
        ),
    }


@pytest.mark.parametrize("name", leaving("cpu"))
def test_what_is_left_in_variables(name, monkeypatch):
    found = []
    for device in ("cpu", "hlo"):
        fn, left = leaving(device)[name]
        if device == "hlo":
            fn = torch_hlo.compile(fn)
        results = []
        for i in range(9):
            x = torch.full((2, 4), 1.0 + i).to(device)
            with monkeypatch.context() as m:
                if device == "hlo" and i >= 7:
                    no_recording(m)
                fn(x)
            results += [torch.as_tensor(v).detach().cpu().clone() for v in left()]
        found.append(results)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_why_a_call_is_traced_again(monkeypatch, capsys):
    from torch_hlo import config

    model, options = (
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("hlo"),
        {"scale": 1.0},
    )

    @torch_hlo.compile
    def step(x):
        y = model(x) * options["scale"]
        return y * 2 if y.isnan().any() else y

    x = torch.ones(2, 4)

    def said() -> str:
        capsys.readouterr()
        with monkeypatch.context() as m:
            m.setattr(
                config,
                "get",
                lambda name, get=config.get: 1 if name == "LOG" else get(name),
            )
            step(x.to("hlo"))
        return capsys.readouterr().err

    for _ in range(3):
        step(x.to("hlo"))
    assert "traced" not in said()
    options["scale"] = 2.0
    assert "step is traced again: options['scale'] has changed" in said()
    options["scale"] = 1.0
    model.eval()
    assert "traced again: model.training has changed" in said()
    model.train()
    x[0] = float("nan")
    assert "traced again: a comparison of numbers came out otherwise" in said()


class Makes(dict):
    """As Hugging Face's ACT2FN: what is read is made."""

    def __getitem__(self, key):
        return dict.__getitem__(self, key)()


def test_containers_that_make_what_is_read():
    activations, calls = Makes(relu=nn.ReLU), array("b")

    @torch_hlo.compile
    def step(x):
        calls.append(1)
        return activations["relu"](x)

    for i in range(4):
        assert step(torch.full((2,), i - 1.0).to("hlo")).tolist() == [max(i - 1.0, 0.0)] * 2
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [lambda x: x.unsqueeze_(0), lambda x: x.resize_(1), lambda x: x.set_(x[:1])],
)
def test_arguments_keep_their_shape(change):
    """A replay writes values; an argument of another shape after the call is an error, not
    forgotten."""

    def fn(x):
        change(x)
        return x * 2

    given = torch.ones(2).to("hlo")
    change(given)
    captured = torch_hlo.compile(fn)
    with pytest.raises(RuntimeError, match="changes the shape or the strides of an argument"):
        for _ in range(8):
            x = torch.ones(2).to("hlo")
            captured(x)
            assert x.shape == given.shape
    free = torch_hlo.compile(fn, full_graph=False)
    for _ in range(8):
        x = torch.ones(2).to("hlo")
        assert free(x).shape == x.shape == given.shape

    def there_and_back(x):
        y = x.t_() * 2
        x.t_()
        return y

    captured = torch_hlo.compile(there_and_back)
    for n in range(5):
        assert (
            captured(torch.arange(6.0).view(2, 3).to("hlo") + n).tolist()
            == (2 * (torch.arange(6.0).view(2, 3) + n).t()).tolist()
        )
