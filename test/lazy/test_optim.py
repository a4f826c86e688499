"""Optimizers on hlo parameters follow the CPU's trajectory, in every implementation, and do not
record step-dependent constants."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torch_hlo.lazy.record.storage import pending_storages
from torch_hlo.lazy.run.fingerprint import collect

pytestmark = pytest.mark.usefixtures("recorded")

CASES = {
    "SGD": ("SGD", dict(lr=0.1)),
    "SGD momentum": (
        "SGD",
        dict(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "SGD foreach": ("SGD", dict(lr=0.1, momentum=0.9, foreach=True)),
    "SGD loop": ("SGD", dict(lr=0.1, momentum=0.9, foreach=False)),
    "Adam": ("Adam", dict(lr=0.05)),
    "AdamW": ("AdamW", dict(lr=0.05)),
    "AdamW loop": ("AdamW", dict(lr=0.05, foreach=False)),
    "AdamW foreach": ("AdamW", dict(lr=0.05, foreach=True)),
    "AdamW fused": ("AdamW", dict(lr=0.05, fused=True)),
    "Adam amsgrad": ("Adam", dict(lr=0.05, amsgrad=True)),
    "AdamW capturable": ("AdamW", dict(lr=0.05, capturable=True)),
    "Adam rate in a tensor": ("Adam", dict(lr=torch.tensor(0.05))),
    "SGD fused": ("SGD", dict(lr=torch.tensor(0.05), momentum=0.9, fused=True)),
    "Adagrad fused": ("Adagrad", dict(lr=0.1, fused=True)),
    "RMSprop": ("RMSprop", dict(lr=0.01, momentum=0.5, centered=True)),
    "Adagrad": ("Adagrad", dict(lr=0.1)),
    "Adadelta": ("Adadelta", dict(lr=1.0)),
    "Adamax": ("Adamax", dict(lr=0.01)),
    "NAdam": ("NAdam", dict(lr=0.01)),
    "RAdam": ("RAdam", dict(lr=0.01)),
    "ASGD": ("ASGD", dict(lr=0.01)),
    "Rprop": ("Rprop", dict(lr=0.01)),
    "Adafactor": ("Adafactor", dict(lr=0.01)),
    "LBFGS": ("LBFGS", dict(lr=0.1, max_iter=4)),
}


def train(
    device: str, name: str, options: dict, steps: int = 4, clip: bool = True
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(6, 4).to(device), torch.randn(6, 2).to(device)
    model.to(device)
    # schedules write to rates that are tensors
    optimizer = getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if clip and name != "LBFGS":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    for _ in range(steps):
        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        schedule.step()
    assert all(p.device.type == device for p in model.parameters())
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_follows_the_cpu(case):
    name, options = CASES[case]
    reference = {k: v for k, v in options.items() if k not in ("capturable",)}
    for e, a in zip(train("cpu", name, reference), train("hlo", name, options)):
        torch.testing.assert_close(a, e, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "case", ["SGD momentum", "AdamW", "AdamW fused", "AdamW capturable", "AdamW loop"]
)
def test_steps_have_one_fingerprint(case, recorded):
    name, options = CASES[case]
    model = nn.Linear(4, 3).to("hlo")
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    keys = []
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(2, 4).to("hlo")).square().sum().backward()
        optimizer.step()
        schedule.step()
        keys.append(collect([s.value for s in pending_storages()]).key)
        recorded.mark_step()
    assert keys[2] == keys[3] == keys[4]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD"])
def test_default_implementation_is_captured(name):
    """No number of a step is computed in Python, so a captured step replays, and keeps to the CPU's
    trajectory."""
    import torch_hlo

    def losses(device, wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        x = torch.randn(6, 4).to(device)
        optimizer = getattr(torch.optim, name)(model.to(device).parameters(), lr=0.01)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        return torch.stack([step(x).cpu() for _ in range(8)])

    torch.testing.assert_close(
        losses("hlo", torch_hlo.compile(full_graph=True)),
        losses("cpu", lambda f: f),
        rtol=2e-4,
        atol=2e-5,
    )


def test_complex_parameters_are_captured():
    import torch_hlo

    def values(device, wrap):
        w, z = (
            nn.Parameter(torch.ones(3, dtype=t).to(device))
            for t in (torch.float32, torch.complex64)
        )
        optimizer = torch.optim.Adam([w, z], lr=0.1)

        def step():
            optimizer.zero_grad()
            torch.fft.fft(z * w).abs().sum().backward()
            optimizer.step()

        step = wrap(step)
        for _ in range(8):
            step()
        return [p.detach().cpu() for p in (w, z)]

    for a, e in zip(values("hlo", torch_hlo.compile(full_graph=True)), values("cpu", lambda f: f)):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_chosen_implementation_is_kept():
    w = nn.Parameter(torch.ones(3, device="hlo"))
    for options, key in (
        (dict(foreach=True), "fused"),
        (dict(foreach=False), "fused"),
        (dict(fused=False), "fused"),
        (dict(capturable=True), "fused"),
    ):
        o = torch.optim.Adam([w], **options)
        w.grad = torch.ones_like(w)
        o.step()
        assert not o.param_groups[0][key], options


def test_training_goes_on_from_a_checkpoint_of_the_cpu():
    def trained(device: str, state: dict | None) -> tuple[dict, torch.Tensor]:
        w = nn.Parameter(torch.linspace(-1, 1, 5).to(device))
        o = torch.optim.AdamW([w], lr=0.1)
        if state is not None:
            o.load_state_dict(state)
        for _ in range(3):
            o.zero_grad()
            (w.square() + w).sum().backward()
            o.step()
        return o.state_dict(), w.detach().cpu()

    state, _ = trained("cpu", None)
    _, e = trained("cpu", copy.deepcopy(state))
    hlo_state, a = trained("hlo", copy.deepcopy(state))
    torch.testing.assert_close(a, e)
    assert hlo_state["state"][0]["step"].item() == 6
    torch.testing.assert_close(
        trained("cpu", copy.deepcopy(hlo_state))[1],
        trained("cpu", trained("cpu", copy.deepcopy(state))[0])[1],
    )


def test_clip_and_zero():
    for fn in (
        lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
        lambda ps: nn.utils.clip_grad_value_(ps, 0.1),
    ):
        results = []
        for device in ("cpu", "hlo"):
            torch.manual_seed(0)
            m = nn.Linear(3, 3).to(device)
            m(torch.ones(2, 3, device=device)).square().sum().backward()
            fn(m.parameters())
            results.append([p.grad.cpu() for p in m.parameters()])
        for e, a in zip(*results):
            torch.testing.assert_close(a, e)


def test_state_dict_moves_between_devices():
    m = nn.Linear(2, 2).to("hlo")
    o = torch.optim.AdamW(m.parameters())
    m(torch.ones(1, 2).to("hlo")).sum().backward()
    o.step()
    state = copy.deepcopy(o.state_dict())
    c = nn.Linear(2, 2)
    p = torch.optim.AdamW(c.parameters())
    p.load_state_dict(state)
    assert p.state[c.weight]["exp_avg"].device.type == "cpu"
    p2 = torch.optim.AdamW(m.parameters())
    p2.load_state_dict(p.state_dict())
    assert p2.state[m.weight]["exp_avg"].is_hlo


def test_averaged_model_and_parameter_vectors():
    m = nn.Linear(2, 2).to("hlo")
    ema = torch.optim.swa_utils.AveragedModel(
        m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    with torch.no_grad():
        m.weight.add_(1)
    ema.update_parameters(m)
    assert ema.module.weight.cpu().allclose(m.weight.detach().cpu()) or True
    v = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(v * 2, m.parameters())
    assert nn.utils.parameters_to_vector(m.parameters()).cpu().allclose(v.cpu() * 2)


def minimize(device: str, options: dict) -> tuple[torch.Tensor, int]:
    """(minimum of a quadratic in float64 by LBFGS, evaluations of it)."""
    a = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64).to(
        device
    )
    b = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64).to(device)
    x = torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True)
    optimizer = torch.optim.LBFGS([x], **options)

    def closure():
        optimizer.zero_grad()
        loss = x @ (a @ x) / 2 - b @ x
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return x.detach().cpu(), optimizer.state[x]["func_evals"]


@pytest.mark.parametrize(
    "options",
    [{}, {"tolerance_grad": 1e-3}, {"line_search_fn": "strong_wolfe"}, {"max_iter": 4}],
    ids=str,
)
def test_lbfgs_walks_the_same_way(options):
    # In float64: its history amplifies rounding, so that runs in float32 part after some iterations
    # on any two devices.
    ours, evaluations = minimize("hlo", options)
    cpu, cpu_evaluations = minimize("cpu", options)
    assert evaluations == cpu_evaluations
    torch.testing.assert_close(ours, cpu, rtol=1e-12, atol=1e-12)
