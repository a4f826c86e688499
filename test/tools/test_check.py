"""`check` runs a script on the device and on the CPU; `doctor` says what is installed."""

from __future__ import annotations

import argparse

import pytest
import torch

import torch_hlo
from torch_hlo import config
from torch_hlo.tools import check, cli, doctor

SCRIPT = """
import sys, torch, torch_hlo
model = torch.nn.Linear(8, 2).to("hlo")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 8).to("hlo")
for i in range(100):
    loss = model(x).square().sum() {change}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if i == 1:
        print(loss.item())
assert False, "the steps are counted"
"""


def run(tmp_path, monkeypatch, capsys, change: str = "") -> tuple[int, str]:
    """Exit code and page, with the ways run in this process's children."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("{change}", change))
    code = cli.main(["check", "--steps", "3", "train.py", "--some", "argument"])
    return code, capsys.readouterr().out


def test_check(tmp_path, monkeypatch, capsys):
    code, text = run(tmp_path, monkeypatch, capsys)
    assert code == 0, text
    assert "3 agree" in text and "train.py:12 item: 1 times" in text and "no operation" in text
    code, text = run(tmp_path, monkeypatch, capsys, "* (1 + (x.device.type == 'hlo'))")
    assert code == 1 and "DIFFER" in text
    code, text = run(tmp_path, monkeypatch, capsys, "+ undefined")
    assert code == 1 and "recorded: fails" in text and "undefined" in text


def test_a_script_that_trains_on_the_cpu_is_not_called_good(tmp_path, monkeypatch, capsys):
    """Nor is one that leaves with sys.exit called failed."""
    script = SCRIPT.replace('.to("hlo")', "").replace("range(100)", "range(2)")
    monkeypatch.setitem(globals(), "SCRIPT", script.replace("assert False,", "sys.exit() #"))
    code, text = run(tmp_path, monkeypatch, capsys)
    assert code == 1 and "2 agree" in text and "on the CPU  EVERYTHING" in text
    assert "fails" not in text


def test_what_a_script_says_before_it_exits_is_shown(tmp_path, monkeypatch, capsys):
    script = "import argparse; argparse.ArgumentParser().parse_args()"
    monkeypatch.setitem(globals(), "SCRIPT", script)
    code, text = run(tmp_path, monkeypatch, capsys)
    assert code == 1 and "exit: 2" in text and "unrecognized arguments: --some argument" in text


def test_an_endless_loop_without_an_optimizer_ends(tmp_path, monkeypatch, capsys):
    script = """
import torch, torch_hlo
x = torch.zeros(2, device="hlo", requires_grad=True)
while True:
    (x - 1).square().sum().backward()
"""
    monkeypatch.setitem(globals(), "SCRIPT", script)
    code, text = run(tmp_path, monkeypatch, capsys)
    assert code == 0 and "193 agree" in text and "no optimizer's step()" in text


def test_what_fails_is_shown_with_its_line_and_advice(capsys):
    def told(fn, *args) -> str:
        with pytest.raises((RuntimeError, AssertionError)) as raised:
            fn(*args)
        return check._told(raised.value)

    text = told(torch.add, torch.ones(2, device="hlo"), torch.ones(2))
    assert "test_check.py" in text and "move it with .to" in text
    if not torch.cuda.is_available():
        assert 'change: write .to("hlo")' in told(torch.ones(2).cuda)
    failed = check._EMPTY | {"error": text}
    text = "\n".join(check.page({"cpu": failed, "recorded": failed}))
    assert text.count("fails") == 1 and "EVERYTHING" not in text
    reads = check._EMPTY | {"losses": [1.0, 1.0], "ours": True, "reads": [("a.py:1 item", 2)]}
    assert "hundredth" in "\n".join(check.page({"cpu": check._EMPTY, "recorded": reads}))
    assert cli.main(["check", "nothere.py"]) == 2 and "nothere.py" in capsys.readouterr().err


def test_random_numbers_of_the_device_are_mentioned(tmp_path, monkeypatch, capsys):
    change = "+ 0 * torch.rand((), device='hlo')"
    assert "other random numbers" in run(tmp_path, monkeypatch, capsys, change)[1]


@pytest.mark.slow
def test_check_a_function(tmp_path, monkeypatch, capsys):
    function = SCRIPT.partition("for i")[0] + "def step():\n    return model(x).square().sum()\n"
    (tmp_path / "steps_to_check.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "--steps", "3", "steps_to_check:step"]) == 0
    text = capsys.readouterr().out
    assert "captured: " in text and "torch.compile: " in text and "fastest" in text


def test_the_cpu_takes_what_is_for_the_device():
    with check._Watch(True, 3) as watch:
        x = torch.ones(3).to("hlo")
        y = torch.zeros(3, device=torch.device("hlo"))
    assert x.device.type == y.device.type == "cpu" and not watch.reads


def test_sizes_that_depend_on_values_are_reads():
    with check._Watch(False, 3) as watch:
        x = torch.randn(3, 4).to("hlo")
        _ = x[x > 0], torch.unique(x), x + 1, x[torch.tensor([1]).to("hlo")]
    assert [r.rpartition(" ")[2] for r in watch.reads] == ["__getitem__", "unique"]


def test_difference():
    def found(*losses: float) -> dict:
        return {"losses": list(losses)}

    assert check.difference({"cpu": found(2.0, 4.0), "recorded": found(2.0, 5.0)}) == 0.25
    assert check.difference({"cpu": found(2.0), "recorded": found()}) == float("inf")


def test_doctor(capsys, monkeypatch):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "processor" in text and "threads" in text
    with config.override(EAGER=True, THREADS=4096):
        advice = "\n".join(doctor.advice())
    assert "TORCH_HLO_EAGER=1" in advice and "4096 threads share" in advice
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert parser.parse_args([]).run(None) == 0


def test_doctor_knows_when_sources_are_compiled_by_each_process(monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr(torch_hlo, "__cached__", "/nowhere/__init__.pyc")
    assert any("python -m compileall -q" in text for text in doctor.advice())
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert not any("compileall" in text for text in doctor.advice())
