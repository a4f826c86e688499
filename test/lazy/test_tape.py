"""Steps that come back are recognized by their tape, and only those."""

from __future__ import annotations

import pytest
import torch

import torch_hlo
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run import plan
from torch_hlo.lowering.core.graph import Node, Out
from torch_hlo.lowering.core.tape import TAPE

step = session.engine()


@pytest.fixture(autouse=True)
def _fresh():
    step.sync()
    step.clear_cache()
    yield
    step.sync()


def looks(fn) -> int:
    """How often `fn` needs a graph to be looked at."""
    count = 0
    original = plan.collect

    def counting(outputs):
        nonlocal count
        count += 1
        return original(outputs)

    plan.collect = counting
    try:
        fn()
    finally:
        plan.collect = original
    return count


def run(f, *tensors) -> torch.Tensor:
    result = f(*tensors)
    torch_hlo.mark_step()
    return result.cpu()


def test_a_step_that_comes_back_is_recognized() -> None:
    x, w = torch.randn(4, 4).to("hlo"), torch.randn(4, 4).to("hlo")
    f = lambda scale: (x.t() @ w * scale).softmax(-1).view(2, 8)
    torch_hlo.sync()
    first = run(f, 2.0)
    assert looks(lambda: torch.testing.assert_close(run(f, 2.0), first)) == 0
    assert (
        looks(
            lambda: torch.testing.assert_close(
                run(f, 0.5), (x.cpu().t() @ w.cpu() * 0.5).softmax(-1).view(2, 8)
            )
        )
        == 0
    )


# Pairs of functions of two matrices that record equally many ops and differ in one thing.
DIFFERENT = {
    "operand order": (lambda x, y: (x * 2) - (y * 3), lambda x, y: (y * 2) - (x * 3)),
    "which result": (
        lambda x, y: x.sort(0)[0] + y.sort(0)[0],
        lambda x, y: x.sort(0)[0] + y.sort(0)[1],
    ),
    "shared operand": (lambda x, y: (x + y) * (x + y), lambda x, y: (x + y) * (x + x)),
    "static int": (lambda x, y: x.roll(1, 0) + y, lambda x, y: x.roll(2, 0) + y),
    "sign of zero": (
        lambda x, y: torch.full_like(x, 0.0).copysign(torch.full_like(y, 0.0)),
        lambda x, y: torch.full_like(x, 0.0).copysign(torch.full_like(y, -0.0)),
    ),
    "view": (lambda x, y: x[0] + y, lambda x, y: x[1] + y),
    "dtype": (
        lambda x, y: (x.int() + y).double(),
        lambda x, y: (x.long() + y).double(),
    ),
    "int or float": (lambda x, y: x * 2 + y, lambda x, y: x * 2.0 + y + 0),
    "wanted result": (lambda x, y: (x + 1, y * 2)[0], lambda x, y: (x + 1, y * 2)[1]),
    "keyword": (
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: torch.sub(x, y, alpha=2),
    ),
    "list": (lambda x, y: torch.cat([x, y, x]), lambda x, y: torch.cat([x, y, y])),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_steps_that_differ_are_told_apart(name) -> None:
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    hx, hy = x.to("hlo"), y.to("hlo")
    for f in [*DIFFERENT[name]] * 2:
        torch.testing.assert_close(run(f, hx, hy), f(x, y))


def test_inputs_that_are_the_same_tensor() -> None:
    x, y = torch.randn(3), torch.randn(3)
    hx, hy = x.to("hlo"), y.to("hlo")
    for a, b in ((hx, hy), (hx, hx), (hy, hx), (hy, hy)):
        torch.testing.assert_close(run(lambda a, b: a * 2 - b, a, b), a.cpu() * 2 - b.cpu())


def test_an_input_that_stays_alive_is_not_overwritten() -> None:
    for keep in (False, True, False, True):
        x = torch.ones(1 << 12).to("hlo")
        kept = torch.empty_like(x).copy_(x) if keep else None
        alias = x.detach() if keep else None
        y = x + 1
        if not keep:
            del x
        torch_hlo.sync()
        assert y.cpu().eq(2).all() and (
            alias is None or alias.cpu().eq(1).all() and kept.cpu().eq(1).all()
        )


def test_values_from_before_a_failure_are_not_on_the_tape() -> None:
    x = torch.ones(3).to("hlo")
    y = x + 1
    torch_hlo.sync([y])
    z = y * 2
    TAPE.restart()  # what another thread's cut does
    w = z + 1
    assert not TAPE.exact
    assert w.cpu().tolist() == [5.0, 5.0, 5.0]


def test_only_who_records_writes_on_the_tape() -> None:
    x = torch.ones(3).to("hlo")
    torch_hlo.sync()
    written = [*TAPE.words]
    # as the compiler makes them, beside other threads that record
    node = Node(torch.ops.aten.neg.default, (x._storage.value,), {}, (x._meta.hlo,))
    assert TAPE.words == written and Out(node).place < 0
    y = x + 1
    assert y._storage.value.place >= TAPE.base and len(TAPE.words) > len(written) and TAPE.exact


def test_results_of_one_node_have_places_of_their_own() -> None:
    values, places = torch.ones(3, 4).to("hlo").max(0)
    after = values + 1
    first, second, third = (t._storage.value.place for t in (values, places, after))
    assert first < second < third


def test_training_is_recognized_from_the_third_step_on() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        torch.nn.Dropout(0.1),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 2),
    ).to("hlo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(4, 8).to("hlo"), torch.tensor([0, 1, 1, 0]).to("hlo")

    def train() -> None:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_hlo.mark_step()

    train()
    train()
    assert looks(train) == looks(train) == 0


def test_a_list_with_a_tensor_twice_is_not_one_of_two_tensors() -> None:
    x, y, z = (torch.full((4,), float(n)).to("hlo") for n in (1, 2, 4))
    torch_hlo.sync()
    total = lambda *xs: sum(torch._foreach_mul(list(xs), 2.0))
    for given, expected in (((x, x, z), 12), ((x, y, z), 14), ((x, x, z), 12), ((y, x, z), 14)):
        assert run(total, *given).tolist() == [expected] * 4
