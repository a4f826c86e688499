"""TORCH_HLO_DUMP: a folder per compile."""

import os

import pytest
import torch

import torch_hlo  # noqa: F401
from torch_hlo import config, log, metrics
from torch_hlo.device import dump, runtime
from torch_hlo.lazy.record import session

step = session.engine()


@pytest.fixture(autouse=True)
def on_evaluator():
    with config.override(DEVICE="evaluator"):
        step.sync()
        step.clear_cache()
        log.forget_warnings()
        yield
        step.sync()


def test_folder_per_compile(tmp_path):
    with config.override(DUMP=str(tmp_path)):
        x = torch.ones(4).to("hlo")
        for _ in range(3):
            (x + 1).tolist()
        (x * 2).tolist()
    folders = sorted((tmp_path / str(os.getpid())).iterdir())
    assert len(folders) == 2
    assert (folders[0] / "reason.txt").read_text().endswith("the first program of this process\n")
    assert "was aten.add.Tensor" in (folders[1] / "reason.txt").read_text()
    assert "f32[4]" in (folders[0] / "00_input.hlo").read_text()


def test_only_passes_that_changed_something(tmp_path):
    with (
        config.override(DUMP=str(tmp_path)),
        dump.recording("step_1", "because") as observe,
    ):
        observe("hlo:input", "a")
        observe("hlo:algebra", "a")
        observe("hlo:fusion", "b")
        observe("llvm", "define")
        observe("llvm", "declare")
        observe("asm", "ret")
        observe("buffers", "arena 64")
    (folder,) = (tmp_path / str(os.getpid())).iterdir()
    assert sorted(p.name for p in folder.iterdir()) == [
        "00_input.hlo",
        "02_fusion.hlo",
        "50_kernels.ll",
        "51_code.s",
        "52_buffers.txt",
        "reason.txt",
    ]
    assert (folder / "50_kernels.ll").read_text() == "define\ndeclare\n"


def test_failures_are_recorded(tmp_path, monkeypatch):
    def fail(module, observe=None):
        raise ArithmeticError("broken compiler")

    with config.override(DUMP=str(tmp_path)):
        x = torch.ones(4).to("hlo") + 1
        monkeypatch.setattr(runtime, "compile_program", fail)
        with pytest.raises(ArithmeticError):
            step.mark_step()
        monkeypatch.undo()
        assert x.tolist() == [2] * 4
    texts = [p.read_text() for p in tmp_path.rglob("error.txt")]
    assert len(texts) == 1 and "broken compiler" in texts[0]


def test_an_impossible_directory_costs_a_warning():
    with (
        config.override(DUMP="/dev/null/x"),
        pytest.warns(RuntimeWarning, match="TORCH_HLO_DUMP"),
    ):
        assert (torch.ones(4).to("hlo") + 1).tolist() == [2] * 4


def test_logs(capsys):
    with config.override(LOG=3):
        (torch.ones(4).to("hlo") + 1).tolist()
    err = capsys.readouterr().err
    assert (
        "compiling step_" in err
        and "after input:" in err
        and "HloModule" in err
        and "1 ops, cut" in err
    )
    metrics.clear_all()
    (torch.ones(4).to("hlo") + 1).tolist()
    assert capsys.readouterr().err == ""
