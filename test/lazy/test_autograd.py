"""Autograd on hlo tensors: gradients equal the CPU's, errors are PyTorch's own and never end the
process."""

from __future__ import annotations

import math
import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("recorded")


def both(fn, *shapes, dtype=torch.float32):
    """fn(*leaves) -> tensor(s), on the CPU and on hlo: same values, same gradients of the
    leaves."""
    g = torch.Generator().manual_seed(0)
    data = [torch.randn(s, generator=g, dtype=dtype) for s in shapes]
    results = []
    for device in ("cpu", "hlo"):
        leaves = [d.clone().to(device).requires_grad_() for d in data]
        out = fn(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        sum((o * (i + 1)).sum() for i, o in enumerate(out)).backward()
        results.append([*(o.detach().cpu() for o in out), *(leaf.grad.cpu() for leaf in leaves)])
    for e, a in zip(*results):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


CASES = {
    "in_place_on_view": (lambda x: _in_place_on_view(x), (2, 3)),
    "in_place_on_transpose": (lambda x: _in_place_on_transpose(x), (2, 3)),
    "copy_slices": (lambda x: _copy_slices(x), (3,)),
    "linear": (lambda x, w, b: F.linear(x, w, b), (2, 4, 3), (5, 3), (5,)),
    "linear_vector": (lambda x, w: F.linear(x, w), (3,), (5, 3)),
    "matmul": (lambda x, w: torch.matmul(x, w), (2, 4, 3), (2, 3, 5)),
    "conv": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2),
        (2, 3, 8, 8),
        (4, 3, 3, 3),
        (4,),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (3, 4), (4,), (4,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), (3, 4), (4,)),
    "rms_norm_dims": (lambda x: F.rms_norm(x, (3, 4)), (2, 3, 4)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        (3, 4),
        (4,),
        (4,),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5), (4,), (4,)),
    "softmax": (lambda x: F.softmax(x, -1) * F.log_softmax(x, -1), (3, 4)),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3]).to(x.device)),
        (3, 4),
    ),
    "max_pool": (lambda x: F.max_pool2d(x, 2), (2, 3, 4, 4)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (2, 2, 3, 4),
        (2, 2, 5, 4),
        (2, 2, 5, 4),
    ),
    "attention_causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (2, 2, 3, 4),
        (2, 2, 3, 4),
        (2, 2, 3, 4),
    ),
    "attention_mask": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, torch.tensor([[True, False, True]] * 3).to(q.device)
        ),
        (2, 2, 3, 4),
        (2, 2, 3, 4),
        (2, 2, 3, 4),
    ),
    "attention_bias": (
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b, scale=0.3),
        (2, 2, 3, 4),
        (2, 2, 3, 4),
        (2, 2, 3, 4),
        (1, 2, 3, 3),
    ),
    "attention_gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (2, 4, 3, 4),
        (2, 2, 3, 4),
        (2, 2, 3, 4),
    ),
    "attention_3d": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (2, 3, 4),
        (2, 3, 4),
        (2, 3, 4),
    ),
    "embedding": (
        lambda w: F.embedding(torch.tensor([[1, 2], [0, 1]]).to(w.device), w),
        (4, 3),
    ),
    "index": (lambda x: x[torch.tensor([0, 2, 0]).to(x.device)] ** 2, (3, 2)),
    "mask": (lambda x: x[x > 0].exp(), (5,)),
    "where": (lambda x, y: torch.where(x > y, x * 2, y.sin()), (4,), (4,)),
    "cat_split": (lambda x, y: tuple(torch.cat([x, y]).split(2)), (3, 2), (3, 2)),
    "cumsum": (lambda x: x.cumsum(0).tanh().var(1), (3, 4)),
    "norms": (
        lambda x: x.norm() + x.norm(1) + torch.linalg.vector_norm(x, 3, dim=1).sum(),
        (3, 4),
    ),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->ik", x, y), (2, 3, 4), (2, 4, 5)),
    "fallback": (
        lambda x: torch.linalg.inv(x + 3 * torch.eye(3, device=x.device)),
        (3, 3),
    ),
    "complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(x).exp() * 1j).square(),
        (3, 2),
    ),
    "fft": (lambda x: torch.fft.rfft(x).abs(), (2, 8)),
    "gelu_etc": (
        lambda x: (
            F.gelu(x)
            + F.silu(x)
            + F.elu(x)
            + F.softplus(x)
            + F.leaky_relu(x)
            + F.hardtanh(x)
            + F.relu6(x)
        ),
        (5,),
    ),
}


def _in_place_on_view(x):
    y = x * 1
    y[0].mul_(2)
    y.view(-1)[::2] = 0
    return y**2


def _in_place_on_transpose(x):
    y = x * 1
    v = y.t()
    v[1].mul_(3)
    v.exp_()
    return y * v.t()


def _copy_slices(x):
    o = x.new_zeros(2, 3)
    o[1] = x * 2
    return o * o


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_gradients(name):
    fn, *shapes = CASES[name]
    both(fn, *shapes)


def test_version_counters():
    x = torch.ones(3).to("hlo").requires_grad_()
    y = x.exp()
    assert y._version == 0
    y[0].add_(1)
    assert y._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.add_(1)
    with torch.no_grad():
        x.add_(1)
    assert x.detach()._version == x._version and x.data._version == 0


class Boom(Exception):
    pass


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise Boom("in backward")


def _raise(g):
    raise Boom("in a hook")


def test_errors_in_backward_surface():
    for _ in range(2):
        x = torch.ones(3).to("hlo").requires_grad_()
        with pytest.raises(Boom, match="in backward"):
            _Bad.apply(x).sum().backward()
        y = x * 2
        y.register_hook(_raise)
        with pytest.raises(Boom, match="in a hook") as caught:
            (y * y).sum().backward()
        assert any(f.name == "_raise" for f in caught.traceback)
        with pytest.raises(Boom):
            torch.autograd.grad(_Bad.apply(x * 2).sum(), x)
        x.register_post_accumulate_grad_hook(_raise)
        with pytest.raises(Boom):
            (x * 2).sum().backward()
    z = torch.ones(2).to("hlo").requires_grad_()
    with pytest.raises(Boom):
        checkpoint(lambda t: _Bad.apply(t * 2), z, use_reentrant=True).sum().backward()
    with pytest.raises(Boom):
        checkpoint(lambda t: _Bad.apply(t * 2), z, use_reentrant=False).sum().backward()
    (z * 3).sum().backward()
    assert z.grad.tolist() == [3, 3]


def test_errors_do_not_keep_tensors_alive():
    import gc
    import weakref

    x = torch.ones(3).to("hlo").requires_grad_()
    alive = weakref.ref(x._storage)
    try:
        _Bad.apply(x).sum().backward()
    except Boom:
        pass
    del x
    gc.collect()
    assert alive() is None


def test_backward_runs_where_it_is_called():
    threads = []
    x = torch.randn(3, device="hlo", requires_grad=True)
    y = x.exp()
    y.register_hook(lambda g: threads.append(threading.get_ident()))
    y.sum().backward()
    assert threads == [threading.get_ident()]
    assert torch._C._is_multithreading_enabled()  # for the graphs of other devices
    y = x.exp()
    y.register_hook(_raise)
    with pytest.raises(Boom):
        y.sum().backward()
    assert torch._C._is_multithreading_enabled()


def test_gradients_by_torch_func_run_where_they_are_taken():
    """The transforms wrap the roots. Another thread numbers the nodes of the graphs that it makes
    by itself: the order of second derivatives changed from call to call."""
    threads = []

    def f(x):
        y = x.exp()
        y.register_hook(lambda g: threads.append(threading.get_ident()))
        return y.sum()

    x = torch.ones(3, device="hlo", requires_grad=True)
    (second,) = torch.autograd.grad(
        torch.func.vmap(torch.func.grad(f))(torch.stack([x, x])).sum(), x
    )
    assert set(threads) == {threading.get_ident()}
    assert second.tolist() == pytest.approx([2 * math.e] * 3)


def test_interrupts_end_backward(request):
    x = torch.randn(3, device="hlo", requires_grad=True)
    # a shell's background jobs ignore the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    y = x.exp()
    y.register_hook(lambda g: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        (y * 2).sum().backward()
    assert x.grad is None
    assert torch._C._is_multithreading_enabled()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_backward_twice_and_retain():
    x = torch.ones(3).to("hlo").requires_grad_()
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [4, 4, 4]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_double_backward():
    x = torch.tensor([1.0, 2.0, 3.0]).to("hlo").requires_grad_()
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert h.tolist() == [6, 12, 18]
    m = nn.Linear(3, 2).to("hlo")
    (g,) = torch.autograd.grad(m(x).tanh().sum(), x, create_graph=True)
    g.square().sum().backward()
    c = nn.Linear(3, 2)
    c.load_state_dict(m.state_dict())
    xc = x.detach().cpu().requires_grad_()
    (gc,) = torch.autograd.grad(c(xc).tanh().sum(), xc, create_graph=True)
    gc.square().sum().backward()
    torch.testing.assert_close(m.weight.grad.cpu(), c.weight.grad)


def test_hooks():
    seen = []
    m = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to("hlo")
    m.register_forward_pre_hook(lambda mod, i: seen.append("pre"))
    m.register_forward_hook(lambda mod, i, o: seen.append("forward"))
    m.register_full_backward_hook(lambda mod, gi, go: seen.append("backward"))
    x = torch.ones(1, 2).to("hlo").requires_grad_()
    x.register_hook(lambda g: g * 10)
    m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    m(x).sum().backward()
    assert seen == ["pre", "forward", "accumulated", "backward"] or set(seen) == {
        "pre",
        "forward",
        "accumulated",
        "backward",
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_restores_random_state(reentrant):
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to("hlo")
    x = torch.ones(2, 4).to("hlo").requires_grad_()
    grads = []
    for f in (lambda t: m(t), lambda t: checkpoint(m, t, use_reentrant=reentrant)):
        torch.manual_seed(3)
        m.zero_grad()
        f(x).square().sum().backward()
        grads.append(m[0].weight.grad.cpu().clone())
    assert grads[0].equal(grads[1])


def test_inference_mode_and_no_grad():
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to("hlo")
    x = torch.randn(2, 4)
    with torch.inference_mode():
        a = m(x.to("hlo"))
        assert a.is_inference()
        a = a.reshape(4, 2).transpose(0, 1).flatten()
        q = torch.randn(1, 2, 3, 4).to("hlo")
        F.scaled_dot_product_attention(q, q, q).cpu()
    with torch.no_grad():
        b = m(x.to("hlo"))
        assert not b.requires_grad
    assert a.view(2, 4).t().reshape(2, 4).numel() == b.numel()


VIEWS_OF_X = [
    lambda x: x[None],
    lambda x: x.detach(),
    lambda x: x.t().reshape(3, 4),
    lambda x: x.t(),
    lambda x: x[1:],
    lambda x: x.unbind(0)[1],
    lambda x: x.chunk(2, 1)[0],
    lambda x: x.as_strided((2, 2), (3, 1)),
    lambda x: x.real,
    lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj(),
]


@pytest.mark.parametrize("view", VIEWS_OF_X)
def test_views_under_inference_mode(view):
    """A view of a tensor from outside is a normal tensor, written in place through the same version
    counter; one of a tensor made inside is not."""
    seen = []
    for device in ("cpu", "hlo"):
        x = torch.arange(12.0).reshape(3, 4).to(device)
        with torch.inference_mode():
            v, w = view(x), view(x + 1)
            flags = v.is_inference(), w.is_inference()
            if not v.is_complex():
                v.mul_(2)
                w.add_(1)
        seen.append((flags, x._version, x.tolist(), w.cpu().tolist()))
    assert seen[0] == seen[1]


A, B, LABELS = torch.randn(6, 4), torch.rand(6, 4), torch.tensor([0, 3, 1, 2, 2, 0])
COMPOSITES = [
    *[lambda a, b, y, r=r: F.nll_loss(a, y, reduction=r) for r in ("sum", "none", "mean")],
    *[
        lambda a, b, y, r=r: F.cross_entropy(a, y, reduction=r, label_smoothing=0.1)
        for r in ("sum", "none")
    ],
    lambda a, b, y: a.std(False),
    lambda a, b, y: a.var(False),
    lambda a, b, y: a.std(1, False, True),
    lambda a, b, y: torch.var_mean(a, 0, False)[0],
    lambda a, b, y: torch.std_mean(a, False)[0],
    lambda a, b, y: F.hinge_embedding_loss(a, b.sign(), 0.5, reduction="sum"),
    lambda a, b, y: F.selu(a),
    lambda a, b, y: F.prelu(a, b[0]),
    lambda a, b, y: F.kl_div(a.log_softmax(1), b, reduction="sum"),
    lambda a, b, y: F.pdist(a),
    lambda a, b, y: a.mT @ b,
    lambda a, b, y: torch.fft.rfft(a, 5, 1, "ortho").abs(),
    lambda a, b, y: F.binary_cross_entropy_with_logits(a, b, reduction="sum"),
    lambda a, b, y: F.relu6(a * 5),
    lambda a, b, y: F.cosine_similarity(a, b),
    lambda a, b, y: F.pairwise_distance(a, b, 1.0),
    lambda a, b, y: torch.where(a > 0, 1.0, b),
    lambda a, b, y: a.float_power(2.0),
    lambda a, b, y: F.triplet_margin_loss(a, b, a + b, reduction="none"),
    lambda a, b, y: F.margin_ranking_loss(a, b, b.sign(), 0.1, reduction="sum"),
    lambda a, b, y: F.poisson_nll_loss(a, b, True, True, None, 1e-8, None, "sum"),
    lambda a, b, y: a.nansum(0),
    lambda a, b, y: torch.einsum("ij,kj->ik", a, b),
    lambda a, b, y: F.interpolate(a[None, None], scale_factor=2, mode="bicubic"),
    lambda a, b, y: torch.tensordot(a, b, 2),
    lambda a, b, y: a.diff(dim=1),
]


@pytest.mark.parametrize("f", COMPOSITES)
def test_composite_ops_under_inference_mode(f):
    """Ops made of others arrive whole there."""
    with torch.inference_mode():
        expected, got = (
            f(A, B, LABELS),
            f(A.to("hlo"), B.to("hlo"), LABELS.to("hlo")).cpu(),
        )
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_functional_transforms():
    w = torch.randn(3, 3)
    x = torch.randn(5, 3)

    def f(w, x):
        return F.linear(x, w).tanh().sum()

    def results(wd, xd):
        return [
            torch.func.grad(f)(wd, xd),
            torch.func.vmap(lambda v: f(wd, v))(xd),
            torch.func.vmap(torch.func.grad(f), (None, 0))(wd, xd),
            torch.func.jvp(lambda v: F.linear(v, wd).sin(), (xd,), (torch.ones_like(xd),))[1],
            torch.func.jacrev(lambda v: F.linear(v, wd))(xd[0]),
            torch.func.jacfwd(lambda v: v.sin())(xd[0]),
            torch.func.hessian(lambda v: (v**3).sum())(xd[0]),
        ]

    for e, a in zip(results(w, x), results(w.to("hlo"), x.to("hlo"))):
        torch.testing.assert_close(a.cpu(), e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_recurrent(cell):
    m = getattr(nn, cell)(4, 5, num_layers=2, bidirectional=True)
    d = getattr(nn, cell)(4, 5, num_layers=2, bidirectional=True)
    d.load_state_dict(m.state_dict())
    d.to("hlo")
    x = torch.randn(3, 2, 4)
    a, b = m(x)[0], d(x.to("hlo"))[0]
    a.square().sum().backward()
    b.square().sum().backward()
    torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d.weight_ih_l0.grad.cpu(), m.weight_ih_l0.grad, rtol=1e-4, atol=1e-5)
    one = getattr(nn, cell + "Cell")(4, 5)
    two = getattr(nn, cell + "Cell")(4, 5)
    two.load_state_dict(one.state_dict())
    e, g = one(x[0]), two.to("hlo")(x[0].to("hlo"))
    torch.testing.assert_close(
        (g[0] if cell == "LSTM" else g).detach().cpu(),
        (e[0] if cell == "LSTM" else e).detach(),
    )


def test_packed_sequences():
    m, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    lengths = torch.tensor([5, 3])
    results = []
    for device in ("cpu", "hlo"):
        d = nn.LSTM(3, 4)
        d.load_state_dict(m.state_dict())
        d.to(device)
        xd = x.to(device).detach().requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(xd, lengths)
        out, _ = nn.utils.rnn.pad_packed_sequence(d(packed)[0])
        out.square().sum().backward()
        results.append((out.detach().cpu(), xd.grad.cpu()))
    for e, a in zip(*results):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_gradients_across_devices():
    x = torch.ones(3, requires_grad=True)
    (x.to("hlo") * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2] and x.grad.device.type == "cpu"
    y = torch.ones(3).to("hlo").requires_grad_()
    (y.cpu() * 3).sum().backward()
    assert y.grad.tolist() == [3, 3, 3] and y.grad.is_hlo


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
def test_dispatch_modes_see_composites_once(grad):
    """What goes around PyTorch's dispatcher when nobody looks goes through it when somebody
    does."""
    x, w = (
        torch.randn(2, 4, device="hlo"),
        torch.randn(3, 4, device="hlo", requires_grad=True),
    )
    q = torch.randn(1, 2, 3, 4, device="hlo")
    seen = _Seen()
    with torch.set_grad_enabled(grad):
        plain = (
            F.linear(x, w),
            F.rms_norm(x, (4,)),
            F.scaled_dot_product_attention(q, q, q),
        )
        with seen:
            watched = (
                F.linear(x, w),
                F.rms_norm(x, (4,)),
                F.scaled_dot_product_attention(q, q, q),
            )
    wanted = (
        "linear",
        "_fused_rms_norm",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    assert [
        sum(op is getattr(torch.ops.aten, name).default for op in seen.ops) for name in wanted
    ] == [1, 1, 1]
    for a, b in zip(plain, watched):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu())
    assert plain[0].requires_grad == grad


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_gradients_of_activations_are_one_operation(name):
    """PyTorch takes them apart into nine and twelve operations where a device has none."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    leaf, seen = x.to("hlo").requires_grad_(), []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    y = getattr(F, name)(leaf)
    with Seen():
        (found,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert [str(f) for f in seen if "_backward" in str(f)] == [f"aten.{name}_backward.default"]
    assert not any("sigmoid" in str(f) for f in seen)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(getattr(F, name)(x).sum(), x)
    torch.testing.assert_close(found.cpu(), expected)
