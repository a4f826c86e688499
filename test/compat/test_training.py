"""What training scripts of PyTorch/XLA do, in processes of their own; and its repository's scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..sweeps import torch_xla
from .test_names import ROOT, script


def test_max_different_graphs(tmp_path):
    """One graph of a function may be enough, whatever else is compiled."""
    out = script(
        """
        import torch, torch_xla
        f = lambda x: x + x
        step = torch_xla.compile(f, max_different_graphs=1)
        for n in (3, 3, 4):
            try:
                print(step(torch.ones(n, device="xla")).sum().item())
            except RuntimeError as error:
                print(error)
        torch_xla.compile(lambda x: x, max_different_graphs=1)(torch.ones(2))
        """,
        tmp_path,
    ).splitlines()
    assert out[:3] == [
        "6.0",
        "6.0",
        "Maximum number of different graphs allowed per function exceeded: 1",
    ]
    assert "f32[4]" in out[3]
    assert "f32[3]" in out[4]


def test_deprecated_names(tmp_path):
    """Warn once, and call the new function."""
    out = script(
        """
        import logging, math, sys
        from torch_xla.experimental.deprecation import mark_deprecated
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        @mark_deprecated(math.floor)
        def down(x): ...
        print(down(2.5), down(3.5))
        """,
        tmp_path,
    ).splitlines()
    assert out == ["__main__.down is deprecated. Use math.floor instead. ", "2 3"]


def test_sharding_as_an_operator(tmp_path):
    """`dynamo_mark_sharding`, in eager code and in a compiled function."""
    out = script(
        """
        import numpy as np, torch, torch_xla, torch_xla.distributed.spmd as xs
        mesh = xs.Mesh(np.arange(4), (4, 1), ("x", "y"))
        given = mesh.device_ids.tolist(), list(mesh.mesh_shape), str(mesh.axis_names), "('x', None)"
        mark = torch.ops.xla.dynamo_mark_sharding
        x = torch.randn(4, 8).to("xla")
        mark(x, *given)
        print(torch_xla._XLAC._get_xla_sharding_spec(x))
        double = torch.compile(lambda x: mark(x + x, *given) + x, backend="openxla", fullgraph=True)
        print(torch.allclose(double(x).cpu(), x.cpu() * 3))
        """,
        tmp_path,
        CPU_NUM_DEVICES="4",
    ).splitlines()
    assert out == ["{devices=[4,1]0,1,2,3}", "True"]


def test_trace_of_some_time(tmp_path):
    """A trace that was asked for before the loop is there when the process has ended."""
    script(
        """
        import torch, torch_xla, torch_xla.debug.profiler as xp
        xp.trace_detached("localhost:9012", "now", duration_ms=0)
        xp.trace_detached("localhost:9012", "later", duration_ms=60_000)
        torch.ones(2, device="xla") + 1
        torch_xla.sync()
        """,
        tmp_path,
    )
    assert all(list((tmp_path / name).iterdir()) for name in ("now", "later"))


def test_modules_run(tmp_path):
    """`-m package.module` as Python has it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys, torch_xla; print(__name__, sys.argv[1:], torch_xla.device())"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch_hlo.compat", "-m", "package.train", "-a"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "__main__ ['-a'] xla:0\n", done.stderr


def test_sharded_training(tmp_path):
    """ZeRO and FSDP on two processes train as PyTorch does alone; FSDP's files of two processes
    make the whole model."""
    out = script(
        """
        import sys, torch, torch_xla, torch_xla.core.xla_model as xm
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
        from torch_xla.distributed.fsdp import checkpoint_module
        from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints
        from torch_xla.distributed.fsdp.wrap import always_wrap_policy
        from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer
        Adam, x = torch.optim.Adam, torch.arange(24.0).view(4, 6).sin()

        def net():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))

        def train(model, optimizer, x, clip):
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                clip(model)
                optimizer.step()
                torch_xla.sync()
            return loss.item()

        def main(rank):
            mine = x[2 * rank:2 * rank + 2].to("xla")
            plain = net()
            clip = lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            want = train(plain, Adam(plain.parameters(), 0.1), x, clip)
            zero = net().to("xla")
            states = ZeroRedundancyOptimizer(zero.parameters(), Adam, max_norm=0.1, lr=0.1)
            wrap = lambda m, **options: FSDP(checkpoint_module(m), **options)
            given = {"auto_wrap_policy": always_wrap_policy, "auto_wrapper_callable": wrap}
            full = FSDP(net(), **given, flatten_parameters=False)
            optimizer = Adam(full.parameters(), 0.1)
            found = [
                train(zero, states, mine, lambda m: None),
                train(full, optimizer, mine, lambda m: m.clip_grad_norm_(0.1)),
            ]
            found = xm.mesh_reduce("losses", torch.tensor(found), lambda v: sum(v) / 2)
            kept = {"model": full.state_dict(), "shard_metadata": full.get_shard_metadata()}
            xm.save({**kept, "optimizer": optimizer.state_dict()}, f"part{rank}", master_only=False)
            again = FSDP(net(), auto_wrap_policy=always_wrap_policy)
            file = torch.load(f"part{rank}")
            again.load_state_dict(file["model"])
            states = Adam(again.parameters())
            states.load_state_dict(file["optimizer"])
            same = train(again, states, mine, lambda m: None)
            if rank == 0:
                whole, _ = consolidate_sharded_model_checkpoints("part", "?", save_model=False)
                for name, value in plain.state_dict().items():
                    torch.testing.assert_close(whole[name], value, rtol=1e-3, atol=1e-4)
                print((found - want).abs().max().item() < 1e-5, same < found[1])
            torch.distributed.destroy_process_group()
            print(xm.all_reduce("sum", torch.ones(1, device="xla")).item())

        if __name__ == "__main__":
            torch_xla.launch(main)
        """,
        tmp_path,
        CPU_NUM_DEVICES="2",
    )
    assert "True tensor(True)" in out
    assert out.count("2.0") == 2  # of a group that began after another one had ended


def test_fsdp_adds_gradients_up(tmp_path):
    """Under `no_sync`; modules are wrapped where a policy with PyTorch/XLA's names says so."""
    out = script(
        """
        import torch, torch_xla, torch_xla.core.xla_model as xm
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
        x = torch.arange(24.0).view(4, 6).sin()

        def net():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))

        def policy(module, recurse, unwrapped_params):
            return recurse or unwrapped_params > 20

        def main(rank):
            plain, full = net(), FSDP(net(), auto_wrap_policy=policy)
            assert isinstance(full.module[0], FSDP) and not isinstance(full.module[2], FSDP)
            (plain(x).square().mean() * 3).backward()
            mine = x[2 * rank:2 * rank + 2].to("xla")
            with full.no_sync():
                for _ in range(2):
                    full(mine).square().mean().backward()
            full(mine).square().mean().backward()
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e3)
            print(abs(full.clip_grad_norm_(1e3).item() - want.item()) < 1e-5)

        if __name__ == "__main__":
            torch_xla.launch(main)
        """,
        tmp_path,
        CPU_NUM_DEVICES="2",
    )
    assert out.count("True") == 2


def test_all_reduce_in_a_compiled_graph(tmp_path):
    out = script(
        """
        import torch, torch_xla, torch_xla.core.xla_model as xm

        def main(rank):
            x = torch.ones(2, device="xla") * (rank + 1)
            assert xm.all_reduce("sum", x).tolist() == [3, 3]
            for kind, groups in (("sum", None), ("max", None), ("max", [[0], [1]])):
                step = torch.compile(
                    lambda x: xm.all_reduce(kind, x * 2, 0.5, groups) + 1,
                    backend="openxla", fullgraph=True)
                try:
                    print(step(x).tolist() == ([4, 4] if kind == "sum" else [3, 3]))
                except Exception as error:
                    print("give no groups" in str(error))

        if __name__ == "__main__":
            torch_xla.launch(main)
        """,
        tmp_path,
        CPU_NUM_DEVICES="2",
    )
    assert out.count("True") == 6


SCRIPTS = [*torch_xla.SCRIPTS]


@pytest.mark.slow
@pytest.mark.parametrize("file", SCRIPTS)
def test_script_of_the_repository(file):
    """TORCH_XLA_REPOSITORY is a checkout of PyTorch/XLA."""
    where = os.environ.get("TORCH_XLA_REPOSITORY")
    if not where:
        pytest.skip("TORCH_XLA_REPOSITORY names no checkout of PyTorch/XLA")
    found = torch_xla.run(Path(where).resolve(), file, 900)
    assert {outcome for outcome, _ in found.values()} == {"passed"}, found
