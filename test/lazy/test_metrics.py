"""torch_hlo.metrics: torch_xla's names and verbs."""

import json
import re
import threading

import pytest

from torch_hlo import metrics


@pytest.fixture(autouse=True)
def clean():
    metrics.clear_all()
    yield
    metrics.clear_all()


def test_counters():
    assert metrics.counter_names() == []
    assert metrics.counter_value("MarkStep") is None
    metrics.count("MarkStep")
    metrics.count("MarkStep", 2)
    metrics.count("aten::nonzero")
    assert metrics.counter_names() == ["MarkStep", "aten::nonzero"]
    assert metrics.counter_value("MarkStep") == 3
    assert metrics.executed_fallback_ops() == ["aten::nonzero"]
    metrics.clear_counters()
    assert metrics.counter_names() == []


def test_metrics():
    assert metrics.metric_data("CompileTime") is None
    metrics.record("CompileTime", 0.5)
    metrics.record("CompileTime", 1.5)
    samples, total, values = metrics.metric_data("CompileTime")
    assert (samples, total, [v for _, v in values]) == (2, 2.0, [0.5, 1.5])
    assert values[0][0] <= values[1][0]
    metrics.count("x")
    metrics.clear_metrics()
    assert metrics.metric_names() == [] and metrics.counter_value("x") == 1


def test_totals_outlive_samples():
    for _ in range(metrics.SAMPLES + 10):
        metrics.record("ExecuteTime", 1.0)
    samples, total, values = metrics.metric_data("ExecuteTime")
    assert samples == total == metrics.SAMPLES + 10
    assert len(values) == metrics.SAMPLES


def test_timed_counts_also_when_it_raises():
    with pytest.raises(KeyError), metrics.timed("CompileTime"):
        raise KeyError
    assert metrics.metric_data("CompileTime")[0] == 1


def test_report_layout():
    assert metrics.metrics_report() == ""
    metrics.record("CompileTime", 62.003004)
    metrics.record("InboundData", 2048, "B")
    metrics.count("CachedCompile", 7)
    report = metrics.metrics_report()
    assert "Metric: CompileTime\n  TotalSamples: 1\n  Accumulator: 01m02s003ms004.000us\n" in report
    assert "Accumulator: 2.00KB" in report
    assert re.search(r"Percentiles: 1%=.*; 99%=", report)
    assert report.endswith("Counter: CachedCompile\n  Value: 7\n")


def test_short_report():
    metrics.record("CompileTime", 0.25)
    metrics.record("Other", 1)
    metrics.count("UncachedCompile")
    metrics.count("internal")
    text = metrics.short_metrics_report()
    assert "CompileTime" in text and "UncachedCompile" in text
    assert "Other" not in text and "internal" not in text
    assert (
        metrics.short_metrics_report(["internal"], ["Other"]).split()
        == "Metric: Other samples 1 total 01s000ms000.000us Counter: internal 1".split()
    )


def test_threads():
    threads = [
        threading.Thread(target=lambda: [metrics.count("n") for _ in range(1000)]) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert metrics.counter_value("n") == 4000


def test_reasons():
    assert metrics.last_compile_reason() is None
    metrics.add_compile_reason("a")
    metrics.add_compile_reason("b")
    assert metrics.last_compile_reason() == "b"
    assert metrics.explain() == "a\nb"


def filled():
    metrics.count("MarkStep", 2)
    metrics.count("aten::nonzero")
    for value in 0.5, 1.5, 0.25:
        metrics.record("CompileTime", value)
    metrics.record("InboundData", 2048, "B")
    metrics.record("TensorsGraphSize", 7, "")


def test_json():
    filled()
    metrics.add_compile_reason("step_1: the first program")
    found = json.loads(metrics.to_json())
    assert found["counters"] == {"MarkStep": 2, "aten::nonzero": 1}
    time = found["metrics"]["CompileTime"]
    assert (time["unit"], time["samples"], time["total"]) == ("s", 3, 2.25)
    assert time["percentiles"]["50"] == 0.5 and time["percentiles"]["99"] == 1.5
    assert found["compiles"][0]["text"] == "step_1: the first program"


def test_prometheus():
    """Each line is of the grammar, a family stands together under its type, names are labels."""
    filled()
    text = metrics.to_prometheus()
    label = r"[a-zA-Z_]\w*=\"[^\"\\\n]*\""
    sample = re.compile(rf"([a-zA-Z_:][\w:]*)\{{{label}(?:,{label})*\}} [-+.\de]+")
    seen, family = set(), ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            family = line.split()[2]
            assert family not in seen
            seen.add(family)
        else:
            name = sample.fullmatch(line)[1]
            assert name in (family, f"{family}_sum", f"{family}_count")
    assert text.endswith("\n")
    assert 'torch_hlo_events_total{name="aten::nonzero"} 1' in text
    assert 'torch_hlo_seconds{name="CompileTime",quantile="0.5"} 0.5' in text
    assert 'torch_hlo_seconds_sum{name="CompileTime"} 2.25' in text
    assert 'torch_hlo_bytes_count{name="InboundData"} 1' in text


def test_tensorboard():
    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, tag, scalar_value, global_step=None):
            self.scalars[tag, global_step] = scalar_value

    filled()
    writer = Writer()
    metrics.write_to(writer, 30)
    assert writer.scalars["torch_hlo/MarkStep", 30] == 2
    assert writer.scalars["torch_hlo/CompileTime/total", 30] == 2.25
    assert writer.scalars["torch_hlo/CompileTime/median", 30] == 0.5
