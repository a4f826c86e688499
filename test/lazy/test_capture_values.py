"""torch_hlo.compile: values that Python reads inside a captured step, and what it does with
them."""

import contextlib
import copy
import math
from array import array

import pytest
import torch

import torch_hlo
from torch_hlo import metrics
from torch_hlo.lazy.capture import replay
from torch_hlo.lazy.record import session

step = session.engine()

KEPT = []


def test_values_of_a_tensor_are_needed():
    @torch_hlo.compile(full_graph=True)
    def fn(x):
        return x * x.tolist()[0]

    with pytest.raises(
        RuntimeError, match="needs the values of a tensor at .*test_capture_values.py"
    ):
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


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n > 2,
        lambda n: 2 * n,
        lambda n: n * 2,
        lambda n: math.sqrt(n),
        lambda n: math.isfinite(n),
        lambda n: max(n, 7.0),
        lambda n: n.is_integer(),
        lambda n: -n,
        lambda n: round(n, 1),
        lambda n: divmod(n, 2.0)[0] * 0,
        lambda n: min(1.0, n / 4) ** 2,
    ],
)
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


@pytest.mark.parametrize(
    "use, message",
    [
        (lambda n: f"{n:.3f}", "is shown"),
        (KEPT.append, "is kept"),
        (lambda n: [0] * int(n), "keep changing"),
        (float, "keep changing"),
    ],
)
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
        torch.testing.assert_close(
            fn(x.to("hlo"), mask.to("hlo")).cpu(), x @ weight.cpu() * mask[:, None]
        )

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
        assert (
            y.tolist()
            == [[0.0] * (size - size // 2) + [size] * 4 + [0.0] * (size // 2 + extra)] * 2
        )

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
        assert (
            fn(torch.zeros(2).to("hlo"), bits.to("hlo")).tolist() == [2 * bits.sum().item() - 5] * 2
        )

    with (
        pytest.raises(RuntimeError, match="keep changing")
        if full_graph
        else contextlib.nullcontext()
    ):
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

    with pytest.raises(
        RuntimeError,
        match=r"changes power\[0\] \(from .* to .*\), which a replay does not do",
    ):
        for _ in range(8):
            table(torch.ones(3).to("hlo"))

    numbers = iter(range(8))
    with pytest.raises(RuntimeError, match="computed in Python.*"):
        other = torch_hlo.compile(lambda x: x * (0.5 + next(numbers)))
        for _ in range(8):
            other(torch.ones(3).to("hlo"))


def test_lengths_that_are_looked_at():
    seen = []

    @torch_hlo.compile
    def fn(x):
        seen.append(x.sum())
        return x * len(seen)

    with pytest.raises(RuntimeError, match="changes how many elements seen has"):
        for _ in range(8):
            fn(torch.ones(2).to("hlo"))


def test_errors_of_linear_algebra_are_raised_by_replays():
    solve = torch_hlo.compile(torch.linalg.inv)
    for i in range(5):
        torch.testing.assert_close(
            solve((torch.eye(3) * (i + 1)).to("hlo") + 0).cpu(), torch.eye(3) / (i + 1)
        )
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        solve(torch.zeros(3, 3).to("hlo") + 0)


def test_errors_of_batched_linear_algebra_are_raised_by_replays():
    """Whether one of the matrices is singular is one number, here of data from the CPU as well."""
    solve = torch_hlo.compile(lambda a, b: torch.linalg.solve(a, b) + torch.linalg.solve(a + 0, b))
    for device in (lambda x: x.to("hlo"), lambda x: x.to("hlo") + 0):
        for i in range(4):
            a, b = torch.eye(3).repeat(4, 1, 1) * (i + 1), torch.ones(4, 3, 1)
            torch.testing.assert_close(solve(device(a), device(b)).cpu(), 2 * b / (i + 1))
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            solve(device(torch.zeros(4, 3, 3)), device(torch.ones(4, 3, 1)))


def test_turns_that_differ_in_an_index_are_launched_again(monkeypatch):
    """They share a program that has the index as an input: replays neither record nor look for
    it."""

    @torch_hlo.compile
    def fn(x, gain):
        total = x[0]
        for t in range(1, 9):
            total = total * 0.5 + x[t] * (gain if total.sum().item() > 0 else 1.0)
        return total

    def expected(x, gain):
        total = x[0]
        for t in range(1, 9):
            total = total * 0.5 + x[t] * (gain if total.sum().item() > 0 else 1.0)
        return total

    x = torch.rand(9, 16, generator=torch.Generator().manual_seed(0))
    for i in range(6):
        torch.testing.assert_close(fn((x + i).to("hlo"), 2.0).cpu(), expected(x + i, 2.0))

    def no_record(*args):
        raise AssertionError("a replay recorded its graph")

    monkeypatch.setattr(replay.Trace, "_record", no_record)
    torch.testing.assert_close(fn((x + 9).to("hlo"), 2.0).cpu(), expected(x + 9, 2.0))


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


def test_comparisons_that_cut_a_call_do_not_cut_its_replays():
    """Solvers look at errors, loops at residuals: segments that need no answer are one program, and
    another way is taken when an answer changes."""

    def iterate(a, b, tolerance):
        x, steps = torch.zeros_like(b), 0
        # a number that is computed with: what follows waits for it
        scale = (a.abs().sum(1).max()).item()
        while True:
            r = b - a @ x
            if (r * r).sum().item() < tolerance:
                return x * scale, steps
            x, steps = x + torch.linalg.solve(a, r) * 0.9, steps + 1

    torch.manual_seed(0)
    a, b = torch.eye(4) + 0.1 * torch.randn(4, 4), torch.randn(4)
    captured = torch_hlo.compile(iterate)
    for k, tolerance in enumerate([1e-4] * 8 + [1e-2] * 2 + [1e-4] * 8):
        scaled = a * (1 + 0.01 * k)
        expected, steps = iterate(scaled, b, tolerance)
        got, count = captured(scaled.to("hlo"), b.to("hlo"), tolerance)
        assert count == steps
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)
        if k in (7, 17):
            metrics.clear_counters()
            captured(scaled.to("hlo"), b.to("hlo"), tolerance)
            assert metrics.counter_value("MarkStep") <= 3  # of twice as many reads as steps
    with pytest.raises(torch.linalg.LinAlgError):
        captured((a * 0).to("hlo"), b.to("hlo"), 1e-4)


def test_joined_segments_keep_what_a_call_may_have_to_undo():
    total = torch.ones(3, device="hlo")

    @torch_hlo.compile
    def step(x):
        for _ in range(3):
            total.add_(torch.linalg.solve(x, total))
        return total.sum()

    expected = torch.ones(3)
    for scale in [1.0] * 7 + [0.0] + [2.0] * 3:
        x = torch.eye(3) * scale
        if scale == 0:
            before = total.cpu()
            with pytest.raises(torch.linalg.LinAlgError):
                step(x.to("hlo"))
            torch.testing.assert_close(total.cpu(), before)
            continue
        for _ in range(3):
            expected += torch.linalg.solve(x, expected)
        torch.testing.assert_close(step(x.to("hlo")).cpu(), expected.sum())
        torch.testing.assert_close(total.cpu(), expected)


def test_what_a_call_makes_may_be_written_in_place_between_reads():
    calls = array("b")

    @torch_hlo.compile
    def step(x):
        calls.append(1)
        total = x * 2
        for _ in range(3):
            mean = total.mean().item()
            total.mul_(0.5).add_(x, alpha=mean)
        return total + 1

    for seed in range(10):  # joined after a while
        torch.manual_seed(seed)
        x = torch.randn(5)
        expected = x * 2
        for _ in range(3):
            expected = expected * 0.5 + x * expected.mean()
        torch.testing.assert_close(step(x.to("hlo")).cpu(), expected + 1)
    assert len(calls) == 2


def test_lbfgs_made_in_the_step(monkeypatch):
    """Joined, it is one program, which is launched without recording it again."""

    def fit(x):
        p = torch.zeros(4, device=x.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([p], max_iter=5)

        def closure():
            optimizer.zero_grad()
            loss = ((x @ p - 1) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return p.detach()

    torch.manual_seed(0)
    x, captured = torch.randn(20, 4), torch_hlo.compile(fit)
    for _ in range(replay.JOIN + 4):
        torch.testing.assert_close(captured(x.to("hlo")).cpu(), fit(x), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(replay.Trace, "_record", lambda *_: pytest.fail("recorded again"))
    torch.testing.assert_close(captured(x.to("hlo")).cpu(), fit(x), rtol=1e-4, atol=1e-5)


def test_numbers_are_read_where_they_are(monkeypatch):
    """Without tensors of the CPU; those of rarer types, and parts of others, with them."""
    values = [
        torch.tensor(-3.7),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor(-(1 << 40)),
        torch.tensor([7], dtype=torch.int32),
        torch.tensor(True),
    ]
    there = [v.to("hlo").clone() for v in values]
    torch_hlo.mark_step()
    other = [
        torch.arange(5.0).to("hlo")[3],
        torch.tensor(1.5, dtype=torch.bfloat16, device="hlo") * 2,
    ]
    assert step.items([*there, *other]) == [*(v.item() for v in values), 3.0, 3.0]
    monkeypatch.setattr(step, "materialize", lambda tensors: pytest.fail("copied"))
    found = step.items(there)
    assert found == [v.item() for v in values] and [*map(type, found)] == [
        float,
        float,
        int,
        int,
        bool,
    ]


def test_equality_is_one_truth_value():
    @torch_hlo.compile
    def fn(x, y):
        return torch.cov(x) if torch.equal(x, y) else x - y

    for same in (True, True, False, False, True, False):
        x = torch.randn(3, 8)
        y = x.clone() if same else x + 1
        torch.testing.assert_close(
            fn(x.to("hlo") * 1, y.to("hlo") * 1).cpu(),
            torch.cov(x) if same else x - y,
            rtol=1e-4,
            atol=1e-5,
        )
    large = torch.arange(1 << 15)
    assert torch.equal(large.to("hlo"), large.to("hlo")) and not torch.equal(
        large.to("hlo"), large.to("hlo") + 1
    )
    assert not torch.equal(large.to("hlo"), large[1:].to("hlo"))
