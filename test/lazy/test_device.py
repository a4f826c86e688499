"""The device as users see it: names, factories, moving, printing, torch.hlo, generators, threads,
processes."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo.lazy.record import Array

hlo = torch.device("hlo")
pytestmark = pytest.mark.usefixtures("recorded")


def test_names():
    assert str(torch.device("hlo", 0)) == "hlo:0" and torch_hlo.device() == torch.device("hlo:0")
    x = torch.ones(3)
    for y in (
        x.to("hlo"),
        x.hlo(),
        x.to(torch.device("hlo:0")),
        x.to(device=hlo, dtype=torch.double),
    ):
        assert (
            y.is_hlo
            and y.device == torch.device("hlo:0")
            and y.cpu().device.type == "cpu"
            and not y.is_cpu
        )
    assert nn.Linear(2, 2).hlo().weight.is_hlo
    assert x.hlo().type() == "torch.hlo.FloatTensor"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="hlo:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2).to("hlo:3")


def test_module_functions():
    m = torch.hlo
    assert m.is_available() and m.device_count() == 1 and m.current_device() == 0
    m.set_device(0)
    m.synchronize()
    assert (
        m.memory_allocated() >= 0
        and m.max_memory_allocated() >= 0
        and "allocated_bytes.all.current" in m.memory_stats()
    )
    m.empty_cache()
    m.reset_peak_memory_stats()
    s = m.Stream()
    with m.stream(s):
        e = m.Event(enable_timing=True)
        e.record()
        f = m.Event(enable_timing=True)
        f.record()
    assert e.elapsed_time(f) >= 0 and m.current_stream() == s
    assert (
        torch.accelerator.current_accelerator().type == "hlo"
        and torch.accelerator.device_count() == 1
    )
    torch.accelerator.synchronize()
    assert "hlo" in m.get_device_name() and m.get_device_properties().total_memory > 0
    with m.device(0):
        pass


def test_streams_and_pinned_memory_of_cpp():
    """Plain classes of PyTorch and C++ take ours: pinned memory is the CPU's, any is pinned."""
    ours, event = torch.accelerator.current_stream(), torch.Event()
    event.record(ours)
    event.wait(stream=ours)
    ours.wait_stream(torch.Stream(device="hlo"))
    with ours:
        assert ours.query() and isinstance(ours, torch.Stream)
    assert torch.zeros(2, pin_memory=True).to("hlo", non_blocking=True).tolist() == [0, 0]
    x = torch.ones(2)
    assert x.is_pinned() and x.pin_memory() is x and np.from_dlpack(x).tolist() == [1, 1]


def test_events_and_streams_of_pytorch_wait():
    start, end = (torch.Event("hlo", enable_timing=True) for _ in range(2))
    x = torch.ones(64, 64).to("hlo")
    start.record()
    y = x @ x
    end.record()
    end.synchronize()
    assert type(y._storage.value) is Array and start.elapsed_time(end) > 0 and end.query()
    z = y + 1
    torch.accelerator.current_stream().synchronize()
    assert type(z._storage.value) is Array
    if hasattr(torch.accelerator, "empty_host_cache"):  # since torch 2.12
        torch.accelerator.empty_host_cache()
        assert torch.float8_e5m2 in torch.accelerator.get_device_capability()["supported_dtypes"]


FACTORIES = {
    "zeros": lambda **k: torch.zeros(2, 3, **k),
    "ones": lambda **k: torch.ones(2, 3, **k),
    "full": lambda **k: torch.full((2,), 3.5, **k),
    "full_int": lambda **k: torch.full((2,), 3, **k),
    "arange": lambda **k: torch.arange(5, **k),
    "arange3": lambda **k: torch.arange(1, 2, 0.25, **k),
    "linspace": lambda **k: torch.linspace(0, 1, 5, **k),
    "logspace": lambda **k: torch.logspace(0, 1, 5, **k),
    "eye": lambda **k: torch.eye(2, 3, **k),
    "tensor": lambda **k: torch.tensor([[1, 2], [3, 4]], **k),
    "scalar": lambda **k: torch.tensor(2.5, **k),
    "as_tensor": lambda **k: torch.as_tensor(np.arange(3), **k),
    "tril_indices": lambda **k: torch.tril_indices(3, 3, **k),
    "double": lambda **k: torch.zeros(2, dtype=torch.double, **k),
    "bool": lambda **k: torch.ones(2, dtype=torch.bool, **k),
    "hann": lambda **k: torch.hann_window(8, **k),
    "empty0": lambda **k: torch.empty(0, 3, **k),
    "complex": lambda **k: torch.tensor([1 + 2j], **k),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name):
    make = FACTORIES[name]
    expected = make()
    got = make(device="hlo")
    with torch.device("hlo"):
        other = make()
    for t in (got, other):
        assert t.is_hlo and t.dtype == expected.dtype and t.stride() == expected.stride()
        torch.testing.assert_close(t.cpu(), expected)


def test_default_device():
    torch.set_default_device("hlo")
    try:
        assert (
            torch.zeros(2).is_hlo
            and nn.Linear(2, 2).weight.is_hlo
            and torch.tensor([1.0]).is_hlo
            and torch.randn(3).is_hlo
        )
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
    finally:
        torch.set_default_device(None)


def test_like_and_new():
    x = torch.arange(6.0).view(2, 3).to("hlo")
    for t in (
        torch.zeros_like(x),
        x.new_zeros(2, 3),
        torch.ones_like(x) - 1,
        torch.empty_like(x).fill_(0),
        x.new_full((2, 3), 0.0),
        x.new_tensor([[0.0] * 3] * 2),
    ):
        assert t.is_hlo and t.cpu().equal(torch.zeros(2, 3))
    c = torch.ones_like(x, device="cpu")
    assert c.device.type == "cpu" and c.equal(torch.ones(2, 3))
    assert torch.rand_like(x).is_hlo and torch.randint_like(x, 3).is_hlo


def test_to_variants():
    x = torch.arange(6.0).view(2, 3)
    y = x.to("hlo")
    assert y.to("hlo") is y and y.to(torch.float32) is y and y.to("hlo", copy=True) is not y
    assert (
        y.to("cpu", torch.int32).equal(x.int())
        and y.half().cpu().equal(x.half())
        and x.to(y).is_hlo
        and y.to(x).device.type == "cpu"
    )
    assert y.to("meta").device.type == "meta"
    z = torch.empty(2, 3)
    z.copy_(y)
    assert z.equal(x)
    cl = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert (
        cl.to("hlo").stride() == cl.stride()
        and cl.to("hlo").cpu().stride() == cl.stride()
        and cl.to("hlo").cpu().equal(cl)
    )


def test_upload_is_a_copy():
    x = torch.zeros(3)
    y = x.to("hlo")
    x.fill_(7)
    c = y.cpu()
    c.fill_(9)
    assert y.tolist() == [0, 0, 0]


def test_printing():
    x = torch.tensor([1.0, 2.5]).to("hlo")
    assert repr(x) == "tensor([1.0000, 2.5000], device='hlo:0')" == str(x)
    assert (
        repr(x.requires_grad_() * 2) == "tensor([2., 5.], device='hlo:0', grad_fn=<MulBackward0>)"
    )
    assert repr(torch.zeros(0, device="hlo")) == "tensor([], device='hlo:0')"
    assert repr(torch.zeros(0, 2, device="hlo")) == "tensor([], device='hlo:0', size=(0, 2))"
    assert repr(torch.tensor(3).to("hlo")) == "tensor(3, device='hlo:0')"
    p = nn.Linear(1, 1).to("hlo").bias
    assert repr(p).startswith("Parameter containing:\ntensor([") and "requires_grad=True" in repr(p)
    assert f"{torch.tensor(1.234).to('hlo'):.2f}" == "1.23"


def test_conversions():
    x = torch.arange(3.0).to("hlo")
    assert (
        x.tolist() == [0, 1, 2]
        and x[1].item() == 1.0
        and float(x[2]) == 2.0
        and int(x[2]) == 2
        and bool(x[1])
        and len(x) == 3
    )
    assert (
        [float(v) for v in x] == [0, 1, 2]
        and 2.0 in x
        and list(range(5))[torch.tensor(2).to("hlo")] == 2
    )
    for f in (lambda: x.numpy(), lambda: np.asarray(x)):
        with pytest.raises(TypeError, match="can't convert hlo:0 device type tensor to numpy"):
            f()
    assert x.numpy(force=True).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="3 elements cannot be converted to Scalar"):
        x.item()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)


def test_tied_weights_and_identity_survive_moving():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    w = a.weight
    m = nn.Sequential(a, b)
    opt = torch.optim.SGD(m.parameters(), lr=1.0)
    m.to("hlo")
    assert (
        a.weight is b.weight is w
        and isinstance(w, nn.Parameter)
        and w.is_hlo
        and opt.param_groups[0]["params"][0] is w
    )
    m.half()
    assert w.dtype == torch.half and a.weight is b.weight
    m.float().to("cpu")
    assert a.weight is b.weight is w and not w.is_hlo


def test_exported_modules_move():
    """torch.export keeps weak references to the parameters."""
    linear, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    module = torch.export.export(linear, (x,)).module()
    want, weight = module(x), module.weight
    module.to("hlo")
    assert module.weight is weight and weight.device.type == "hlo"
    torch.testing.assert_close(module(x.to("hlo")).cpu(), want)
    torch.testing.assert_close(module.to("cpu")(x), want)


def test_module_with_gradients_moves():
    m = nn.Linear(2, 2)
    m(torch.ones(1, 2)).sum().backward()
    m.to("hlo")
    assert m.weight.grad.is_hlo and m.weight.grad.cpu().equal(torch.ones(2, 2))


def test_the_class_of_a_parameter_makes_parameters():
    cls = type(nn.Parameter(torch.ones(2).to("hlo")))
    for value in (torch.ones(3), torch.ones(3).to("hlo"), torch.ones(3, device="meta")):
        made = cls(value, requires_grad=False)
        assert isinstance(made, nn.Parameter) and made.device == value.device
        assert not made.requires_grad
    assert cls([1, 2]).equal(torch.tensor([1.0, 2.0]))


def test_deepcopy():
    x = torch.arange(4.0).to("hlo")
    v = x[1:]
    y, w = copy.deepcopy([x, v])
    w.add_(10)
    assert y.tolist() == [0, 11, 12, 13] and x.tolist() == [0, 1, 2, 3]
    m = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("hlo")
    m[0].weight.note = "kept"
    c = copy.deepcopy(m)
    assert (
        isinstance(c[0].weight, nn.Parameter)
        and c[0].weight.requires_grad
        and c[0].weight.note == "kept"
        and c[0].weight is not m[0].weight
    )
    with torch.no_grad():
        c[0].weight.zero_()
    assert m[0].weight.abs().sum().item() > 0
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(m(torch.ones(2, 2).to("hlo")))


# ---- random numbers


def test_seeds():
    def draw():
        return torch.cat(
            [
                torch.rand(4, device="hlo"),
                torch.randn(4, device="hlo"),
                torch.empty(4, device="hlo").exponential_(),
            ]
        ).cpu()

    torch.manual_seed(7)
    a = draw()
    torch.manual_seed(7)
    torch.hlo.synchronize()
    b = draw()
    c = draw()
    assert a.equal(b) and not a.equal(c)
    torch_hlo.manual_seed(7)
    assert draw().equal(a)
    state = torch.hlo.get_rng_state()
    d = draw()
    torch.hlo.set_rng_state(state)
    assert draw().equal(d)
    with torch.random.fork_rng(devices=[0], device_type="hlo"):
        draw()
    assert torch.hlo.initial_seed() == 7


def test_generator():
    g = torch.Generator(device="hlo").manual_seed(3)
    assert (
        g.device == torch.device("hlo:0")
        and isinstance(g, torch.Generator)
        and isinstance(torch.Generator(), torch.Generator)
    )
    a = torch.rand(5, device="hlo", generator=g)
    g2 = torch.Generator(device="hlo")
    g2.manual_seed(3)
    assert torch.rand(5, device="hlo", generator=g2).cpu().equal(a.cpu())
    state = g.get_state()
    b = torch.randn(3, device="hlo", generator=g).cpu()
    g.set_state(state)
    assert torch.randn(3, device="hlo", generator=g).cpu().equal(b)
    with pytest.raises(
        RuntimeError, match="Expected a 'hlo' device type for generator but found 'cpu'"
    ):
        torch.rand(3, device="hlo", generator=torch.Generator())
    assert g.manual_seed(-1).initial_seed() == 2**64 - 1
    torch.rand(3, device="hlo", generator=g).cpu()


def test_more_random_ops():
    torch.manual_seed(1)
    x = torch.full((1000,), 0.3, device="hlo")
    assert 0.2 < torch.bernoulli(x).mean().item() < 0.4
    assert sorted(torch.randperm(10, device="hlo").tolist()) == list(range(10))
    r = torch.randint(3, 7, (100,), device="hlo").cpu()
    assert r.min() >= 3 and r.max() <= 6 and r.dtype == torch.long
    m = torch.multinomial(torch.tensor([0.0, 1.0, 0.0]).to("hlo"), 4, replacement=True)
    assert m.tolist() == [1, 1, 1, 1]
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0], [2.0, 2.0, 0.0, 0.0]])
    m = torch.multinomial(weights.to("hlo"), 100000, replacement=True).cpu()
    shares = nn.functional.one_hot(m, 4).float().mean(1)
    torch.testing.assert_close(shares, weights / 4, rtol=0, atol=0.01)
    assert (shares[weights == 0] == 0).all()
    assert (
        torch.normal(torch.zeros(3).to("hlo"), 1.0).shape == (3,)
        and torch.normal(0.0, 1.0, (3,), device="hlo").is_hlo
    )
    d = nn.functional.dropout(torch.ones(1000, device="hlo"), 0.5)
    assert set(d.tolist()) == {0.0, 2.0}
    nn.init.kaiming_uniform_(torch.empty(4, 4, device="hlo"))
    nn.init.trunc_normal_(torch.empty(4, 4, device="hlo"))
    nn.init.orthogonal_(torch.empty(4, 4, device="hlo"))


# ---- threads and processes


def test_threads():
    results = {}

    def work(i):
        x = torch.full((8, 8), float(i + 1)).to("hlo").requires_grad_()
        for _ in range(20):
            y = (x @ x.t()).sigmoid().sum()
            y.backward()
        results[i] = x.grad.sum().item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 4
    x = torch.full((8, 8), 1.0).requires_grad_()
    for _ in range(20):
        (x @ x.t()).sigmoid().sum().backward()
    assert results[0] == pytest.approx(x.grad.sum().item(), rel=1e-4)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_exit_with_pending_work():
    assert (
        _run("import torch, torch_hlo; x = torch.ones(3).to('hlo'); y = x + 1; print('end')")
        == "end\n"
    )


def test_import_after_tensors_exist():
    _run(
        "import torch; x = torch.ones(3); m = torch.nn.Linear(3, 3); g = torch.Generator(); import"
        " torch_hlo; m.to('hlo'); y = x.to('hlo')"
    )


def test_fork_after_use():
    _run(
        "import os, torch, torch_hlo; x = torch.ones(3).to('hlo') + 1\npid = os.fork()\nif pid =="
        " 0:\n    y = torch.zeros(2, device='hlo') + 1\n    os._exit(0 if y.is_hlo else 1)\nassert"
        " os.waitpid(pid, 0)[1] == 0"
    )


def test_many_pending_ops():
    x = torch.zeros(2).to("hlo")
    for _ in range(50000):
        x = x + 1
    assert x.tolist() == [50000.0, 50000.0]


def test_dataloader():
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    for workers in (0, 2):
        seen = 0
        for x, y in torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=workers, pin_memory=True
        ):
            seen += x.to("hlo", non_blocking=True).sum().item() + y.to("hlo").sum().item()
        assert seen == 28 + 6


def test_eager_mode(recorded):
    torch_hlo.eager_mode(True)
    try:
        before = recorded.steps
        x = torch.ones(3).to("hlo") + 1
        assert recorded.steps > before and x.tolist() == [2, 2, 2]
    finally:
        torch_hlo.eager_mode(False)


def test_default_dtype_is_part_of_the_key():
    x = torch.arange(3).to("hlo")
    assert (x / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype == torch.float64 and torch.full(
            (2,), 1.5, device="hlo"
        ).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).dtype == torch.float32


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.bool))
@pytest.mark.parametrize("make", (torch.tensor, torch.as_tensor, torch.asarray))
def test_a_tensor_of_a_list_of_tensors(make, dtype):
    """Losses of a loop. C++ reads them without asking the dispatcher."""
    values = [torch.tensor(1, dtype=dtype), torch.tensor(0, dtype=dtype)]
    on_device = [v.to("hlo") for v in values]
    recorded = [v.logical_or(v).to(dtype) for v in on_device]
    for given in (on_device, recorded, [on_device[:], recorded]):
        want = make([values, values] if type(given[0]) is list else values)
        assert make(given).dtype == dtype and torch.equal(make(given), want)
    with pytest.raises(ValueError, match="only one element tensors"):
        make([torch.ones(2, dtype=dtype).to("hlo")])
