"""Why something was compiled, in words."""

import pytest
import torch

import torch_hlo  # noqa: F401
from torch_hlo import config, metrics
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run import explain

step = session.engine()


@pytest.fixture(autouse=True)
def on_evaluator():
    with config.override(DEVICE="evaluator"):
        step.sync()
        step.clear_cache()
        metrics.clear_all()
        yield
        step.sync()


def reason_of(first, second) -> str:
    """The reason of the compile of `second` when the program of `first` is cached."""
    for make in (first, second):
        result = make()
        step.mark_step()
        del result
    assert metrics.counter_value("UncachedCompile") == 2
    return metrics.last_compile_reason()


def vector(n=4, dtype=torch.float32):
    return torch.ones(n, dtype=dtype).to("hlo")


def test_first_program():
    vector().add(1).tolist()
    assert "the first program of this process" in metrics.last_compile_reason()
    assert metrics.explain() == metrics.last_compile_reason()


def test_another_op():
    assert "op 0, aten.cos.default: was aten.sin.default" in reason_of(
        lambda: vector().sin(), lambda: vector().cos()
    )


def test_another_shape():
    text = reason_of(lambda: vector(4).sin(), lambda: vector(6).sin())
    assert "input 0 was f32[4], is f32[6] (first used by aten.sin.default" in text


def test_another_dtype():
    assert "input 0 was f32[4], is f64[4]" in reason_of(
        lambda: vector().sin(), lambda: vector(dtype=torch.float64).sin()
    )


def test_another_static_argument():
    text = reason_of(lambda: vector().sum(0, keepdim=True), lambda: vector().sum(0, keepdim=False))
    assert "aten.sum.dim_IntList" in text and "keepdim" in text and "was True" in text


def test_another_number_of_threads():
    before = torch.get_num_threads()
    try:
        assert f"it was compiled for {before} threads, there are {before + 1}" in reason_of(
            lambda: vector().sin(),
            lambda: (torch.set_num_threads(before + 1), vector().sin()),
        )
        torch.set_num_threads(before)
        vector().sin().tolist()
        assert metrics.counter_value("UncachedCompile") == 2, (
            "the program for so many was forgotten"
        )
    finally:
        torch.set_num_threads(before)


def test_another_integer():
    text = reason_of(lambda: vector() + 3, lambda: vector() + 4)
    assert "aten.add.Tensor" in text and "other was 3, is a number that varies" in text


def test_another_exponent():
    assert "exponent was 2, is 4" in reason_of(lambda: vector() ** 2, lambda: vector() ** 4)


def test_more_and_fewer_ops():
    assert "1 more ops, the first of them aten.neg.default" in reason_of(
        lambda: vector().sin(), lambda: vector().sin().neg()
    )


def test_a_tensor_is_kept_alive():
    kept = []

    def keep():
        x = vector().sin()
        kept.append(x)
        return x.neg()

    assert "is now wanted: a tensor is or was kept alive" in reason_of(
        lambda: vector().sin().neg(), keep
    )


def test_memory_that_stays_alive():
    x = vector()
    step.sync()

    def once():
        x.add_(1)

    def kept():
        global _kept
        _kept = __import__("copy").deepcopy(x)
        x.add_(1)

    assert (
        "input 0 (f32[4]) stays alive after this step; before, it gave its memory to a result"
        in reason_of(once, kept)
    )


def test_nearest_program_is_compared():
    def base():
        return vector(8).sin().cos().tan().exp()

    for make in (base, lambda: vector(3).neg(), lambda: vector(5).abs()):
        result = make()
        step.mark_step()
        del result
    result = vector(8).sin().cos().tan().neg()  # noqa: F841
    step.mark_step()
    assert "step_" in metrics.last_compile_reason()
    assert "op 3, aten.neg.default: was aten.exp.default" in metrics.last_compile_reason()


def test_source_line_and_log(monkeypatch, capsys):

    monkeypatch.setattr(session.current(), "sources", True)
    with config.override(LOG=1):
        text = reason_of(lambda: vector().sin(), lambda: vector().cos())
    assert "test_explain.py:" in text
    err = capsys.readouterr().err
    assert err.count("torch_hlo: compiling step_") == 2 and text in err.replace(
        "torch_hlo: compiling ", ""
    )


@pytest.mark.parametrize(
    "first, second, kind",
    [
        (lambda: vector(3).add(1), lambda: vector(4).add(1), "size"),
        (lambda: vector().sum(0), lambda: vector().sum(0, keepdim=True), "number"),
        (lambda: vector().exp(), lambda: vector().exp().exp(), "other operations"),
        (lambda: vector().exp(), lambda: vector().neg(), "other operations"),
        (lambda: vector().exp(), lambda: vector(4, torch.float64).exp(), "other operations"),
    ],
)
def test_what_to_do_about_it(first, second, kind):
    with config.override(DYNAMIC=False):
        reason_of(first, second)
    found = metrics.explain().compiles[-1]
    assert (found.kind, bool(found.advice), found.outcome) == (kind, True, "compiled")
    assert found.seconds > 0 and found.ops and found.where.startswith(__file__)


def test_a_view_has_the_line_of_what_uses_it(monkeypatch):
    monkeypatch.setattr(session.current(), "sources", True)

    def doubled(n):
        x = torch.arange(2.0 * n).to("hlo")
        return x.view(2, -1) * 2

    line = doubled.__code__.co_firstlineno + 2
    reason = reason_of(lambda: doubled(3), lambda: doubled(4))
    assert f"(first used by aten.view.default at {__file__}:{line})" in reason


def test_each_op_is_looked_at_once_for_a_line(monkeypatch):
    """Where no op has a line, a long graph is not searched again from each of its ops."""
    looked = []
    mentions = explain._mentions
    monkeypatch.setattr(explain, "_mentions", lambda *args: looked.append(1) or mentions(*args))

    def chain(x):
        for _ in range(50):
            x = x + 1
        return x

    reason_of(lambda: chain(vector().sin()), lambda: chain(vector().cos()))
    assert 0 < len(looked) < 200
