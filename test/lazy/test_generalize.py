"""One symbolic program for many sizes: few compiles, and never a wrong result, whatever sizes
coincide."""

import random

import pytest
import torch
import torch.nn.functional as F

import torch_hlo
from torch_hlo import config, metrics
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run import generalize

step = session.engine()


@pytest.fixture(autouse=True)
def fresh():
    torch_hlo.sync()
    step.clear_cache()
    with config.override(CACHE=""):  # what is counted is compiled
        yield


def compiles(fn) -> int:
    before = metrics.counter_value("UncachedCompile") or 0
    fn()
    return (metrics.counter_value("UncachedCompile") or 0) - before


def check(fn, *inputs, tol=1e-5):
    """`fn` on hlo equals `fn` on the CPU."""
    want = fn(*inputs)
    got = fn(*[x.to("hlo") if isinstance(x, torch.Tensor) else x for x in inputs])
    torch_hlo.sync()
    for g, w in zip(
        torch.utils._pytree.tree_leaves(got),
        torch.utils._pytree.tree_leaves(want),
        strict=True,
    ):
        torch.testing.assert_close(g.cpu(), w, rtol=tol, atol=tol)


def counts(fn, sizes, make) -> list[int]:
    return [compiles(lambda s=s: check(fn, *make(*s))) for s in sizes]


def test_third_and_later_sizes_compile_nothing():
    def fn(x):
        return F.layer_norm(x, (4,)).softmax(0).sum(1), x.reshape(-1)[:-1] * 2

    assert counts(fn, [(5,), (9,), (23,), (3,), (101,)], lambda n: (torch.randn(n, 4),)) == [
        1,
        1,
        0,
        0,
        0,
    ]


NUMBERS = {
    "arithmetic": lambda x, i: (x + i) * 2 - i // 3,
    "filled": lambda x, i: x * torch.full((4,), i, device=x.device),
    "lists": lambda x, i: torch._foreach_mul([x, x], [i, 7]),
    "keywords": lambda x, i: torch.add(x, x, alpha=2 * i + 3),
    "clamped": lambda x, i: x.clamp(i, i + 3),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.int64))
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_are_inputs(name, dtype):
    """Two compiles, whatever the numbers: negative, 0 and 1, more than 32 bits."""
    x = torch.arange(4).to(dtype)
    numbers = (5, 6, 0, 1, -3, 2**33 + 1, -(2**40), 7)
    assert sum(compiles(lambda i=i: check(NUMBERS[name], x, i)) for i in numbers) == 2


def test_numbers_and_sizes_that_change():
    made = counts(
        lambda x: (x + len(x)).sum() / len(x),
        [(5,), (9,), (23,), (3,), (101,)],
        lambda n: (torch.randn(n, 4),),
    )
    assert made == [1, 1, 0, 0, 0]


def test_numbers_that_do_not_fit_are_still_errors():
    for i in (5, 6, 7):
        check(
            lambda x, i=i: x + torch.full((4,), i, dtype=torch.uint8, device=x.device),
            torch.ones(4),
        )
    with pytest.raises(RuntimeError, match="overflow"):
        torch.full((4,), 300, dtype=torch.uint8, device="hlo")
    y = torch.ones(4).to("hlo")
    for i in (5, 6, 7):
        (y * i).sum().item()
    with pytest.raises((RuntimeError, OverflowError)):
        (y * 2**70).sum().item()


def test_a_size_that_is_negated():
    """Its negative is a number, and no size of an array."""
    sizes = [(5,), (70,), (60,), (300,), (1200,)]
    counts(lambda x: F.hardshrink(x, len(x)), sizes, lambda n: (torch.randn(n, 4) * 40,))


def test_windows_that_a_size_decides():
    """Adaptive pooling into 5: as long as the size, over 5, rounded up, and sometimes one more."""
    found = counts(
        lambda x: F.adaptive_max_pool2d(x, 5),
        [(38,), (19,), (27,), (75,), (12,)],
        lambda n: (torch.randn(2, 3, n, n),),
    )
    assert found == [1, 1, 0, 0, 0]


def test_sizes_zero_and_one_are_compiled_for_themselves():
    def fn(x):
        return (x + x.mean(0, keepdim=True)).exp(), x.sum()

    assert counts(fn, [(5,), (9,), (1,), (0,), (23,), (1,), (0,)], lambda n: (torch.randn(n, 4),))[
        2:
    ] == [1, 1, 0, 0, 0]


def test_size_one_first():
    def fn(x, y):
        return x + y, x * x.shape[0]

    make = lambda n: (torch.randn(n, 4), torch.randn(3, 1, 4))
    assert counts(fn, [(1,), (7,), (9,), (11,), (1,)], make) == [1, 1, 1, 0, 0]


def test_two_sizes_that_are_equal_at_first():
    def fn(x, y):
        return (x @ y).tanh(), x.t() @ x

    make = lambda a, b: (torch.randn(a, b), torch.randn(b, 3))
    assert counts(fn, [(4, 4), (6, 6), (5, 7), (8, 3), (9, 9)], make) == [1, 1, 1, 0, 0]


def test_a_size_that_meets_a_constant():
    def fn(x):
        return torch.cat([x, torch.ones(x.shape[0], 16, device=x.device)], 1), x @ x.t()

    assert counts(fn, [(16,), (12,), (16,), (32,), (17,)], lambda n: (torch.randn(n, 16),)) == [
        1,
        1,
        0,
        0,
        0,
    ]


def tokens(n, k):
    """Batches, the same tokens in one row, and some of their numbers."""
    return torch.randn(4, n, 8), torch.randn(1, 4 * n, 8), torch.randint(4 * n, (k,))


def test_inputs_whose_sizes_belong_together():
    def fn(x, w, i):
        return x.exp() + (w * w.cumsum(2)).reshape(x.shape) + x.reshape(w.shape)[0][i].amax()

    assert counts(fn, [(6, 5), (6, 7), (5, 9), (5, 11), (13, 30), (6, 3)], tokens) == [
        1,
        1,
        1,
        0,
        0,
        0,
    ]


def test_the_likest_instance_is_generalised_where_all_together_are_not():
    def fn(x, w, i):  # sizes of w come first: x's do not follow from them
        return (w * w.cumsum(2)).reshape(x.shape) + x.exp() + x.reshape(w.shape)[0][i].amax()

    assert counts(fn, [(6, 5), (6, 7), (5, 9), (5, 11), (5, 13), (5, 8)], tokens) == [
        1,
        1,
        1,
        1,
        0,
        0,
    ]


def test_integers_that_happen_to_follow_a_size():
    """The slice's length is 2 n for the first two sizes and something else later: the program's
    check notices."""
    length = {4: 8, 5: 10, 6: 7, 7: 9}

    def fn(x, y):
        return x.sum(1), y[: length[x.shape[0]]] * 3

    assert counts(fn, [(n,) for n in (4, 5, 6, 7)], lambda n: (torch.randn(n, 3), torch.randn(40)))[
        :2
    ] == [1, 1]


def test_data_dependent_branch_on_the_size():
    def fn(x):
        return x.cumsum(0) if x.shape[0] % 2 else x.flip(0) * x.shape[0]

    results = counts(fn, [(n,) for n in (4, 5, 6, 7, 8, 9, 10, 11)], lambda n: (torch.randn(n, 3),))
    assert sum(results) <= 4 and results[4:] == [0, 0, 0, 0]


def test_position_as_an_argument():
    """A cache written at a position that no size explains: the position becomes an input of the
    program."""

    def fn(cache, t):
        row = cache[:, t] + 1
        cache = cache.clone()
        cache[:, t] = row * 2
        return cache, cache[:, : t + 1].sum(1)

    results = counts(fn, [(t,) for t in (2, 3, 4, 5, 9, 17)], lambda t: (torch.randn(2, 20, 4), t))
    assert results[3:] == [0, 0, 0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x, i: x[:, i],
        lambda x, i: x[:, i : i + 8] ** 2,
        lambda x, i: x[:, i:] ** 2,
    ],
)
def test_position_of_what_is_read_and_its_gradient(read):
    """Positions that were read from values (`x[:, top[0]]`) go into the gradient's scatter too."""

    def fn(x, i):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(read(x, i).sum(), x)

    x = torch.randn(4, 96)
    assert counts(fn, [(5,), (11,), (23,), (77,), (40,)], lambda i: (x, i)) == [
        1,
        1,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(
    "read",
    [
        lambda x, i: x[:, i],
        lambda x, i: x[:, i] * x[:, -1 - i],
        lambda x, i: x[:, i : i + 8] ** 2,
        lambda x, i: x.roll(i, 1) * x,
        lambda x, i: x.roll((-i, i), (1, 0)) * x,
        lambda x, i: x.roll(-i) * x,
    ],
)
def test_positions_may_be_zero_and_one(read):
    """Crops, shifts and rows drawn at random, or read from values."""

    def fn(x, i):
        x = x.detach().requires_grad_()
        y = read(x, i)
        return y, *torch.autograd.grad(
            (y * torch.arange(y.numel(), device=x.device).view(y.shape)).sum(), x
        )

    x = torch.randn(4, 24)
    assert counts(fn, [(5,), (0,), (1,), (11,), (2,), (3,)], lambda i: (x, i)) == [
        1,
        1,
        0,
        0,
        0,
        0,
    ]


def test_positions_have_nothing_to_do_with_each_other():
    """Two instances explain each of many by another (the next, twice that): the third compiled
    again."""

    def fn(x, *at):
        return sum(x[:, i] * x.roll(i, 1)[:, 0] for i in at)

    x = torch.randn(4, 16)
    drawn = [(3, 4, 5, 6, 9), (5, 6, 7, 8, 2), (0, 9, 13, 1, 4), (15, 2, 7, 0, 11)]
    assert counts(fn, drawn, lambda *at: (x, *at)) == [1, 1, 0, 0]


def test_positions_that_happen_to_stay():
    """Where one of many did not change at first, the program after the next is for all of its
    kind."""

    def fn(x, *at):
        return sum(x[i] * (i + 1) for i in range(2)), *[x.roll(i, 1) for i in at]

    x = torch.randn(4, 16)
    assert counts(
        fn,
        [(3, 4, 5, 6), (5, 4, 5, 8), (0, 9, 5, 1), (15, 4, 7, 11), (1, 2, 3, 4)],
        lambda *at: (x, *at),
    ) == [1, 1, 1, 0, 0]


def test_pieces_of_sizes_that_nothing_explains():
    """A mixture of experts splits its tokens by how many each expert gets."""

    def fn(x, w, *counts):
        x = x.detach().requires_grad_()
        y = torch.cat([torch.tanh(piece @ w[i]) for i, piece in enumerate(x.split(list(counts)))])
        return y, *torch.autograd.grad(y.square().sum(), x)

    x, w = torch.randn(40, 8), torch.randn(4, 8, 8)
    drawn = [
        (10, 10, 10, 10),
        (3, 16, 13, 8),
        (9, 12, 5, 14),
        (20, 2, 14, 4),
        (7, 8, 12, 13),
    ]
    assert counts(fn, drawn, lambda *counts: (x, w, *counts)) == [1, 1, 0, 0, 0]


def test_axis_is_not_a_size():
    def fn(x, axis):
        return x.sum(axis)

    for axis in (2, 3, 0, 1):
        check(fn, torch.randn(3, 4, 5, 6), axis)


def test_why_it_was_not_generalised():
    def fn(x, p):
        return F.max_pool2d(x, p)

    for p in (2, 3):
        check(fn, torch.randn(1, 1, 12, 12), p)
    assert (
        "for these sizes only" in metrics.last_compile_reason()
        and "max_pool" in metrics.last_compile_reason()
    )


def test_training_step_with_donated_parameters():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    twin = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    twin.to("hlo")
    pair = [
        (m, torch.optim.AdamW(m.parameters(), lr=1e-2), d)
        for m, d in ((model, "cpu"), (twin, "hlo"))
    ]
    total = 0
    for n in (5, 6, 7, 16, 8, 31, 4):
        x = torch.randn(n, 8)

        def train(n=n, x=x):
            for m, optimizer, device in pair:
                optimizer.zero_grad()
                m(x.to(device)).pow(2).mean().backward()
                optimizer.step()
            torch_hlo.mark_step(wait=True)

        total += compiles(train)
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5)
    assert total <= 4


def _random_program(rng: random.Random):
    """A function of x[n, m] and y[m, n] built from shape-generic ops."""
    unary = [
        lambda a, n, m: a.exp().clamp(max=10),
        lambda a, n, m: a.softmax(-1),
        lambda a, n, m: a.tanh() + a.mean(0, keepdim=True),
        lambda a, n, m: a.cumsum(0),
        lambda a, n, m: a - a.amax(1, keepdim=True),
        lambda a, n, m: a.flip(1),
        lambda a, n, m: a.roll(1, 0),
        lambda a, n, m: a.sort(1)[0],
        lambda a, n, m: F.pad(a[:, 1:], (1, 0)),
        lambda a, n, m: a.reshape(-1).reshape(a.shape),
        lambda a, n, m: a.t().contiguous().t(),
        lambda a, n, m: torch.cat([a[2:], a[:2]]),
        lambda a, n, m: torch.stack([a, a * 2]).sum(0),
        lambda a, n, m: a * torch.arange(m, device=a.device),
        lambda a, n, m: a.tril(1) + a.triu(),
        lambda a, n, m: a / n,
        lambda a, n, m: a.unsqueeze(1).repeat(1, 2, 1).sum(1),
        lambda a, n, m: torch.where(a > 0, a, a * n),
        lambda a, n, m: a[torch.arange(n, device=a.device).flip(0)],
        lambda a, n, m: a.unfold(0, 2, 1).sum(-1).sum(0) + a,
        lambda a, n, m: F.layer_norm(a, (m,)),
        lambda a, n, m: a.var(0) * a,
    ]
    chosen = [rng.choice(unary) for _ in range(rng.randint(2, 5))]
    product = rng.random() < 0.5

    def fn(x, y):
        n, m = x.shape
        a = x
        for f in chosen:
            a = f(a, n, m).clamp(-10, 10)
        if product:
            a = (a @ y) @ x / (n * m)
        return a, a.sum(0), a.argmax(1)

    return fn


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_at_random_sizes(seed):
    rng = random.Random(seed)
    fn = _random_program(rng)
    torch.manual_seed(seed)
    results = []
    for _ in range(5):
        n, m = rng.randint(2, 40), rng.randint(2, 40)
        results.append(
            compiles(lambda n=n, m=m: check(fn, torch.randn(n, m), torch.randn(m, n), tol=1e-4))
        )
    assert sum(results) <= 3, results


@pytest.mark.parametrize(
    "column, size",
    [
        ((5, 9), "s0"),
        ((10, 18), "2*s0"),
        ((4, 8), "s0-1"),
        ((11, 19), "2*s0+1"),
        ((25, 81), "s0*s0"),
        ((20, 36), "4*s0"),
        ((15, 63), "s0*s1"),
        ((8, 16), "s0+s1"),
        ((75, 567), "s0*s0*s1"),
        ((20, 16), "-s0+25"),
        ((1000, 17), "None"),
    ],
)
def test_expressions(column, size):
    solver = generalize._Solver()
    solver.add((5, 9), symbol("s0"))
    solver.add((3, 7), symbol("s1"))
    assert str(solver.solve(column)) == size


def test_convolutions_get_programs_of_their_own_for_a_few_sizes():
    """Their kernels are faster where sizes are known; weights may be converted first. Other kernels
    are another model."""

    def fn(x, k):
        return F.relu(F.conv2d(x, k.to(torch.float64).float(), padding=1)).mean((2, 3))

    def make(n, channels=3):
        return torch.randn(n, channels, 8, 8), torch.randn(4, channels, 3, 3)

    assert counts(fn, [(5,), (9,), (23,), (7,), (11,), (5,)], make) == [
        1,
        1,
        1,
        1,
        0,
        0,
    ]
    assert metrics.counter_value("SymbolicCompile")
    before = metrics.counter_value("SymbolicCompile")
    assert counts(fn, [(5, c) for c in (5, 6, 7, 8, 9)], make) == [1] * 5
    assert metrics.counter_value("SymbolicCompile") == before
