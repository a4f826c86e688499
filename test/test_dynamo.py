"""torch.compile(backend="hlo") on CPU tensors: values, gradients, strides and mutations like eager;
one program for all sizes."""

import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn

from test.marks import needs
from torch_hlo import metrics
from torch_hlo.dynamo import backend
from torch_hlo.lazy.run import executor

hop = torch.ops.higher_order


@pytest.fixture(autouse=True)
def fresh():
    dynamo.reset()
    torch.manual_seed(0)


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="hlo", fullgraph=True, **kwargs)


def compiles(fn) -> int:
    before = metrics.counter_value("UncachedCompile") or 0
    fn()
    executor.drain_compiler()
    return (metrics.counter_value("UncachedCompile") or 0) - before


def same(got, want, tol=1e-5, strides=True):
    for g, w in zip(
        torch.utils._pytree.tree_leaves(got),
        torch.utils._pytree.tree_leaves(want),
        strict=True,
    ):
        torch.testing.assert_close(g, w, rtol=tol, atol=tol)
        if strides and isinstance(g, torch.Tensor):
            assert g.stride() == w.stride()


def check(fn, *inputs, tol=1e-5, **kwargs):
    same(compiled(fn, **kwargs)(*inputs), fn(*inputs), tol)


def trains_like_eager(model, inputs, tol=1e-4, **kwargs):
    """Outputs and gradients of the compiled model for all inputs."""
    fast = torch.compile(model, backend="hlo", **kwargs)
    for x in inputs:
        results = []
        for m in (fast, model):
            model.zero_grad()
            y = m(x)
            y.square().sum().backward()
            results.append((y, [p.grad for p in model.parameters()]))
        same(*results, tol, strides=False)


def test_found_without_importing_torch_hlo():
    code = (
        "import torch; f = torch.compile(lambda x: x + 1, backend='hlo'); assert"
        " f(torch.ones(2)).tolist() == [2, 2]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- memory


def test_input_mutation():
    def fn(x, y):
        x.add_(y)
        x.mul_(2)
        return x.sum()

    a, b, y = torch.ones(4, 5), torch.ones(4, 5), torch.randn(5)
    same(compiled(fn)(a, y), fn(b, y))
    same(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6),
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(8, 12)[::2, ::2],
        lambda: torch.randn(25)[1:],
    ],
)
def test_mutation_through_views_of_any_layout(make):
    def fn(x):
        x[..., 0].zero_()
        x.add_(1)
        return x * 2

    a = make()
    b = a.clone(memory_format=torch.preserve_format)
    same(compiled(fn)(a), fn(b), strides=False)
    same(a, b, strides=False)


def test_outputs_alias_like_eager():
    def fn(x):
        y = x * 2
        return y, y.t(), y[0], x.view(-1), y[:, ::2], y.expand(3, 4, 5)

    x = torch.randn(4, 5)
    same(compiled(fn)(x), fn(x))
    assert compiled(fn)(x)[3].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4, 5),
        lambda: torch.randn(3, 4, 5).permute(2, 1, 0),
        lambda: torch.randn(3, 8, 5)[:, ::2],
    ],
)
def test_strides(make, dynamic):
    def fn(x):
        return (
            (x + 1).permute(2, 0, 1).clone(),
            x.transpose(0, 1) * 3,
            x.mT.contiguous(),
        )

    check(fn, make(), dynamic=dynamic)


def test_channels_last():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        check(
            model,
            torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
            tol=1e-4,
        )


# ---- sizes


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.arange(x.shape[0]) * 2,
        lambda x: torch.cat([x, x[1:]]),
        lambda x: x.view(-1, 2).sum(1),
        lambda x: x * x.shape[0],
        lambda x: torch.full((x.shape[0],), 2.0),
        lambda x: x.softmax(0),
        lambda x: x.cumsum(0),
        lambda x: x.argmax(0),
        lambda x: F.pad(x, (1, 2)),
        lambda x: x.flip(0),
        lambda x: x.unsqueeze(0).repeat(2, 1, 1),
        lambda x: x.triu(),
        lambda x: x.sort(0)[0],
        lambda x: x @ x.t(),
        lambda x: x.var(0),
        lambda x: x / x.shape[0] ** 0.5,
        lambda x: F.layer_norm(x, (x.shape[1],)),
        lambda x: x.roll(1, 0),
    ],
)
def test_one_program_for_all_sizes(fn):
    fast = compiled(fn, dynamic=True)

    def use():
        for n in (10, 6, 8, 13, 40):  # not 4: Dynamo takes equal sizes for one
            x = torch.randn(n, 4)
            same(fast(x), fn(x), 1e-4)

    assert compiles(use) == 1


def test_automatic_dynamic_training():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    assert (
        compiles(lambda: trains_like_eager(model, [torch.randn(n, 8) for n in (3, 7, 2, 33, 100)]))
        == 4
    )
    trains_like_eager(model, [torch.randn(n, 8) for n in (1, 0)])


def test_convolutions_of_any_size():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    trains_like_eager(
        model,
        [torch.randn(b, 3, s, s) for b, s in ((2, 16), (3, 20), (4, 12))],
        1e-3,
        dynamic=True,
    )


def test_attention_of_any_length():
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    fast = compiled(fn, dynamic=True)
    for length in (4, 9, 17):
        q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for _ in range(3))
        results = []
        for f in (fast, fn):
            y = f(q, k, v)
            results.append((y, torch.autograd.grad(y.square().sum(), (q, k, v))))
        same(*results, 1e-4, strides=False)


def test_pieces_of_a_split_add_up():
    def fn(x, sizes, index, base):
        parts = x.split(sizes.tolist(), 0)
        return base.index_add(0, index, torch.cat([p * (i + 1) for i, p in enumerate(parts)]))

    compiled = torch.compile(fn, backend="hlo")
    for sizes in ([1, 2, 5], [2, 3, 3], [4, 2, 2], [3, 1, 4]):
        args = (
            torch.randn(8, 4),
            torch.tensor(sizes),
            torch.arange(8),
            torch.zeros(8, 4),
        )
        torch.testing.assert_close(compiled(*args), fn(*args))


def test_sizes_that_only_guards_make_equal():
    """Slices of every other pixel meet in a concatenation: Dynamo guards that the length is even,
    which the sizes' expressions do not say."""

    def focus(x):
        return (
            torch.cat(
                [
                    x[..., ::2, ::2],
                    x[..., 1::2, ::2],
                    x[..., ::2, 1::2],
                    x[..., 1::2, 1::2],
                ],
                1,
            )
            * 2
        )

    compiled = torch.compile(focus, backend="hlo", dynamic=True)
    for n in (8, 12):
        x = torch.randn(2, 3, n, n)
        torch.testing.assert_close(compiled(x), focus(x))


def test_lengths_of_transforms_are_fixed():
    """Lengths of Fourier transforms have to be known: what varies beside them stays symbolic."""
    programs = []

    def fn(x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=x.shape[1], dim=1).tanh()

    def counting(graph_module, example_inputs):
        programs.append(1)
        return backend.hlo(graph_module, example_inputs)

    compiled = torch.compile(fn, backend=counting)
    for shape in ((2, 16), (3, 16), (3, 24), (5, 24), (6, 24)):
        x = torch.randn(shape, requires_grad=True)
        y = x.detach().requires_grad_()
        got, want = compiled(x), fn(y)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), x),
            torch.autograd.grad(want.sum(), y),
            rtol=1e-4,
            atol=1e-5,
        )
    assert len(programs) <= 4


def test_mark_dynamic():
    fast = compiled(lambda x: x.sum(1) * x.shape[0])

    def use():
        for n in (5, 6, 9):
            x = torch.randn(n, 3)
            dynamo.mark_dynamic(x, 0)
            same(fast(x), x.sum(1) * n)

    assert compiles(use) == 1


def test_numbers_as_inputs():
    def fn(x, s):
        return x * s + s

    fast = torch.compile(fn, backend="hlo")
    for s in (1.5, 2.5, 3.5, 2, 3, 4):
        same(fast(torch.ones(3), s), fn(torch.ones(3), s))


# ---- training


def test_autocast():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))

    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    check(fn, torch.randn(4, 8), tol=3e-2)


def test_dropout_repeats_with_the_seed():
    fast = compiled(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5), torch.rand(3)))
    x = torch.ones(1000)
    torch.manual_seed(1)
    a, b = fast(x), fast(x)
    torch.manual_seed(1)
    c = fast(x)
    assert (
        torch.equal(a[0], c[0])
        and torch.equal(a[2], c[2])
        and not torch.equal(a[0], b[0])
        and not torch.equal(a[0], a[1])
    )
    assert 300 < (a[0] == 0).sum() < 700


def test_dropout_backward_uses_the_same_mask():
    x = torch.ones(1000, requires_grad=True)
    y = compiled(nn.Dropout(0.5))(x)
    y.sum().backward()
    same(x.grad, y.detach())


def test_activation_checkpointing_with_dropout():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(8, 8)
    fast = compiled(
        lambda x: (
            checkpoint(lambda x: F.dropout(torch.tanh(layer(x)), 0.5), x, use_reentrant=False) * 2
        )
    )
    x = torch.ones(4, 8, requires_grad=True)
    y = fast(x)
    y.sum().backward()
    t = torch.tanh(layer(x.detach()))
    same(x.grad, ((y != 0) * 4 * (1 - t * t)) @ layer.weight, strides=False)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizer_step(kind):
    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pair[1].load_state_dict(pair[0].state_dict())
    optimizers = [kind(m.parameters(), lr=0.1) for m in pair]
    steps = [torch.compile(optimizers[0].step, backend="hlo"), optimizers[1].step]
    for _ in range(3):
        x = torch.randn(3, 4)
        for m, step in zip(pair, steps):
            m.zero_grad()
            m(x).square().sum().backward()
            step()
    same(list(pair[0].parameters()), list(pair[1].parameters()), 1e-4)


# ---- custom operators, graph breaks, options


@torch.library.custom_op("torch_hlo_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * k + 1


scaled.register_fake(lambda x, k: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, g: (g * ctx.k, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]),
)


@torch.library.custom_op("torch_hlo_test::increment", mutates_args=("x",))
def increment(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(5,), (), (0, 3)])
def test_custom_operator(dtype, dims):
    def fn(x):
        return scaled(x * 2, 3).sin()

    x = torch.randn(dims, dtype=dtype, requires_grad=True)
    check(fn, x, tol=1e-2)
    grads = [torch.autograd.grad(f(x).sum(), x) for f in (compiled(fn), fn)]
    same(*grads, tol=1e-1 if dtype == torch.bfloat16 else 1e-5)


def test_custom_operator_that_writes():
    def fn(x):
        y = x * 2
        increment(y)
        increment(x)
        return y + x

    a, b = torch.ones(5), torch.ones(5)
    same(compiled(fn)(a), fn(b))
    same(a, b)


def test_custom_operator_that_fails_raises_its_error():
    @torch.library.custom_op("torch_hlo_test::failing", mutates_args=())
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no such luck")

    failing.register_fake(lambda x: torch.empty_like(x))
    x = torch.ones(3)
    with pytest.raises(ArithmeticError, match="no such luck"):
        compiled(lambda x: x.add_(1) and failing(x) if False else failing(x.add_(1)))(x)


def test_graph_breaks():
    def fn(x):
        y = x * 2
        dynamo.graph_break()
        return (y + 1 if y.sum() > 0 else y - 1).sin()

    for sign in (1, -1):
        same(
            torch.compile(fn, backend="hlo")(torch.ones(3) * sign),
            fn(torch.ones(3) * sign),
        )


@pytest.mark.parametrize("bad", [{"nope": 1}, {"fallback": "sometimes"}, {"fallback": 3}])
def test_bad_options(bad):
    with pytest.raises(
        Exception, match="torch.compile\\(backend='hlo'\\).*(unknown option|expected)"
    ):
        torch.compile(lambda x: x + 1, backend="hlo", options=bad)(torch.ones(2))


def test_options():
    assert set(backend.checked({"name": "mine"})) == set(backend.OPTIONS)
    same(
        torch.compile(
            lambda x: x + 1,
            backend="hlo",
            options={"name": "mine", "fallback": "error"},
        )(torch.ones(2)),
        torch.full((2,), 2.0),
    )


# ---- higher-order operators


def test_cond():
    def fn(p, x):
        return torch.cond(p, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))

    for p in (True, False):
        check(fn, torch.tensor(p), torch.randn(4))


def test_cond_gradient():
    def fn(p, x):
        return torch.cond(p, lambda x: x.sin() * 2, lambda x: x * x, (x,))

    x = torch.randn(4, requires_grad=True)
    for p in (torch.tensor(True), torch.tensor(False)):
        same(*(torch.autograd.grad(f(p, x).sum(), x) for f in (compiled(fn), fn)))


def test_while_loop_is_one_loop():
    from torch._higher_order_ops.while_loop import while_loop

    def fn(x):
        return while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * 2 + 1), (torch.tensor(0), x))

    check(fn, torch.randn(4))


def test_scan():
    from torch._higher_order_ops.scan import scan

    def fn(c, x):
        return scan(lambda c, x: (c * 0.5 + x, (c + x).sin()), c, x, dim=0)

    check(fn, torch.randn(4), torch.randn(6, 4))
    fast = compiled(fn, dynamic=True)
    for n in (3, 7):
        c, x = torch.randn(4), torch.randn(n, 4)
        same(fast(c, x), fn(c, x))


def test_numbers_that_change_may_be_negative_or_large():
    def fn(x, i):
        scaled = torch._foreach_mul([x, x], [i, i + 1])[1]
        return x * (i - 10) + (3 - i), torch.add(x, x, alpha=i), scaled

    fast, x = compiled(fn), torch.randn(4)

    def run():
        for i in (5, 7, 300, -300, 2**33 + 1, -(2**40)):
            same(fast(x, i), fn(x, i))

    assert compiles(run) <= 2

    fast = compiled(lambda x, i: x**i)
    for i in (3, 5, 6):
        same(fast(x, i), x**i)
    with pytest.raises(ValueError, match="takes the number -2 for a size"):
        fast(x, -2)

    def by_size(x):
        return F.hardshrink(x, x.shape[0]) * (x.shape[0] - 10)

    fast = compiled(by_size, dynamic=True)
    for n in (4, 300, 7):
        x = torch.randn(n, 4) * 10
        same(fast(x), by_size(x))


def test_map():
    from torch._higher_order_ops.map import map as hmap

    check(
        lambda x, y: hmap(lambda a, y: a.sin() + y, x, y),
        torch.randn(6, 4),
        torch.randn(4),
    )


def test_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.01)

    check(fn, *(torch.randn(2, 2, 16, 8) for _ in range(3)), tol=1e-4)


# ---- tensors of the hlo device


def test_hlo_tensors():
    import copy

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    twin = copy.deepcopy(model).to("hlo")
    fast = compiled(twin)
    for n in (3, 5, 6, 9):
        x = torch.randn(n, 4)
        for m, f, v in ((model, model, x), (twin, fast, x.to("hlo"))):
            m.zero_grad()
            y = f(v)
            y.square().sum().backward()
        assert y.device.type == "hlo"
        same(
            [y.cpu(), *[p.grad.cpu() for p in twin.parameters()]],
            [model(x), *[p.grad for p in model.parameters()]],
            strides=False,
        )


def test_hlo_tensors_written_to():
    def fn(x):
        x.add_(1)
        return x.t(), x * 2

    a = torch.randn(3, 4)
    b = a.to("hlo")
    same([r.cpu() for r in compiled(fn)(b)], fn(a), strides=False)
    same(b.cpu(), a)


# ---- mistakes


def test_sizes_that_depend_on_values_name_the_line():
    with (
        dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(Exception, match="nonzero.*test_dynamo.py.*depends on values"),
    ):
        compiled(lambda x: x.nonzero() * 2)(torch.ones(3))


def test_number_carried_by_a_loop():
    from torch._higher_order_ops.while_loop import while_loop

    with pytest.raises(Exception, match="make it a tensor"):
        compiled(lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (0, x)))(
            torch.ones(2)
        )


def test_swapped_inputs():
    def swap(x, y):
        a = x.clone()
        x.copy_(y)
        y.copy_(a)
        return x + y

    x, y = torch.ones(2), torch.zeros(2)
    same(compiled(swap)(x, y), torch.ones(2))
    same((x, y), (torch.zeros(2), torch.ones(2)))


def test_sizes_that_comparisons_determine():
    """A view that drops a dimension leaves its size between two bounds: s0//4 >= 8 and s0//4 - 7 <=
    1."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1),
        nn.Conv2d(4, 4, 4, 2, 1),
        nn.Conv2d(4, 1, 8),
        nn.Sigmoid(),
        nn.Flatten(),
    )
    trains_like_eager(model, [torch.randn(4, 1, 32, 32), torch.randn(6, 1, 32, 32)], dynamic=True)


def test_checks_of_values_raise():
    check(lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3)), torch.randn(2, 3, 3))
    root = compiled(lambda x: torch.linalg.cholesky(x) * 2)
    same(root(torch.eye(3)), 2 * torch.eye(3), strides=False)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        root(-torch.eye(3))

    def log(x):
        torch._assert_async((x > 0).all(), "x is not positive")
        return x.log()

    log = compiled(log)
    same(log(torch.ones(2)), torch.zeros(2))
    with pytest.raises(RuntimeError, match="x is not positive"):
        log(-torch.ones(2))


def test_large_results_take_pages_that_tensors_have_left():
    f = torch.compile(lambda x: x * 2 + 1, backend="hlo")
    x = torch.randn(1024, 1024)
    first, second = f(x), f(x)
    where = first.data_ptr()
    assert second.data_ptr() != where and not first._is_view()
    view = first[1:]
    del first
    third = f(x)  # the view keeps the pages
    assert third.data_ptr() not in (where, second.data_ptr())
    torch.testing.assert_close(view, x[1:] * 2 + 1)
    del view
    assert f(x).data_ptr() == where
    for y in (second, third):
        torch.testing.assert_close(y, x * 2 + 1)
    x.requires_grad_()
    y = f(x)
    y.add_(1)  # no view of something that autograd would have to follow
    y.sum().backward()
    assert (x.grad == 2).all()


def test_who_calls_first_gets_the_error_of_compiling(monkeypatch):
    def fails(caller, module, line):
        raise ArithmeticError("no such luck")

    monkeypatch.setattr(backend, "_compile", fails)
    f = compiled(lambda x: x * 2)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="no such luck"):
            f(torch.ones(3))


@needs("no_autograd")
def test_dynamo_ends_while_programs_are_compiled(monkeypatch):
    ended, compile = threading.Event(), backend._compile
    programs = []

    def after_dynamo(caller, module, line):
        programs.append(caller)
        assert ended.wait(100)
        return compile(caller, module, line)

    monkeypatch.setattr(backend, "_compile", after_dynamo)
    dynamo.callback_handler.register_end_callback(lambda _: ended.set())
    x = torch.ones(3, requires_grad=True)
    y = compiled(lambda x: x.exp())(x)
    assert len(programs) == 2
    y.sum().backward()
    same([y.detach(), x.grad], [x.detach().exp()] * 2)


@pytest.mark.parametrize("backend", ["hlo", "aot_eager", "eager"])
def test_functions_on_the_device_make_tensors(backend):
    """Tensors made inside, of Python's numbers and like others, in whole graphs."""

    @torch.compile(backend=backend, fullgraph=True)
    def f(x):
        y = torch.tensor([1.0, 2.0], device="hlo") + torch.arange(2, device=x.device)
        return (x * y).to("hlo") + torch.as_tensor(3.0, device="hlo") + x.new_tensor([1.0, 4.0])

    x = torch.randn(2)
    want = x * torch.tensor([1.0, 3.0]) + 3 + torch.tensor([1.0, 4.0])
    torch.testing.assert_close(f(x.to("hlo")).cpu(), want)


def test_views_and_their_bases_on_the_device():
    """Arguments that are views whose base has other strides, and results that alias arguments."""

    @torch.compile(backend="hlo", fullgraph=True)
    def f(x, base):
        x.mul_(2)
        return x.t(), base[0], base

    base = torch.arange(12.0).reshape(3, 4)
    there = base.to("hlo")
    column, row, same = f(there[:, 1:3], there)
    want = base.clone()
    want[:, 1:3] *= 2
    assert torch.equal(there.cpu(), want) and torch.equal(row.cpu(), want[0])
    column.zero_()  # a view still
    assert torch.equal(same.cpu(), want * torch.tensor([1.0, 0, 0, 1]))


@pytest.mark.filterwarnings("ignore:.*on the CPU")
@pytest.mark.parametrize("name", ["histogram", "geqrf"])
def test_an_operator_without_a_meta_kernel(name):
    """Dynamo asks what it returns by running it."""

    def function(x):
        results = torch.histogram(x * 2, 4) if name == "histogram" else torch.geqrf(x * 2)
        return [r + 1 for r in results]

    x = torch.arange(16.0).view(4, 4).sin()
    found = torch.compile(function, backend="hlo", fullgraph=True)(x.to("hlo"))
    assert {r.device.type for r in found} == {"hlo"}
    torch.testing.assert_close([r.cpu() for r in found], function(x))
