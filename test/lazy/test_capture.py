"""torch_hlo.compile: traced until stable, then replayed without running the function."""
import contextlib
import copy
import math
from array import array
from collections import deque

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo.lowering.graph import Node

KEPT = []
# Calls are counted by `calls.append(1)` in an array: a list would be appended to by replays, too.


def test_replayed_without_tracing():
    calls = array("b")

    @torch_hlo.compile
    def fn(x, y):
        calls.append(1)
        return (x @ y).relu(), x + 1

    for _ in range(5):
        x, y = torch.randn(3, 4), torch.randn(4, 2)
        a, b = fn(x.to("hlo"), y.to("hlo"))
        torch.testing.assert_close(a.cpu(), (x @ y).relu())
        torch.testing.assert_close(b.cpu(), x + 1)
    assert len(calls) == 2
    fn(torch.randn(5, 4).to("hlo"), torch.randn(4, 2).to("hlo"))
    assert len(calls) == 3


def test_training_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = copy.deepcopy(model).to("hlo")
    calls = array("b")

    def make(m, device):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

        def train(x, y):
            calls.append(device == "hlo")
            optimizer.zero_grad()
            loss = (m(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train

    reference, fast = make(model, "cpu"), torch_hlo.compile(make(twin, "hlo"))
    for _ in range(8):
        x, y = torch.randn(5, 4), torch.randn(5, 2)
        torch.testing.assert_close(fast(x.to("hlo"), y.to("hlo")).cpu(), reference(x, y), rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5)
    assert calls.count(1) <= 4


def test_random_numbers_differ_between_replays():
    @torch_hlo.compile
    def fn(x):
        return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(100).to("hlo")
    torch.manual_seed(3)
    first = [fn(x).cpu() for _ in range(6)]
    torch.manual_seed(3)
    again = [fn(x).cpu() for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert len({tuple(a.tolist()) for a in first}) == 6


def test_in_place_on_arguments_and_views():
    @torch_hlo.compile
    def fn(x):
        x[0] += 1
        return x.t(), x

    x = torch.zeros(2, 3).to("hlo")
    for i in range(1, 6):
        view, same = fn(x)
        assert x.cpu()[0, 0] == i and view.shape == (3, 2) and same.cpu()[0, 1] == i
    view.zero_()
    assert x.cpu().abs().sum() == 0


def test_values_of_a_tensor_are_needed():
    @torch_hlo.compile(full_graph=True)
    def fn(x):
        return x * x.tolist()[0]

    with pytest.raises(RuntimeError, match="needs the values of a tensor at .*test_capture.py"):
        fn(torch.ones(3).to("hlo") + 1)  # the device computes it


def test_truth_values_are_compared():
    calls = array("b")

    @torch_hlo.compile
    def fn(x):
        calls.append(1)
        return x * 2 if x.sum() > 0 else x

    for sign in (1, 1, -1, -1, 1, -1, 1, -1):
        x = torch.ones(3) * sign
        torch.testing.assert_close(fn(x.to("hlo") + 0).cpu(), x * 2 if sign > 0 else x)
    assert len(calls) == 4


def test_numbers_may_be_returned():
    model = torch.nn.Linear(4, 3).to("hlo")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    calls = array("b")

    @torch_hlo.compile
    def step(x, y):
        calls.append(1)
        optimizer.zero_grad()
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "right": [(out.argmax(1) == y).sum().item()]}, loss

    twin = copy.deepcopy(model).cpu()
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(6):
        x, y = torch.randn(5, 4), torch.randint(3, (5,))
        found, loss = step(x.to("hlo"), y.to("hlo"))
        other.zero_grad()
        out = twin(x)
        want = torch.nn.functional.cross_entropy(out, y)
        want.backward()
        other.step()
        assert type(found["loss"]) is float and type(found["right"][0]) is int
        assert found["loss"] == pytest.approx(want.item(), rel=1e-4) == loss.item()
        assert found["right"] == [(out.argmax(1) == y).sum().item()]
    assert len(calls) == 2


@pytest.mark.parametrize("use", [lambda n: n > 2, lambda n: 2 * n, lambda n: n * 2, lambda n: math.sqrt(n), lambda n: math.isfinite(n), lambda n: max(n, 7.0),
                                 lambda n: n.is_integer(), lambda n: -n, lambda n: round(n, 1), lambda n: divmod(n, 2.0)[0] * 0, lambda n: min(1.0, n / 4) ** 2])  # fmt: skip
def test_numbers_that_python_computes_with(use):
    calls = array("b")

    @torch_hlo.compile
    def fn(x):
        calls.append(1)
        n = (x * 2).sum().item()
        return use(n), x * use(n)

    for i in (1, 2, 3, 4):
        x = torch.ones(3) * i + 0.05
        number, y = fn(x.to("hlo") + 0)
        want = use((x * 2).sum().item())
        assert number == want and type(number) is type(want)
        torch.testing.assert_close(y.cpu(), x * want)


@pytest.mark.parametrize("use, message", [(lambda n: f"{n:.3f}", "is shown"), (KEPT.append, "is kept"), (lambda n: [0] * int(n), "keep changing"), (float, "keep changing")])
def test_numbers_that_leave_unseen(use, message):
    def fn(x):
        return use((x * 2).sum().item())

    strict, loose = torch_hlo.compile(fn), torch_hlo.compile(fn, full_graph=False)
    with pytest.raises(RuntimeError, match=message):
        for i in range(12):
            strict(torch.ones(3).to("hlo") + i)
    for i in range(8):
        x = torch.ones(3) * i
        assert loose(x.to("hlo") + 0) == fn(x)
    assert all(type(n) is float for n in KEPT[-3:])


def test_truth_values_of_data_are_looked_at_by_replays(monkeypatch):
    weight = torch.randn(4, 4).to("hlo")
    calls = array("b")

    @torch_hlo.compile
    def fn(x, mask):
        calls.append(1)
        y = x @ weight
        return y if mask.bool().all() else y * mask[:, None]

    def check(given):
        x, mask = torch.randn(3, 4), torch.tensor(given)
        torch.testing.assert_close(fn(x.to("hlo"), mask.to("hlo")).cpu(), x @ weight.cpu() * mask[:, None])

    for given in ([1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 1]):
        check(given)
    assert len(calls) == 4
    for given in ([1, 1, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]):
        check(given)
    assert len(calls) == 4


def test_numbers_of_data_are_looked_at_by_replays():
    """Audio models pad by buffers of whole numbers."""
    total, calls = torch.tensor(3).to("hlo"), array("b")

    @torch_hlo.compile
    def fn(x, extra):
        calls.append(1)
        return torch.nn.functional.pad(x, (total - total // 2, total // 2 + extra)) * int(total)

    def check(extra):
        y = fn(torch.ones(2, 4).to("hlo"), torch.tensor(extra).to("hlo"))
        assert y.tolist() == [[0.0] * (size - size // 2) + [size] * 4 + [0.0] * (size // 2 + extra)] * 2

    size = 3
    for extra in (1, 1, 1, 0, 0, 0, 1):
        check(extra)
    assert len(calls) == 4
    size = 5
    total.copy_(torch.tensor(size))
    check(1)
    assert len(calls) == 5


@pytest.mark.parametrize("full_graph", [False, True])
def test_truth_values_that_keep_changing(full_graph):
    calls = array("b")

    @torch_hlo.compile(full_graph=full_graph)
    def fn(x, bits):
        calls.append(1)
        for b in bits:
            x = x + 1 if b > 0 else x - 1
        return x

    def call(i):
        bits = torch.tensor([i >> n & 1 for n in range(5)])
        assert fn(torch.zeros(2).to("hlo"), bits.to("hlo")).tolist() == [2 * bits.sum().item() - 5] * 2

    with pytest.raises(RuntimeError, match="keep changing") if full_graph else contextlib.nullcontext():
        for i in range(16):
            call(i)
    assert len(calls) == (9 if full_graph else 16)


def test_truth_values_of_a_buffer_that_is_written_are_not_assumed():
    flag = torch.ones(()).to("hlo")

    @torch_hlo.compile(full_graph=False)
    def fn(x):
        return x + 1 if flag > 0 else x - 1

    x = torch.zeros(2).to("hlo")
    assert [fn(x).tolist() for _ in range(4)] == [[1, 1]] * 4
    flag.fill_(-1)
    assert fn(x).tolist() == [-1, -1]
    flag.copy_(torch.tensor(2.0))
    assert [fn(x).tolist() for _ in range(3)] == [[1, 1]] * 3


def test_numbers_that_change():
    count, power = [0.0], [0]

    @torch_hlo.compile
    def fn(x):
        count[0] += 0.5
        return x * count[0]

    for i in range(8):
        assert fn(torch.ones(3).to("hlo")).tolist() == [(i + 1) / 2] * 3
    assert count == [4.0]

    @torch_hlo.compile
    def table(x):
        power[0] += 1
        return x * [1, 1, 1, 1, 1, 2, 3, 4, 5][power[0]]

    with pytest.raises(RuntimeError, match=r"changes power\[0\] \(from .* to .*\), which a replay does not do"):
        for _ in range(8):
            table(torch.ones(3).to("hlo"))

    numbers = iter(range(8))
    with pytest.raises(RuntimeError, match="computed in Python.*"):
        other = torch_hlo.compile(lambda x: x * (0.5 + next(numbers)))
        for _ in range(8):
            other(torch.ones(3).to("hlo"))


def test_uploads_that_change_are_named():
    @torch_hlo.compile
    def fn(x):
        return x + torch.randn(3, device="cpu").to("hlo")

    with pytest.raises(RuntimeError, match="reads another tensor.*pass it as an argument"):
        for _ in range(8):
            fn(torch.ones(3).to("hlo"))


def test_results_that_need_gradients(monkeypatch):
    """They come with their values; a backward pass from them is an error."""
    w = torch.ones(3, device="hlo", requires_grad=True)

    def loss_of(x):
        loss = (x * w).square().sum()
        return loss, torch.autograd.grad(loss, w)[0]

    captured, forward = torch_hlo.compile(loss_of), torch_hlo.compile(lambda x: (x * w).exp())
    for i in range(6):
        x = torch.randn(3)
        with monkeypatch.context() as m:
            if i > 2:
                given = x.to("hlo")
                no_recording(m)
            loss, gradient = captured(x.to("hlo") if i <= 2 else given)
            y = forward(x.to("hlo") if i <= 2 else given)
        assert loss.requires_grad and y.requires_grad and not gradient.requires_grad
        torch.testing.assert_close(loss.detach().cpu(), x.square().sum())
        torch.testing.assert_close(gradient.cpu(), 2 * x.square())
        torch.testing.assert_close(y.detach().cpu(), x.exp())
        with pytest.raises(RuntimeError, match="backward.. or torch.autograd.grad.. inside .*lambda"):
            (y.sum() + w.sum()).backward()


def test_training_and_evaluation(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    twin = copy.deepcopy(model).to("hlo")
    twin[2].p = model[2].p = 0.0
    captured = torch_hlo.compile(torch.no_grad()(lambda x: twin(x)))
    for i in range(16):
        for m in (model, twin):
            m.train(i % 8 < 4)
        x = torch.randn(5, 4)
        given = x.to("hlo")
        with torch.no_grad(), monkeypatch.context() as m:
            if i >= 8:  # both ways are known
                no_recording(m)
            y = captured(given)
            torch.testing.assert_close(y.cpu(), model(x))
    torch.testing.assert_close(twin[1].running_mean.cpu(), model[1].running_mean)


def test_modules_made_inside(monkeypatch):
    """Losses of Hugging Face models are modules of one call; a module that is replaced by another is not."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to("hlo")
    captured = torch_hlo.compile(torch.no_grad()(lambda x, y: nn.CrossEntropyLoss()(model(x), y)))
    x, y = torch.randn(5, 4).to("hlo"), torch.tensor([0, 1, 2, 1, 0]).to("hlo")
    expected = [captured(x, y).cpu() for _ in range(3)][-1]
    with monkeypatch.context() as m:
        no_recording(m)
        assert captured(x, y).cpu().equal(expected)
    model[1] = nn.Tanh()
    with torch.no_grad():
        torch.testing.assert_close(captured(x, y).cpu(), nn.functional.cross_entropy(model(x), y).cpu())


def no_recording(monkeypatch):
    """From here on, recording an op is an error."""

    def refuse(self, *args, **kwargs):
        raise AssertionError(f"recorded {args[0]}")

    monkeypatch.setattr(Node, "__init__", refuse)


def test_replays_record_nothing(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    twin = copy.deepcopy(model).to("hlo")

    def make(m):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)

        def train(x, y):
            loss = nn.functional.cross_entropy(m(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return train

    reference, fast = make(model), torch_hlo.compile(make(twin))
    batches = [(torch.randint(10, (6,)), torch.randint(10, (6,))) for _ in range(8)]
    given = [(x.to("hlo"), y.to("hlo")) for x, y in batches]
    losses = [fast(*b) for b in given[:4]]
    with monkeypatch.context() as m:
        no_recording(m)
        losses += [fast(*b) for b in given[4:]]
    torch.testing.assert_close(torch.stack([x.cpu() for x in losses]), torch.stack([reference(*b) for b in batches]), rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-4, atol=1e-5)


def test_replays_leave_copies_alone(monkeypatch):
    @torch_hlo.compile
    def fn(x, y):
        x.mul_(2)
        return x + y

    x, y = torch.arange(4.0).to("hlo"), torch.ones(4).to("hlo")
    for _ in range(4):
        fn(x, y)
    before = x.cpu()
    with monkeypatch.context() as m:
        no_recording(m)
        first = fn(x, y)
    copied = x.detach().clone()  # shares x's array until one of them is written to
    second = fn(x, y)
    assert copied.tolist() == (2 * before).tolist()
    assert first.tolist() == (2 * before + 1).tolist() and second.tolist() == (4 * before + 1).tolist()
    third = fn(x, x.detach().clone())  # two arguments with one array
    assert third.tolist() == (12 * before).tolist() and copied.tolist() == (2 * before).tolist()
    x.add_(1)  # recorded before the replay, so part of what it sees
    assert fn(x, y).tolist() == (2 * (8 * before + 1) + 1).tolist()


def test_labels_are_checked_while_captured():
    @torch_hlo.compile
    def fn(x, y):
        return nn.functional.cross_entropy(x, y)

    with pytest.raises(IndexError, match="out of bounds"):
        fn(torch.randn(4, 3).to("hlo"), torch.tensor([0, 1, 2, 3]).to("hlo"))


@pytest.mark.parametrize("name, options", [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"weight_decay": 0.1}), ("AdamW", {"foreach": False}), ("RMSprop", {})])
@pytest.mark.parametrize("period", [1, 3])
def test_schedules_outside_are_followed(name, options, period):
    def losses(device, wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(device)
        x = torch.ones(2, 4).to(device)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.02}]
        optimizer = getattr(torch.optim, name)(groups, lr=0.1, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, period, gamma=0.5)

        @wrap
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = []
        for i in range(12):
            found.append(step(x).cpu())
            schedule.step()
            if i == 8:
                optimizer.param_groups[0]["lr"] = 0.3
        return torch.stack(found)

    torch.testing.assert_close(losses("hlo", torch_hlo.compile(full_graph=False)), losses("cpu", lambda f: f), rtol=1e-4, atol=1e-6)


def test_schedules_outside_are_no_reason_to_record():
    w = torch.nn.Parameter(torch.ones(4).to("hlo"))
    optimizer = torch.optim.Adam([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)  # the betas, too
    calls = array("b")

    @torch_hlo.compile(full_graph=True)
    def step():
        calls.append(1)
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()

    for _ in range(12):
        step()
        schedule.step()
    assert len(calls) < 5


SCRIPTS = {}


def script(make):
    """A training script: make(device) -> (step, extra arguments per call, tensors to compare)."""
    SCRIPTS[make.__name__] = make
    return make


def network(device, optimizer="AdamW", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **options)


def stepping(model, optimizer, before=lambda loss: None, after=lambda: None):
    """The usual step; `before` sees the loss, `after` the gradients."""

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if before(loss):
            return loss.detach()
        loss.backward()
        if not after():
            optimizer.step()
        return loss.detach()

    return step, None, model.parameters()


@script
def skips_what_is_not_finite(device):
    return stepping(*network(device), before=lambda loss: not torch.isfinite(loss))


@script
def clips_and_checks(device):
    model, optimizer = network(device)
    return stepping(model, optimizer, after=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True) is None)


@script
def adafactor(device):
    return stepping(*network(device, "Adafactor"))


@script
def foreach(device):
    return stepping(*network(device, foreach=True))


@script
def scales(device):
    model, optimizer = network(device, "SGD")
    scaler = torch.amp.GradScaler(device, init_scale=2.0**127, growth_interval=3)

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step, None, model.parameters()


@script
def schedules(device):
    model, optimizer = network(device)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4])  # fmt: skip
    train = stepping(model, optimizer)[0]

    def step(x, y):
        loss = train(x, y)
        schedule.step()
        return loss

    return step, None, model.parameters()


@script
def sets_learning_rates(device):
    model, optimizer = network(device)
    train = stepping(model, optimizer)[0]

    def step(x, y, lr):
        optimizer.param_groups[0]["lr"] = max(lr * 0.5, 1e-4)
        return train(x, y)

    return step, lambda i: 0.01 * 0.8**i, model.parameters()


@script
def accumulates(device):
    model, optimizer = network(device)

    def step(x, y, i):
        loss = nn.functional.cross_entropy(model(x), y) / 3
        loss.backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, lambda i: i, model.parameters()


@script
def averages(device):
    model, optimizer = network(device, "SGD")
    average = torch.optim.swa_utils.AveragedModel(model).to(device)
    train = stepping(model, optimizer)[0]

    def step(x, y):
        loss = train(x, y)
        average.update_parameters(model)
        return loss

    return step, None, average.parameters()


class Trainer:
    def __init__(self, device):
        self.model, self.optimizer = network(device, "SGD")
        self.target, self.steps, self.total = copy.deepcopy(self.model), 0, 0.0

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y) + (self.model(x) - self.target(x).detach()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        self.total += loss.item()
        if self.steps % 4 == 0:
            self.target.load_state_dict(self.model.state_dict())
        return self.total


@script
def counts_and_copies(device):
    trainer = Trainer(device)
    return trainer.step, None, trainer.target.parameters()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name, monkeypatch):
    """What training scripts do besides computing: the same losses and parameters as on the CPU, and in the end nothing is recorded."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(16)]
    if name == "skips_what_is_not_finite":
        batches[6] = batches[7] = batches[14] = (batches[6][0] * float("nan"), batches[6][1])
    found = []
    for device in ("cpu", "hlo"):
        step, extra, tensors = SCRIPTS[name](device)
        if device == "hlo":
            step = torch_hlo.compile(step)
        losses = []
        for i, (x, y) in enumerate(batches):
            given = (x.to(device), y.to(device), *([extra(i)] if extra else ()))
            with monkeypatch.context() as m:
                if device == "hlo" and i >= 13:
                    no_recording(m)
                losses.append(step(*given))
        found.append([torch.as_tensor(loss).cpu() for loss in losses] + [t.detach().cpu() for t in tensors])
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_gradients_made_outside(monkeypatch):
    """`zero_grad()` and the optimizer may be outside: gradients are slots of the parameters."""
    model, optimizer = network("hlo")
    twin, other = network("cpu")
    backward = torch_hlo.compile(lambda x, y: nn.functional.cross_entropy(model(x), y).backward())
    update = torch_hlo.compile(lambda: optimizer.step())
    for i in range(6):
        x, y = torch.randn(5, 8), torch.randint(3, (5,))
        given = x.to("hlo"), y.to("hlo")
        for o in (optimizer, other):
            o.zero_grad()
        with monkeypatch.context() as m:
            if i > 2:
                no_recording(m)
            backward(*given)
            update()
        nn.functional.cross_entropy(twin(x), y).backward()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-3, atol=1e-5)


def test_gradients_that_are_views(monkeypatch):
    """The gradient of a single number is a view of a sum; the next call empties the slot."""
    found = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        model, scale = nn.Linear(8, 3).to(device), nn.Parameter(torch.ones(1, device=device))
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)

        def train(x, model=model, scale=scale, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (model(x) * scale).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = torch_hlo.compile(train) if device == "hlo" else train
        batches = [torch.full((2, 8), 0.1 * i).to(device) for i in range(6)]
        with monkeypatch.context() as m:
            for i, x in enumerate(batches):
                if i == 4 and device == "hlo":
                    no_recording(m)
                step(x)
        found.append([scale.detach().cpu(), model.weight.detach().cpu()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


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


def test_a_function_that_keeps_differing_is_left_alone():
    count = []

    @torch_hlo.compile(full_graph=False)
    def step(x):
        count.append(1)
        return x * len(count)

    x = torch.ones(2).to("hlo")
    assert [step(x)[0].item() for _ in range(12)] == [float(i) for i in range(1, 13)]


def test_constants_made_inside_are_kept():
    """Nobody owns them after the call, but a result of the same size must not take their memory."""

    @torch_hlo.compile(full_graph=True)
    def fn(x):
        return x * torch.tensor([0.25, 0.5, 2.0], device="hlo")

    for i in range(8):
        torch.testing.assert_close(fn(torch.full((3,), float(i)).to("hlo")).cpu(), i * torch.tensor([0.25, 0.5, 2.0]))


def test_copies_are_computed():
    """A tensor shares its array with its copies: that is no reason for a replay to forget them."""
    target = torch.zeros(3).to("hlo")

    @torch_hlo.compile
    def fn(x):
        target.copy_(x)
        return x.clone()

    kept = [fn(torch.full((3,), float(i)).to("hlo")) for i in range(5)]
    assert [y.tolist() for y in kept] == [[float(i)] * 3 for i in range(5)] and target.tolist() == [4.0] * 3


@pytest.mark.parametrize("write", [lambda b, y: b.copy_(y), lambda b, y: b.add_(y), lambda b, y: b[1:].add_(y[1:])], ids=["copy", "add", "view"])
def test_a_tensor_from_before_is_written_and_returned(write):
    """What the call returns is the tensor that it wrote to, not one that each call makes."""
    kept, plain = torch.zeros(4, device="hlo"), torch.zeros(4)

    @torch_hlo.compile
    def step(y):
        write(kept, y)
        return kept.detach()

    for i in range(5):
        y = torch.full((4,), float(i + 1))
        result = step(y.to("hlo"))
        write(plain, y)
        assert torch.equal(result.cpu(), plain) and torch.equal(kept.cpu(), plain)
    result.zero_()
    assert not kept.cpu().any()


def test_results_of_traced_calls_are_let_go():
    """Only the caller keeps them: a trace remembers what was computed, not the values."""
    x = torch.ones(1 << 18, device="hlo")
    torch_hlo.sync()
    before = torch.hlo.memory_allocated()
    step = torch_hlo.compile(lambda x: x * 2 + 1)
    for _ in range(5):
        result = step(x)
        torch_hlo.sync()
    assert torch.hlo.memory_allocated() - before < 2 * result.nbytes


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
    other, weight, tables = nn.Linear(4, 4).to(device), torch.ones(4, 4, device=device), [torch.ones(4, device=device), torch.zeros(4, device=device)]
    holder = {"table": tables[0]}
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return model[1].layer.weight.sum().detach()

    return {
        "a module is replaced": (lambda x: model(x), lambda: setattr(model[1], "layer", other)),
        "a module is removed": (lambda x: model(x), lambda: model.__delitem__(1)),
        "a flag of a module": (lambda x: model(x), lambda: setattr(model[1], "skip", True)),
        "an option of a module of PyTorch": (lambda x: model(x), lambda: setattr(model[2], "p", 1.0)),
        "a hook": (lambda x: model(x), lambda: model[0].register_forward_hook(lambda module, given, result: result * 2)),
        "the data of a parameter": (lambda x: model(x), lambda: setattr(model[0].layer.weight, "data", weight)),
        "a tensor in a dictionary": (lambda x: model(x) + holder["table"], lambda: holder.update(table=tables[1])),
        "a buffer": (lambda x: model(x), lambda: setattr(model[0], "mean", tables[0])),
        "a group of parameters": (step, lambda: optimizer.add_param_group({"params": list(model[1].parameters())})),
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
    model, state, losses, numbers, last, meter = nn.Sequential(Block(), Block()).to(device), {"mean": torch.zeros(4, device=device)}, [], [], deque(maxlen=3), Meter()
    weight, hidden = nn.Parameter(torch.ones(4, 4, device=device)), [(torch.zeros(2, 4, device=device), torch.ones(2, 4, device=device))]
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
        "modules": (lambda x: model(x).sum() + model[0].aux, lambda: [model[0].aux, model[1].aux, model[0].mean, model[1].mean]),
        "rebinds": (rebinds, lambda: [state["mean"]]), "appends": (appends, lambda: [*losses, *numbers]), "meters": (meters, lambda: [meter.sum, meter.count, meter.average]),
        "keeps the last": (keeps_the_last, lambda: [*last, state["mean"]]), "sets data": (sets_data, lambda: [weight]), "recurs": (recurs, lambda: hidden[0]),
        "switches": (switches, lambda: [state["mean"], training.training, *training.buffers()]),
    }  # fmt: skip


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


def test_lengths_that_are_looked_at():
    seen = []

    @torch_hlo.compile
    def fn(x):
        seen.append(x.sum())
        return x * len(seen)

    with pytest.raises(RuntimeError, match="changes how many elements seen has"):
        for _ in range(8):
            fn(torch.ones(2).to("hlo"))


class CountingAdam(torch.optim.Optimizer):
    """As optimizers of one's own are written: whole numbers and tensors in the state, some of them replaced."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                one, two = group["betas"]
                state["m"] = one * state["m"] + (1 - one) * p.grad
                state["v"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                p.addcdiv_(state["m"] / (1 - one ** state["step"]), (state["v"] / (1 - two ** state["step"])).sqrt() + 1e-8, value=-group["lr"])


@script
def an_optimizer_of_its_own(device):
    model, _ = network(device)
    return stepping(model, CountingAdam(model.parameters()))


@script
def plateaus(device):
    model, optimizer = network(device)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    train = stepping(model, optimizer)[0]

    def step(x, y):
        loss = train(x, y)
        schedule.step(loss.item())
        return loss

    return step, None, model.parameters()


@script
def learning_rates_of_a_counter(device):
    model, optimizer = network(device)
    train, count = stepping(model, optimizer)[0], [0]

    def rate(i):
        return 0.5e-2 * (1 + math.cos(math.pi * i / 50))

    def step(x, y):
        count[0] += 1
        optimizer.param_groups[0]["lr"] = rate(count[0])
        return train(x, y)

    return step, None, model.parameters()


@script
def steps_away_and_back(device):
    """Sharpness-aware minimization: the data of parameters is put back."""
    model, optimizer = network(device, "SGD")

    def step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        old = [p.data.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for p, data in zip(model.parameters(), old):
            p.data = data
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step, None, model.parameters()


@script
def trains_a_copy(device):
    model, _ = network(device)

    def step(x, y):
        twin = copy.deepcopy(model)
        train = stepping(twin, torch.optim.SGD(twin.parameters(), 0.1))[0]
        train(x, y)
        loss = train(x, y)
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters()):
                p.lerp_(q, 0.5)
        return loss

    return step, None, model.parameters()


@script
def solves(device):
    model, optimizer = network(device)

    def step(x, y):
        optimizer.zero_grad()
        gram = x @ x.T + torch.eye(len(x), device=x.device)
        loss = torch.linalg.solve(gram, model(x)).square().mean() + torch.linalg.cholesky(gram).diagonal().log().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, None, model.parameters()


def test_errors_of_linear_algebra_are_raised_by_replays():
    solve = torch_hlo.compile(torch.linalg.inv)
    for i in range(5):
        torch.testing.assert_close(solve((torch.eye(3) * (i + 1)).to("hlo") + 0).cpu(), torch.eye(3) / (i + 1))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        solve(torch.zeros(3, 3).to("hlo") + 0)


def test_hooks_of_parameters_leave_values():
    layer, norms = nn.Linear(3, 2).to("hlo"), {}
    layer.weight.register_hook(lambda g: norms.update(weight=g.sum()))
    step = torch_hlo.compile(lambda x: layer(x).sum().backward())
    for i in range(5):
        layer.zero_grad()
        step(torch.full((1, 3), float(i)).to("hlo"))
        assert norms["weight"].item() == 6.0 * i


def test_whole_numbers_that_floats_compute_with():
    """Python's floats do not ask a whole number on their right."""
    counts = []

    @torch_hlo.compile
    def fn(x):
        n = (x > 0).sum().item()
        return x * min(0.5 * n, 1.0)

    for i in (1, 1, 1, 4, 1, 4, 3):
        x = torch.tensor([1.0] * i + [-1.0] * (4 - i))
        counts.append(fn(x.to("hlo") + 0).cpu().tolist() == (x * min(0.5 * i, 1.0)).tolist())
    assert all(counts)


def test_why_a_call_is_traced_again(monkeypatch, capsys):
    from torch_hlo import config

    model, options = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("hlo"), {"scale": 1.0}

    @torch_hlo.compile
    def step(x):
        y = model(x) * options["scale"]
        return y * 2 if y.isnan().any() else y

    x = torch.ones(2, 4)

    def said() -> str:
        capsys.readouterr()
        with monkeypatch.context() as m:
            m.setattr(config, "get", lambda name, get=config.get: 1 if name == "LOG" else get(name))
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
