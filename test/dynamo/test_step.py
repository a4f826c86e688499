"""torch_hlo.compile: run once, traced, and then started without running the function."""

import copy
import math

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo.lazy.record.tensor import HloTensor
from torch_hlo.pytorch.version import VERSION

from ..lazy.support import no_recording


def test_started_without_recording(monkeypatch):
    @torch_hlo.compile
    def fn(x, y):
        return (x @ y).relu(), x + 1

    for i in range(5):
        x, y = torch.randn(3, 4), torch.randn(4, 2)
        given = x.to("hlo"), y.to("hlo")
        with monkeypatch.context() as m:
            if i > 1:
                no_recording(m)
            a, b = fn(*given)
        torch.testing.assert_close(a.cpu(), (x @ y).relu())
        torch.testing.assert_close(b.cpu(), x + 1)
    assert fn(torch.randn(5, 4).to("hlo"), torch.randn(4, 2).to("hlo"))[0].shape == (5, 2)


def test_training_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = copy.deepcopy(model).to("hlo")

    def make(m, device):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

        def train(x, y):
            optimizer.zero_grad()
            loss = (m(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train

    reference, fast = make(model, "cpu"), torch_hlo.compile(make(twin, "hlo"))
    for _ in range(8):
        x, y = torch.randn(5, 4), torch.randn(5, 2)
        torch.testing.assert_close(
            fast(x.to("hlo"), y.to("hlo")).cpu(), reference(x, y), rtol=1e-4, atol=1e-5
        )
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5)


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


def test_random_numbers_of_the_cpu_are_drawn_at_each_call():
    fn = torch_hlo.compile(lambda x: x + torch.randn(3, device="cpu").to("hlo"))
    torch.manual_seed(0)
    found = [fn(torch.ones(3).to("hlo")).cpu() for _ in range(6)]
    torch.manual_seed(0)
    for y in found:
        torch.testing.assert_close(y, 1 + torch.randn(3))


def test_results_of_a_backward_pass(monkeypatch):
    """A loss that was differentiated inside is a result like PyTorch's: a second pass is an
    error."""
    w = torch.ones(3, device="hlo", requires_grad=True)

    @torch_hlo.compile
    def loss_of(x):
        loss = (x * w).square().sum()
        return loss, torch.autograd.grad(loss, w)[0]

    for i in range(6):
        x = torch.randn(3)
        given = x.to("hlo")
        with monkeypatch.context() as m:
            if i > 2:
                no_recording(m)
            loss, gradient = loss_of(given)
        assert loss.requires_grad and not gradient.requires_grad
        torch.testing.assert_close(loss.detach().cpu(), x.square().sum())
        torch.testing.assert_close(gradient.cpu(), 2 * x.square())
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            (loss.sum() + w.sum()).backward()


def test_results_are_differentiated():
    """A captured forward in a training loop of one's own."""
    w = torch.ones(3, device="hlo", requires_grad=True)
    forward = torch_hlo.compile(lambda x: (x * w).exp())
    for _ in range(4):
        x = torch.randn(3)
        w.grad = None
        forward(x.to("hlo")).sum().backward()
        torch.testing.assert_close(w.grad.cpu(), x * x.exp())


def test_a_backward_pass_beyond_the_graph():
    """What comes before a number is read, and the backward pass after it, are two graphs."""
    w = torch.ones(3, device="hlo", requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.5)

    @torch_hlo.compile
    def step(x):
        optimizer.zero_grad()
        loss = (x * w).sum()
        if loss.item() > 0:
            loss.backward()
            optimizer.step()

    expected = torch.ones(3)
    for i in range(6):
        step(torch.full((3,), 0.25).to("hlo"))
        expected -= 0.125
        assert w.tolist() == expected.tolist() or expected.sum() <= 0
        if i == 4:
            break


def test_full_graph_names_the_line():
    @torch_hlo.compile(full_graph=True)
    def fn(x):
        print("now")
        return x + 1

    x = torch.ones(2).to("hlo")
    fn(x)
    with pytest.raises(RuntimeError, match=r'print\("now"\)'):
        fn(x)


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
def test_numbers_are_followed(monkeypatch):
    """A learning rate that changes is an input of the program, in every optimizer. Adagrad looks at
    its counter in Python, so its steps are recorded."""
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        model = nn.Linear(4, 4)
        twin = copy.deepcopy(model).to("hlo")
        optimizers = [kind(m.parameters(), 0.1) for m in (model, twin)]

        def make(m, optimizer):
            def step(x):
                optimizer.zero_grad()
                m(x).square().sum().backward()
                optimizer.step()

            return step

        plain, fast = make(model, optimizers[0]), torch_hlo.compile(make(twin, optimizers[1]))
        for i in range(8):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + max(i - 2, 0))
            x = torch.randn(2, 4)
            given = x.to("hlo")
            plain(x)
            with monkeypatch.context() as m:
                if i > 5 and kind is not torch.optim.Adagrad:
                    no_recording(m)
                fast(given)
            torch.testing.assert_close(twin.weight.detach().cpu(), model.weight.detach())


def test_numbers_that_python_keeps(monkeypatch):
    """They are plain numbers, of the same types, and calls that compute them record nothing."""
    box = {"mean": 1.0, "count": 0, "large": False}
    gain = 2.0

    def step(x, count):
        box["mean"] = 0.5 * box["mean"] + gain
        if count:
            box["count"], box["large"] = int(gain), gain > 3
        return x * gain

    captured = torch_hlo.compile(step)
    for count in (True, False):
        for i in range(8):
            gain = 1.0 + 0.7 * i
            mean = 0.5 * box["mean"] + gain
            x = torch.ones(2, device="hlo")
            with monkeypatch.context() as m:
                if i > 4 and not count:
                    no_recording(m)
                y = captured(x, count)
            torch.testing.assert_close(y.cpu(), torch.ones(2) * gain)
            assert box["mean"] == mean and list(map(type, box.values())) == [float, int, bool]
            if count:
                assert box["count"] == int(gain) and box["large"] == (gain > 3)


def test_numbers_that_must_be_plain():
    """Where an operator takes no number that is followed, another one is recorded."""
    box = {"eps": 1e-5, "scale": 2.0}

    @torch_hlo.compile
    def fn(x):
        y = nn.functional.layer_norm(x, (4,), eps=box["eps"])
        return y * (box["scale"] > 1.0) * math.sqrt(box["scale"])

    x = torch.arange(4.0)
    for i in range(8):
        box["eps"], box["scale"] = 10.0 ** (i % 3 - 3), 0.5 + i
        expected = nn.functional.layer_norm(x, (4,), eps=box["eps"])
        expected = expected * (box["scale"] > 1.0) * math.sqrt(box["scale"])
        torch.testing.assert_close(fn(x.to("hlo")).cpu(), expected)


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
    """Losses of Hugging Face models are modules of one call; a module that is replaced by another
    is not."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to("hlo")
    captured = torch_hlo.compile(torch.no_grad()(lambda x, y: nn.CrossEntropyLoss()(model(x), y)))
    x, y = torch.randn(5, 4).to("hlo"), torch.tensor([0, 1, 2, 1, 0]).to("hlo")
    expected = [captured(x, y).cpu() for _ in range(3)][-1]
    with monkeypatch.context() as m:
        no_recording(m)
        assert captured(x, y).cpu().equal(expected)
    model[1] = nn.Tanh()
    with torch.no_grad():
        torch.testing.assert_close(
            captured(x, y).cpu(), nn.functional.cross_entropy(model(x), y).cpu()
        )


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
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
    torch.testing.assert_close(
        torch.stack([x.cpu() for x in losses]),
        torch.stack([reference(*b) for b in batches]),
        rtol=1e-4,
        atol=1e-5,
    )
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
    assert (
        first.tolist() == (2 * before + 1).tolist() and second.tolist() == (4 * before + 1).tolist()
    )
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


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
def test_gradients_that_are_views(monkeypatch):
    """The gradient of a single number is a view of a sum; the next call empties the slot."""
    found = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        model, scale = (
            nn.Linear(8, 3).to(device),
            nn.Parameter(torch.ones(1, device=device)),
        )
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
        torch.testing.assert_close(
            fn(torch.full((3,), float(i)).to("hlo")).cpu(),
            i * torch.tensor([0.25, 0.5, 2.0]),
        )


def test_copies_are_computed():
    """A tensor shares its array with its copies: that is no reason for a replay to forget them."""
    target = torch.zeros(3).to("hlo")

    @torch_hlo.compile
    def fn(x):
        target.copy_(x)
        return x.clone()

    kept = [fn(torch.full((3,), float(i)).to("hlo")) for i in range(5)]
    assert [y.tolist() for y in kept] == [[float(i)] * 3 for i in range(5)] and target.tolist() == [
        4.0
    ] * 3


@pytest.mark.parametrize(
    "write",
    [lambda b, y: b.copy_(y), lambda b, y: b.add_(y), lambda b, y: b[1:].add_(y[1:])],
    ids=["copy", "add", "view"],
)
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


def test_hooks_of_parameters_leave_values():
    layer, norms = nn.Linear(3, 2).to("hlo"), {}
    layer.weight.register_hook(lambda g: norms.update(weight=g.sum()))
    step = torch_hlo.compile(lambda x: layer(x).sum().backward())
    for i in range(5):
        layer.zero_grad()
        step(torch.full((1, 3), float(i)).to("hlo"))
        assert norms["weight"].item() == 6.0 * i


@torch.compiler.allow_in_graph
def scaled(x, scale):
    """It takes no number but a float."""
    if isinstance(scale, torch.SymFloat) and type(x) is HloTensor:
        raise TypeError("no float")
    return x * scale


def test_functions_that_take_no_numbers_but_floats():
    found = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        model, options = nn.Linear(4, 4).to(device), {"scale": 1.0}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.step()
            return scaled(x, options["scale"]).sum() + model.weight.detach().sum()

        run = torch_hlo.compile(step) if device == "hlo" else step
        results = []
        for i in range(9):
            options["scale"] = 1.0 + i % 3
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            results.append(run(torch.ones(4).to(device)).cpu())
        found.append(results)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
@pytest.mark.parametrize("owner", ("optimizer", "model"))
def test_new_gradients_are_written_over_dropped_ones(owner):
    model = nn.Linear(4, 4).to("hlo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drops = {"optimizer": optimizer, "model": model}[owner]

    @torch_hlo.compile(full_graph=True)
    def step(x):
        drops.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step(torch.ones(2, 4).to("hlo"))
    for parameter in model.parameters():
        parameter.grad.mark = True
    step(torch.ones(2, 4).to("hlo"))
    assert all(hasattr(parameter.grad, "mark") for parameter in model.parameters())


@pytest.mark.parametrize(
    "name, options",
    [("RMSprop", {}), ("Adagrad", {"lr_decay": 0.3}), ("Adadelta", {}), ("Rprop", {})],
)
def test_optimizers_go_on_counting(name, options):
    """PyTorch keeps their counters on the CPU."""

    def trained(device, wrap):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3).to(device)
        optimizer = getattr(torch.optim, name)(layer.parameters(), **options)
        x = torch.ones(2, 4).to(device)

        @wrap
        def step():
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = [step().item() for _ in range(7)]
        return torch.tensor([*losses, float(optimizer.state[layer.weight]["step"])])

    torch.testing.assert_close(
        trained("hlo", torch_hlo.compile), trained("cpu", lambda fn: fn), rtol=1e-4, atol=1e-6
    )


@pytest.mark.skipif(VERSION < (2, 13), reason="a graph ends at backward()")
@pytest.mark.parametrize("network", (nn.GRU, nn.LSTM, nn.RNN))
def test_recurrent_networks_are_traced(network):
    """PyTorch has no shape function for the cells of GRU."""
    model = network(4, 8, num_layers=2).to("hlo")
    x = torch.randn(5, 2, 4).to("hlo")

    def loss():
        model.zero_grad()
        found = model(x)[0].square().mean()
        found.backward()
        return found.detach()

    step = torch_hlo.compile(loss, full_graph=True)
    want = loss()
    for _ in range(3):
        torch.testing.assert_close(step().cpu(), want.cpu())
    compiled = torch.compile(lambda x: model(x)[0].sum(), backend="hlo", fullgraph=True)
    torch.testing.assert_close(compiled(x).cpu(), model(x)[0].sum().cpu(), rtol=1e-4, atol=1e-5)
