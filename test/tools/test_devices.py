"""run_text and the command line on several devices: whole arrays in and out."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import torch_hlo
from torch_hlo.hlo.evaluate.interpreter import EvaluateError
from torch_hlo.hlo.text.printer import module_text
from torch_hlo.tools.cli import main
from torch_hlo.tools.devices import partitioned
from torch_hlo.tools.text_api import parse_text

PER_DEVICE = """HloModule sums, num_partitions=4
%add {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}
ENTRY %main {
  %p = f32[2,3] parameter(0)SHARDING
  ROOT %r = f32[2,3] all-reduce(%p), to_apply=%add, replica_groups=[2,2]<=[4], channel_id=1, use_global_device_ids=true
}
"""
SHARDED = PER_DEVICE.replace("SHARDING", ", sharding={devices=[4,1]<=[4]}")
PLAIN = PER_DEVICE.replace("SHARDING", "")


def test_what_a_partitioner_printed():
    """Whole inputs are cut by the shardings of the parameters; an output without one is a list."""
    x = np.arange(24, dtype="f").reshape(8, 3)
    (parts,) = torch_hlo.run_text(SHARDED, x, devices=4)
    assert [p.tolist() for p in parts] == [(x[0:2] + x[2:4]).tolist()] * 2 + [
        (x[4:6] + x[6:8]).tolist()
    ] * 2


def test_what_xla_printed():
    """A scheduled program of several partitions has been partitioned, with collectives or
    without."""
    text = """HloModule f, is_scheduled=true, num_partitions=4
ENTRY %main {
  %p = f32[2,3] parameter(0), sharding={devices=[4,1]<=[4]}
  ROOT %r = f32[2,3] negate(%p)
}"""
    x = np.arange(24, dtype="f").reshape(8, 3)
    (parts,) = torch_hlo.run_text(text, x, devices=4)
    assert np.concatenate(parts).tolist() == (-x).tolist()


ANNOTATED = """HloModule f
ENTRY %main {
  %p = f32[10,4] parameter(0), sharding={devices=[4,1]<=[4]}
  %q = f32[4,6] parameter(1), sharding={devices=[1,4]<=[4]}
  ROOT %r = f32[10,6] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""


def test_annotated():
    """Shardings are carried out, also where sizes do not divide; the per-device program runs as
    text too."""
    x, y = (
        np.random.default_rng(i).standard_normal(n).astype("f")
        for i, n in enumerate(((10, 4), (4, 6)))
    )
    per_device = module_text(partitioned(parse_text(ANNOTATED)))
    assert "f32[3,4]" in per_device and "num_partitions=4" in per_device
    for text in (ANNOTATED, per_device):
        (result,) = torch_hlo.run_text(text, x, y, devices=4)
        np.testing.assert_allclose(result, x @ y, rtol=1e-5)


def test_one_array_per_device_or_one_for_all():
    (parts,) = torch_hlo.run_text(
        PLAIN, [[torch.full((2, 3), float(d)) for d in range(4)]], devices=4
    )
    assert [p[0, 0].item() for p in parts] == [1, 1, 5, 5] and isinstance(parts[0], torch.Tensor)
    (parts,) = torch_hlo.run_text(PLAIN, np.ones((2, 3), "f"), devices=4)
    assert [p[1, 2] for p in parts] == [2] * 4


def test_wrong_numbers():
    with pytest.raises(EvaluateError, match="1 x 4 devices .*, not for 3"):
        torch_hlo.run_text(PLAIN, np.ones((2, 3), "f"), devices=3)
    with pytest.raises(EvaluateError, match="parameter 0 of sums: 3 arrays for 4 devices"):
        torch_hlo.run_text(PLAIN, [[np.ones((2, 3), "f")] * 3], devices=4)


def test_command_line(tmp_path, capsys):
    path = tmp_path / "sums.hlo"
    for text in (SHARDED, PLAIN):
        path.write_text(text)
        assert main(["run", str(path), "--devices", "4", "--compare", "evaluator"]) == 0
        assert "agrees" in capsys.readouterr().out
    assert main(["run", str(path), "--devices", "4"]) == 0
    assert "output 0 of device 3: f32[2, 3]" in capsys.readouterr().out
    assert main(["run", str(path)]) == 3
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_command_line_under_torchrun(tmp_path):
    """Four processes, one device each; one of them speaks."""
    path = tmp_path / "sums.hlo"
    path.write_text(SHARDED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "-m",
        "torch_hlo",
        "run",
        str(path),
        "--devices",
        "4",
    ]
    done = subprocess.run(
        [*command, "--compare", "evaluator"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip() == "agrees with evaluator", done.stderr[
        -2000:
    ]
