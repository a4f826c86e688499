"""A failed compile leaves a file that fails again, and tells nothing but shapes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_hlo
from torch_hlo import config, metrics
from torch_hlo.compiler.codegen import registry
from torch_hlo.compiler.codegen.program import Program
from torch_hlo.compiler.llvm import scalar
from torch_hlo.device import report
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.lazy.record import session
from torch_hlo.tools import cli

SECRET = """HloModule my_secret_model
my_sum { a = f32[] parameter(0)
 b = f32[] parameter(1)
 ROOT c = f32[] add(a, b) }
ENTRY my_entry {
 my_weights = f32[2,3] parameter(0)
 mine = f32[2,3] constant({ { 3.25, 4.125, 5 }, { 6, 7, 8 } }), metadata={op_name="mine" source_file="/home/me/secret.py" source_line=3}
 yes = pred[2,3] constant({ { 1, 0, 1 }, { 0, 1, 0 } })
 rate = f32[] constant(0.0375)
 rates = f32[2,3] broadcast(rate), dimensions={}
 two = f32[] constant(2)
 twos = f32[2,3] broadcast(two), dimensions={}
 s = f32[2,3] multiply(my_weights, mine)
 t = f32[2,3] multiply(s, rates)
 u = f32[2,3] power(t, twos)
 v = f32[2,3] select(yes, u, s)
 ROOT r = f32[2] reduce(v, rate), dimensions={1}, to_apply=my_sum
}
"""


class _WithoutSort:
    def __contains__(self, row: str) -> bool:
        return row != "sort" and row in registry.CPU

    def __getitem__(self, row: str):
        return registry.CPU[row]


@pytest.fixture
def broken(monkeypatch):
    """The compiler does not know sort any more."""
    session.engine().sync()
    session.engine().clear_cache()
    monkeypatch.setattr(Program, "emitters", _WithoutSort())
    before = session.current().sources
    session.current().sources = False
    with config.override(CACHE="", REPORT="shapes"):
        yield
    session.current().sources = before


def file_of(error: BaseException) -> Path:
    notes = "\n".join(error.__notes__)
    return Path(re.search(r"python -m torch_hlo run (\S+\.hlo)", notes)[1])


def test_nothing_private():
    module = parse_module(SECRET)
    text = report.anonymous(module)
    for private in ("secret", "my_", "mine", "3.25", "4.125", "0.0375", "{ {"):
        assert private not in text
    again = parse_module(text)
    assert [p.shape for p in again.entry.params] == [p.shape for p in module.entry.params]
    assert again.entry.root.shape == module.entry.root.shape
    ops = [[x.op for x in m.entry.instructions() if x.op != "broadcast"] for m in (module, again)]
    assert sorted(ops[0]) == sorted(ops[1])
    assert "constant(2)" in text
    (result,) = torch_hlo.run_text(text, np.ones((2, 3), "f"))
    assert result.shape == (2,)


def test_a_failed_step(broken, capsys):
    x = torch.arange(5000.0).to("hlo")
    with pytest.raises(Exception) as caught:
        x.sort()[0].cpu()
    file = file_of(caught.value)
    assert "sort" in str(caught.value) and "f32[5000]" in str(caught.value)
    assert cli.main(["run", str(file)]) == cli.FAILED  # the same error, without the script
    assert "sort" in capsys.readouterr().err
    file.unlink()
    assert metrics.explain().compiles[-1].outcome == "failed"
    assert "from now on errors know the Python lines" in "\n".join(caught.value.__notes__)
    y = torch.arange(6000.0).to("hlo")
    with pytest.raises(Exception) as caught:
        y.sort()[0].cpu()
    assert __file__ in str(caught.value)
    file_of(caught.value).unlink()
    del x, y


def test_compiled_functions_name_their_lines(broken):
    def function(x):
        y = x * 2
        return y.sort()[0]  # the line that is named

    compiled = torch.compile(function, backend="hlo", options={"fallback": "error"})
    with pytest.raises(Exception) as caught:
        compiled(torch.arange(5000.0))
    line = function.__code__.co_firstlineno + 2
    error: BaseException | None = caught.value
    told = ""
    while error is not None:
        told += str(error) + "\n".join(getattr(error, "__notes__", ()))
        error = error.__cause__ or error.__context__
    assert f"{__file__}:{line}" in told
    for name in re.findall(r"torch_hlo run (\S+\.hlo)", told):
        Path(name).unlink(missing_ok=True)


@pytest.mark.parametrize("kind, files", [("full", 1), ("off", 0)])
def test_what_is_written(broken, kind, files):
    module = _sorting()
    with config.override(REPORT=kind), pytest.raises(Exception) as caught:
        report.compiled(module, None)
    notes = getattr(caught.value, "__notes__", [])
    found = [n for n in notes if "torch_hlo run" in n]
    assert len(found) == files
    if files:
        file = file_of(caught.value)
        assert "mine" in file.read_text()
        file.unlink()


def _sorting():
    text = """HloModule mine
less { a = f32[] parameter(0)
 b = f32[] parameter(1)
 ROOT c = pred[] compare(a, b), direction=LT }
ENTRY e { p = f32[5000] parameter(0)
 ROOT s = f32[5000] sort(p), dimensions={0}, to_apply=less }"""
    return parse_module(text)


@pytest.mark.parametrize("how", ["recorded", "hlo", "cpu"])
def test_the_line_of_an_operation_in_a_fusion_is_named(monkeypatch, how):
    def refuse(*args):
        raise KeyError

    def function(x):
        return (torch.tanh(x * 2) + 1).square()

    monkeypatch.setitem(scalar.TABLE, ("tanh", "f"), refuse)
    session.engine().clear_cache()
    x = torch.ones(71, 1000).to("cpu" if how == "cpu" else "hlo")
    run = function if how == "recorded" else torch.compile(function, backend="hlo")
    line = function.__code__.co_firstlineno + 1
    with config.override(CACHE="", REPORT="off"):
        for _ in range(2):  # what is recorded knows its lines from the first error on
            with pytest.raises(RuntimeError) as error:
                run(x).cpu()
    text = str(error.value)
    assert "tanh of f32" in text and f"aten.tanh.default at {__file__}:{line}" in text


def test_the_line_is_that_of_the_program(broken):
    """Programs share instructions, and one that failed may be alive."""

    def first(x):
        return (x.sort()[0] * 2).sum()

    def second(x):
        return (x.sort()[0] * 2).sum()

    session.current().sources = True
    kept = []
    for function in first, second, first:
        with pytest.raises(RuntimeError, match="sort") as error:
            function(torch.randn(40, 1000).to("hlo")).item()
        assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in str(error.value)
        kept.append(error.value)
