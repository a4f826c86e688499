"""torch_hlo.compile: what a function sees of Python's variables, and what it leaves in them."""

import copy
from collections import Counter, OrderedDict, deque

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import torch_hlo
from torch_hlo import config
from torch_hlo.pytorch.version import VERSION

from ..lazy.support import no_recording
from . import surroundings_of_names  # noqa: F401
from .surroundings import CASES

# a case of each kind runs by default
QUICK = set(list(CASES)[::3])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_what_changes_outside_is_seen(name):
    results = []
    for device in ("cpu", "hlo"):
        fn, change = CASES[name](device)
        if device == "hlo":
            fn = torch_hlo.compile(fn)
        found = []
        for i in range(7):
            if i in (3, 5):
                change()
            found.append(fn((torch.arange(4.0) + 1).to(device)).detach().cpu().clone())
        results.append(found)
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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
def test_what_is_left_in_variables(name):
    found = []
    for device in ("cpu", "hlo"):
        fn, left = leaving(device)[name]
        if device == "hlo":
            fn = torch_hlo.compile(fn)
        results = []
        for i in range(9):
            x = torch.full((2, 4), 1.0 + i).to(device)
            fn(x)
            results += [torch.as_tensor(v).detach().cpu().clone() for v in left()]
        found.append(results)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
@pytest.mark.parametrize("detached", (True, False))
def test_lists_that_grow_are_no_reason_to_trace_again(detached):
    found = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        model, box = nn.Linear(4, 4).to(device), Meter()
        box.losses, box.both = [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            box.losses.append(loss.detach() if detached else loss)
            box.both.append(1.0)
            box.losses.append(x.sum())

        counters.clear()
        run = torch_hlo.compile(step, full_graph=True) if device == "hlo" else step
        for i in range(12):
            run(torch.full((2, 4), 1.0 + i).to(device))
        found.append([*map(float, box.losses), *box.both])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_lists_that_are_read_after_all():
    found = []
    for device in ("cpu", "hlo"):
        kept = []

        def step(x):
            kept.append(x.sum())
            kept.append(x.mean())
            if len(kept) > 6:
                kept.clear()
            return x * len(kept)

        run = torch_hlo.compile(step) if device == "hlo" else step
        found += [[run(torch.full((4,), 1.0 + i).to(device)).cpu() for i in range(9)]]
        found[-1] += [t.cpu() for t in kept]
    torch.testing.assert_close(found[1], found[0])


class Makes(dict):
    """As Hugging Face's ACT2FN: what is read is made."""

    def __getitem__(self, key):
        return dict.__getitem__(self, key)()


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
def test_gradients_that_are_dropped_may_be_anything():
    """`zero_grad()` sets them to None, so a graph does not depend on what they were."""
    weights = [torch.ones(3, device="hlo", requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.25)

    @torch_hlo.compile
    def step(x):
        optimizer.zero_grad()
        (weights[0] * x).sum().backward()
        optimizer.step()

    counters.clear()
    x = torch.ones(3, device="hlo")
    shared = torch.full((3,), 7.0, device="hlo")
    for i, old in enumerate([None, None, shared, None, shared[:1].expand(3), shared]):
        for w in weights:
            w.grad = old
        step(x)
        assert weights[1].grad is None
        assert weights[0].grad.tolist() == [1, 1, 1]
        assert weights[0].tolist() == [0.75 - 0.25 * i] * 3
        assert shared.tolist() == [7, 7, 7]
    assert counters["stats"]["unique_graphs"] == 1


def test_why_a_call_is_traced_again(monkeypatch, capsys):
    options = {"scale": 1.0}
    step = torch_hlo.compile(lambda x: x * options["scale"])
    x = torch.ones(2, 4).to("hlo")
    for _ in range(3):
        step(x)
    options["scale"] = 2.0
    with config.override(LOG=1):
        step(x)
    assert "is traced again: " in (said := capsys.readouterr().err) and "options['scale']" in said


def test_containers_that_make_what_is_read():
    activations = Makes(relu=nn.ReLU)

    @torch_hlo.compile
    def step(x):
        return activations["relu"](x)

    for i in range(4):
        assert step(torch.full((2,), i - 1.0).to("hlo")).tolist() == [max(i - 1.0, 0.0)] * 2


class Row(list):
    pass


class Saved:
    def __init__(self):
        self.value = 1

    def __getstate__(self):
        return {"value": 7}


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "thing",
    [OrderedDict(a=1, b=2), Counter("aab"), Row([1, 2]), Saved()],
    ids=lambda x: type(x).__name__,
)
def test_copies_are_whole(how, thing):
    def step(x):
        return x + 1, how(thing)

    captured = torch_hlo.compile(step)
    for _ in range(3):
        y, copied = captured(torch.ones(2, device="hlo"))
        expected = how(thing)
        assert type(copied) is type(expected) and y.tolist() == [2, 2]
        assert vars(copied) == vars(expected) if type(thing) is Saved else copied == expected


def test_generators_that_are_left_read_later():
    box = Meter()
    captured = torch_hlo.compile(lambda x: (x * box.count for _ in range(2)))
    left = [captured(torch.ones(2, device="hlo")) for _ in range(4)]
    box.count = 5
    assert [y.tolist() for y in next(zip(*left))] == [[5, 5]] * 4


def test_lists_that_are_arguments_are_written():
    def step(values, found):
        values.append(values[0] * 2)
        found["y"] = values[-1] + found.pop("x")
        return values

    captured = torch_hlo.compile(step)
    for i in range(5):
        values, found = [torch.full((2,), float(i), device="hlo")], {"x": 1.0}
        assert captured(values, found) is values and len(values) == 2
        assert found["y"].tolist() == [2 * i + 1] * 2


def test_tensors_of_the_cpu_that_are_arguments(monkeypatch):
    """They are written where they are. What is only copied to the device is no reason to record."""
    weight = torch.ones(2, device="hlo")
    copies = torch_hlo.compile(lambda x: x.to("hlo") * weight)
    writes = torch_hlo.compile(lambda x: (x.add_(1), weight * 2, x.device.type)[::2])
    for i in range(6):
        with monkeypatch.context() as m:
            if i > 3:
                no_recording(m)
            assert copies(torch.full((2,), float(i))).tolist() == [i, i]
        x = torch.zeros(2)
        y, where = writes(x)
        assert y is x and x.tolist() == [1, 1] and where == "cpu"


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
def test_checkpoints_draw_the_same_numbers_again():
    weight = torch.ones(64, device="hlo", requires_grad=True)

    @torch_hlo.compile(full_graph=True)
    def step(x):
        weight.grad = None
        y = checkpoint(lambda x: nn.functional.dropout(x * weight), x, use_reentrant=False)
        y.sum().backward()
        return y.detach()

    for _ in range(4):
        y = step(torch.ones(64, device="hlo"))
        assert torch.equal(y > 0, weight.grad > 0)


def test_one_graph_is_traced_as_often_as_it_must_be():
    box = Meter()
    step = torch_hlo.compile(lambda x: x * len(box.name), full_graph=True)
    for i in range(12):
        box.name = "x" * i
        assert step(torch.ones(2, device="hlo")).tolist() == [i, i]


def test_one_graph_raises_what_the_function_raises():
    box = Meter()
    inner = torch_hlo.compile(lambda x: x * box.average)
    step = torch_hlo.compile(lambda x: inner(x), full_graph=True)
    for _ in range(3):
        step(torch.ones(2, device="hlo"))
    del box.average
    with pytest.raises(AttributeError, match="average"):
        step(torch.ones(2, device="hlo"))


def test_an_argument_gets_other_memory():
    def step(x, y):
        x.data = y
        return x + 1

    captured = torch_hlo.compile(step)
    for _ in range(5):
        x, y = torch.zeros(2, device="hlo"), torch.ones(2, device="hlo")
        assert captured(x, y).tolist() == [2, 2] and x.tolist() == [1, 1]
        y.add_(1)
        assert x.tolist() == [2, 2]
