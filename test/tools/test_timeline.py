"""Profiles of runs: planted reads, leaks, sizes and waits are named with their lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torch_hlo
from test.pages.test_pages import BROWSER, data_of, opened
from test.tools.test_scripts import script  # noqa: F401 - a fixture
from torch_hlo import profiler
from torch_hlo.lazy.record import session
from torch_hlo.profiler.recorded import TRACKS
from torch_hlo.tools import cli

PLANTED = """
import torch, torch_hlo

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()  # line 11
        return x

model = Model().to("hlo")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
kept = []
for step in range(12):
    x = torch.ones(8, 16).to("hlo")  # line 18
    out = model(x)
    loss = out.square().mean()  # line 20
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() < 0:  # line 24
        break
    kept.append(out.exp())  # line 26
    torch_hlo.mark_step()
"""


def test_a_planted_read_and_a_leak(script, tmp_path, capsys):  # noqa: F811
    path, page, trace = script(PLANTED), tmp_path / "p.html", tmp_path / "t.json"
    assert cli.main(["profile", str(path), "-o", str(page), "--trace", str(trace)]) == cli.OK
    out = capsys.readouterr().out
    assert f"A read at {path}:24 cuts every step: 12 reads" in out
    assert f"Memory grows: tensors made at {path}:26 are kept: 12 of them" in out
    data = data_of(page.read_text())
    assert {line for _, _, line, _ in data["advice"]} >= {f"{path}:24", f"{path}:26"}
    held = {line: count for line, _, _, count in data["end"]}
    assert held[f"{path}:26"] == 12
    kernels = data["kernels"]
    lines = {k["sources"][0] for k in kernels if k["matrix_flops"]}
    back = f"{path}:11, in the backward pass from "
    assert {x for x in lines if x.startswith(back)}
    modules = {f"{path}:11, in module layers.{i}" for i in range(2)}
    assert {x for x in lines if not x.startswith(back)} == modules
    assert all(k["calls"] and 0 < k["best"] <= k["total"] for k in kernels)
    assert_trace(trace, path)
    if BROWSER is not None:
        assert "<canvas" in opened(page, tmp_path, "timeline")
        assert "layers.*" in opened(page, tmp_path, "operations")


def assert_trace(trace: Path, path: Path) -> None:
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [*names.values()] == TRACKS
    spans = [e for e in events if e["ph"] == "X"]
    by_track = {track: [e for e in spans if names[e["tid"]] == track] for track in TRACKS}
    programs, kernels = by_track["programs"], by_track["kernels"]
    assert all(e["dur"] >= 0 and e["ts"] > 0 for e in spans)
    for e in kernels:  # each inside the run of a program
        assert any(p["ts"] <= e["ts"] <= p["ts"] + p["dur"] for p in programs), e
    first = by_track["compiles"][0]
    assert first["name"].startswith("step_") and first["args"]["line"] == f"{path}:24"
    assert {e["args"]["line"] for e in by_track["transfers"]} >= {f"{path}:18", f"{path}:24"}
    assert all("limit" in e["args"] and e["args"]["bytes"] for e in kernels)


def test_kernels_of_many_runs_are_all_there():
    x = torch.ones(64, 64).to("hlo")
    with profiler.record() as found:
        for _ in range(70):  # more than a program keeps
            x = torch.tanh(x @ x)
            torch_hlo.mark_step()
    programs = [s for s in found.spans if s.track == "programs"]
    kernels = [s for s in found.spans if s.track == "kernels" and "dot" in s.name]
    assert len(programs) == 70 and len(kernels) == 70
    assert len({s.start for s in kernels}) == 70
    assert found.timeline.steps == 70


def test_captured_steps_are_launches():
    layer = torch.nn.Linear(8, 8).to("hlo")

    @torch_hlo.compile
    def step(x):
        with torch.no_grad():
            return layer(x).relu()

    with profiler.record() as found:
        for _ in range(8):
            step(torch.ones(2, 8).to("hlo"))
    assert [s.name for s in found.spans].count("launch") >= 5
    lines = {line for x in found.lines for line in x.step.sources}
    assert any(line.startswith(__file__) for line in lines)


def test_compiled_functions_of_the_cpu_have_tracks():
    torch._dynamo.reset()  # another test may have compiled Linear for other sizes
    function = torch.compile(torch.nn.Linear(4, 4), backend="hlo")
    with profiler.record() as found:
        for _ in range(3):
            function(torch.ones(2, 4)).sum().backward()  # of the CPU
    spans = [(s.track, s.name) for s in found.spans]
    assert spans.count(("programs", "graph")) == spans.count(("programs", "graph_backward")) == 3
    assert len([s for s in found.spans if s.track == "kernels"]) >= 6
    assert {c.kind for c in found.compiles} == {
        "graph of torch.compile",
        "graph_backward of torch.compile",
    }
    assert not [a for a in found.advice() if "compile" in a.title]


def test_afterwards_nothing_is_left():
    state = session.current()
    before = (state.engine, [*state.executor.watchers], [*state.executor.meanwhile], state.sources)
    with profiler.record(), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    after = (state.engine, [*state.executor.watchers], [*state.executor.meanwhile], state.sources)
    assert after == before and state.modules is None


def test_pytorchs_profiler_shows_programs_and_compiles():
    x = torch.ones(32, 32).to("hlo")
    session.engine().clear_cache()
    with torch.profiler.profile() as found:
        for _ in range(3):
            y = (x @ x).relu()
            torch_hlo.mark_step()
        assert y.sum().item() == 32**3
    rows = {row.key: row.count for row in found.key_averages()}
    steps = {name: n for name, n in rows.items() if name.startswith("hlo::step_")}
    assert max(steps.values()) == 3 and sum(steps.values()) == 4
    assert sum(n for name, n in rows.items() if name.startswith("hlo::compile step_")) == 2


def test_pytorchs_profiler_sees_captured_steps(tmp_path):
    layer = torch.nn.Linear(8, 8).to("hlo")

    @torch_hlo.compile
    def step(x):
        with torch.no_grad():
            return layer(x).relu()

    x = torch.ones(2, 8).to("hlo")
    for _ in range(4):
        want = step(x)
    with torch.profiler.profile() as found:
        for _ in range(3):
            got = step(x)
    assert torch.equal(got.cpu(), want.cpu())
    assert sum(r.count for r in found.key_averages() if r.key.startswith("hlo::step_")) == 3
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [e for e in trace if e["name"].startswith("hlo::step_")]
    kernels = [e for e in trace if e.get("pid") == "hlo" and e.get("cat") == "kernels"]
    assert len(ranges) == 3 and len(kernels) >= 3
    assert kernels[0]["args"]["bytes"] and kernels[0]["args"]["what"] == kernels[0]["name"]
    assert abs(kernels[0]["ts"] - ranges[0]["ts"]) < 60e6  # one clock
