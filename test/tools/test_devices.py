"""run_text and the command line on several devices: whole arrays in and out."""
import numpy as np
import pytest
import torch

import torch_hlo
from torch_hlo.hlo.evaluate_core import EvaluateError
from torch_hlo.tools.cli import main

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
    assert [p.tolist() for p in parts] == [(x[0:2] + x[2:4]).tolist()] * 2 + [(x[4:6] + x[6:8]).tolist()] * 2


def test_one_array_per_device_or_one_for_all():
    (parts,) = torch_hlo.run_text(PLAIN, [[torch.full((2, 3), float(d)) for d in range(4)]], devices=4)
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
