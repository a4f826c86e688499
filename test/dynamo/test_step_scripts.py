"""torch_hlo.compile: whole training scripts, beside the same on the CPU."""

import copy
import math

import pytest
import torch
from torch import nn

import torch_hlo

from ..lazy.support import network, no_recording


@pytest.mark.parametrize(
    "name, options",
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adam", {}),
        ("AdamW", {"weight_decay": 0.1}),
        ("AdamW", {"foreach": False}),
        ("RMSprop", {}),
    ],
)
@pytest.mark.parametrize("period", [1, 3])
def test_schedules_outside_are_followed(name, options, period):
    def losses(device, wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(device)
        x = torch.ones(2, 4).to(device)
        groups = [
            {"params": [model.weight], "lr": 0.1},
            {"params": [model.bias], "lr": 0.02},
        ]
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

    torch.testing.assert_close(
        losses("hlo", torch_hlo.compile(full_graph=False)),
        losses("cpu", lambda f: f),
        rtol=1e-4,
        atol=1e-6,
    )


def test_schedules_outside_are_no_reason_to_record(monkeypatch):
    w = torch.nn.Parameter(torch.ones(4).to("hlo"))
    optimizer = torch.optim.Adam([w], lr=0.1)
    # the betas, too
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)

    @torch_hlo.compile(full_graph=True)
    def step():
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()

    for i in range(12):
        with monkeypatch.context() as m:
            if i > 4:
                no_recording(m)
            step()
        schedule.step()


SCRIPTS = {}


def script(make):
    """A training script: make(device) -> (step, extra arguments per call, tensors to compare)."""
    SCRIPTS[make.__name__] = make
    return make


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
    return stepping(
        model,
        optimizer,
        after=lambda: (
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True) is None
        ),
    )


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
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [4],
    )
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
        loss = (
            nn.functional.cross_entropy(self.model(x), y)
            + (self.model(x) - self.target(x).detach()).square().mean()
        )
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


# Scripts of which something is recorded at each call: they look at values, or at whole numbers that
# change, keep tensors elsewhere, or are several graphs whose gradients meet.
RECORDED = set(
    "scales an_optimizer_of_its_own skips_what_is_not_finite clips_and_checks adafactor averages"
    " counts_and_copies learning_rates_of_a_counter steps_away_and_back trains_a_copy"
    " counts_classes makes_optimizers solves".split()
)


class CountingAdam(torch.optim.Optimizer):
    """As optimizers of one's own are written: whole numbers and tensors in the state, some of them
    replaced."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = (
                        0,
                        torch.zeros_like(p),
                        torch.zeros_like(p),
                    )
                state["step"] += 1
                one, two = group["betas"]
                state["m"] = one * state["m"] + (1 - one) * p.grad
                state["v"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                p.addcdiv_(
                    state["m"] / (1 - one ** state["step"]),
                    (state["v"] / (1 - two ** state["step"])).sqrt() + 1e-8,
                    value=-group["lr"],
                )


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
def counts_classes(device):
    """k-means: how many rows there are of each class does not decide the size of what bincount
    gives, as it has a minimal length."""
    centers = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(device)

    def step(x, y):
        nearest = torch.cdist(x, centers).argmin(1)
        sums = torch.zeros_like(centers).index_add(0, nearest, x)
        centers.lerp_(sums / torch.bincount(nearest, minlength=3).clamp(min=1)[:, None], 0.5)
        return torch.bincount(y, minlength=3)

    return step, None, [centers]


@script
def makes_optimizers(device):
    """Reptile: the model itself takes steps of optimizers that live for a call, and one of its
    own."""
    model, outer = network(device, "SGD", momentum=0.9)

    def step(x, y):
        old = [p.detach().clone() for p in model.parameters()]
        for inner in (
            torch.optim.SGD(model.parameters(), 0.05),
            torch.optim.Adam(model.parameters(), 0.01),
        ):
            for _ in range(2):
                loss = stepping(model, inner)[0](x, y)
        with torch.no_grad():
            for p, q in zip(model.parameters(), old):
                p.grad = q - p
                p.copy_(q)
        outer.step()
        return loss

    return step, None, model.parameters()


@script
def solves(device):
    model, optimizer = network(device)

    def step(x, y):
        optimizer.zero_grad()
        gram = x @ x.T + torch.eye(len(x), device=x.device)
        loss = (
            torch.linalg.solve(gram, model(x)).square().mean()
            + torch.linalg.cholesky(gram).diagonal().log().mean()
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, None, model.parameters()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name, monkeypatch):
    """What training scripts do besides computing: the same losses and parameters as on the CPU, and
    in the end nothing is recorded."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(5, 8, generator=generator),
            torch.randint(3, (5,), generator=generator),
        )
        for _ in range(16)
    ]
    if name == "skips_what_is_not_finite":
        batches[6] = batches[7] = batches[14] = (
            batches[6][0] * float("nan"),
            batches[6][1],
        )
    found = []
    for device in ("cpu", "hlo"):
        step, extra, tensors = SCRIPTS[name](device)
        if device == "hlo":
            step = torch_hlo.compile(step)
        losses = []
        for i, (x, y) in enumerate(batches):
            given = (x.to(device), y.to(device), *([extra(i)] if extra else ()))
            with monkeypatch.context() as m:
                if device == "hlo" and i >= 13 and name not in RECORDED:
                    no_recording(m)
                losses.append(step(*given))
        found.append(
            [torch.as_tensor(loss).cpu() for loss in losses] + [t.detach().cpu() for t in tensors]
        )
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_lengths_of_lines_change():
    """CTC in a captured step: lengths are values like others, whatever they are."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(12, 2, 8, generator=generator),
            torch.randint(1, 3, (2, 4), generator=generator),
            torch.randint(8, 13, (2,), generator=generator),
            torch.randint(0, 5, (2,), generator=generator),
        )
        for _ in range(8)
    ]

    def losses(device, wrap):
        model, optimizer = network(device)

        @wrap
        def step(x, targets, *lengths):
            loss = nn.functional.ctc_loss(
                model(x).log_softmax(-1), targets, *lengths, zero_infinity=True
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for batch in batches:
            yield step(*(t.to(device) for t in batch)).cpu()

    torch.testing.assert_close(
        list(losses("hlo", torch_hlo.compile)),
        list(losses("cpu", lambda f: f)),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR", "LambdaLR"])
def test_schedules_at_the_end_are_called_after_the_graph(schedule, capsys):
    options = {
        "StepLR": {"step_size": 2},
        "OneCycleLR": {"max_lr": 0.5, "total_steps": 9},
        "LambdaLR": {"lr_lambda": lambda epoch: 1 / (1 + epoch)},
    }[schedule]

    def run(device, wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = getattr(torch.optim.lr_scheduler, schedule)(optimizer, **options)
        seen = []

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            seen.append("stepped")
            scheduler.step()
            return loss

        def said(x):
            y = model(x).sum()
            print("seen", seen.append(y) or 7)
            return [y, x]

        step, said = wrap(step), wrap(said)
        x = torch.ones(2, 4).to(device)
        for _ in range(4):
            seen += [step(x).item(), optimizer.param_groups[0]["lr"], scheduler.last_epoch]
        said(x)
        seen[-1] = seen[-1].item()
        return seen, capsys.readouterr().out

    got = run("hlo", lambda f: torch_hlo.compile(f, full_graph=True))
    want = run("cpu", lambda f: f)
    assert got[1] == want[1] == "seen 7\n"
    assert [x if isinstance(x, str) else pytest.approx(x, rel=1e-5) for x in want[0]] == got[0]


def test_calls_that_are_not_last_are_not_delayed():
    model = torch.nn.Linear(2, 1).to("hlo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def rate(x):
        scheduler.step()
        return x * optimizer.param_groups[0]["lr"]

    def often(x):
        for _ in range(2):
            scheduler.step()
        return x

    def refused(x):
        scheduler.step()
        return x * 2

    x = torch.ones(1).to("hlo")
    rate, often = torch_hlo.compile(rate), torch_hlo.compile(often)
    assert [rate(x).item() for _ in range(3)] == [0.25, 0.125, 0.0625]
    for _ in range(3):
        often(x)
    assert optimizer.param_groups[0]["lr"] == 0.5**10
    refused = torch_hlo.compile(refused, full_graph=True)
    refused(x)  # the first call is Python's
    with pytest.raises(RuntimeError, match=r"scheduler\.step\(\)"):
        refused(x)
