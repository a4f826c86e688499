"""torch.save, torch.load, pickle: every direction between devices, sharing kept."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch import nn

import torch_hlo

pytestmark = pytest.mark.usefixtures("recorded")


def roundtrip(value, **options):
    f = io.BytesIO()
    torch.save(value, f)
    f.seek(0)
    return torch.load(f, **options)


@pytest.mark.parametrize("weights_only", [True, False])
def test_tensor(weights_only):
    x = torch.arange(6.0).view(2, 3).to("hlo")
    y = roundtrip(x, weights_only=weights_only)
    assert y.is_hlo and y.cpu().equal(x.cpu())
    z = roundtrip(x, map_location="cpu", weights_only=weights_only)
    assert z.device.type == "cpu" and z.equal(x.cpu())
    for where in (
        "hlo",
        "hlo:0",
        torch.device("hlo"),
        {"cpu": "hlo:0"},
        lambda storage, tag: torch.serialization.default_restore_location(storage, "hlo:0"),
    ):
        w = roundtrip(torch.arange(6.0), map_location=where, weights_only=weights_only)
        assert w.is_hlo and w.tolist() == [0, 1, 2, 3, 4, 5]
    # as for CUDA
    assert (
        roundtrip(
            x, map_location=lambda storage, tag: storage, weights_only=weights_only
        ).device.type
        == "cpu"
    )


def test_sharing_is_kept():
    x = torch.arange(6.0).to("hlo")
    a, b, c = roundtrip([x, x[2:], x.view(2, 3).t()])
    a[3] = 100
    assert b.tolist() == [2, 100, 4, 5] and c.tolist() == [[0, 100], [1, 4], [2, 5]]
    p, q = roundtrip([x, x[2:]], map_location="cpu")
    p[3] = 7
    assert q[1] == 7


def test_odd_tensors():
    cl = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last).to("hlo")
    y = roundtrip(cl)
    assert y.stride() == cl.stride() and y.cpu().equal(cl.cpu())
    z = torch.tensor([1 + 2j, 3j]).to("hlo")
    assert roundtrip(z.conj()).cpu().equal(z.cpu().conj().resolve_conj())
    assert roundtrip(torch.view_as_real(z)).cpu().equal(torch.view_as_real(z.cpu()))
    for t in (
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.ones(2, dtype=torch.bool),
        torch.ones(3, dtype=torch.bfloat16),
    ):
        r = roundtrip(t.to("hlo"))
        assert r.is_hlo and r.dtype == t.dtype and r.cpu().equal(t)
    g = torch.ones(2).to("hlo").requires_grad_()
    assert roundtrip(g).requires_grad


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16"])
@pytest.mark.parametrize("place", ["hlo", "cpu"])
def test_young_types(name, place):
    want = torch.tensor([1.0, 2.0, 4.0, 8.0]).to(getattr(torch, name))
    x, file = want.to("hlo"), io.BytesIO()
    torch.save({"x": x, "view": x[1:]}, file)
    file.seek(0)
    found = torch.load(file, map_location=place)
    assert found["x"].device.type == place and found["x"].dtype == want.dtype
    assert found["x"].cpu().float().equal(want.float())
    assert found["view"].tolist() == [2, 4, 8] and found["view"].storage_offset() == 1


def test_modules_and_optimizers():
    m = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("hlo")
    o = torch.optim.AdamW(m.parameters())
    m(torch.randn(5, 3).to("hlo")).sum().backward()
    o.step()
    state = roundtrip({"model": m.state_dict(), "optimizer": o.state_dict()}, weights_only=True)
    n = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    n.load_state_dict(state["model"])
    assert n[0].weight.device.type == "cpu" and n[0].weight.equal(m[0].weight.cpu())
    m2 = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("hlo")
    w = m2[0].weight
    m2.load_state_dict(roundtrip(n.state_dict()))
    assert m2[0].weight is w and w.is_hlo and w.cpu().equal(n[0].weight)
    m3 = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    m3.load_state_dict(state["model"], assign=True)
    assert m3[0].weight.is_hlo and isinstance(m3[0].weight, nn.Parameter)
    whole = roundtrip(m, weights_only=False)
    assert (
        isinstance(whole[0].weight, nn.Parameter)
        and whole[0].weight.is_hlo
        and whole[0].weight.cpu().equal(m[0].weight.cpu())
    )
    whole.cpu()
    torch.optim.AdamW(m2.parameters()).load_state_dict(state["optimizer"])


def test_pickle():
    x = torch.arange(3.0).to("hlo")
    y = pickle.loads(pickle.dumps(x))
    assert y.is_hlo and y.tolist() == [0, 1, 2]
    p = nn.Parameter(x)
    q = pickle.loads(pickle.dumps(p))
    assert isinstance(q, nn.Parameter) and q.is_hlo and q.requires_grad
    g = torch.Generator("hlo").manual_seed(5)
    assert pickle.loads(pickle.dumps(g)).initial_seed() == 5


def test_file(tmp_path):
    x = torch.arange(4.0).to("hlo")
    torch.save({"x": x}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", mmap=True)["x"].tolist() == [0, 1, 2, 3]
    assert torch.load(tmp_path / "a.pt", map_location="meta")["x"].is_meta


class Broken:
    """A file that must not be opened."""

    def __fspath__(self):
        raise AssertionError("opened before the values are there")


def test_values_come_before_the_file(monkeypatch):
    """A step that fails, or a process that is ended in it, leaves no empty file behind."""
    from torch_hlo.lazy.record import serialization

    def fail(tensor):
        raise ValueError("the step failed")

    monkeypatch.setattr(serialization, "_host_storage", fail)
    weight = torch.ones(3).to("hlo") * 2
    for given in ({"a": [weight]}, nn.Linear(2, 2).to("hlo")):
        with pytest.raises(ValueError, match="the step failed"):
            torch.save(given, Broken())


def _torch_save(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("copied", [_torch_save, lambda state: pickle.loads(pickle.dumps(state))])
def test_checkpoints_of_a_training_loop_have_the_values_of_their_time(captured, copied):
    net = nn.Linear(4, 4).to("hlo")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(2, 4, device="hlo")

    def step():
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = torch_hlo.compile(step) if captured else step
    for _ in range(4):
        for _ in range(3):  # updates what it has in place, once it is known
            run()
            torch_hlo.mark_step()
        got = copied(net.state_dict())
        assert got["weight"].tolist() == net.weight.tolist()
