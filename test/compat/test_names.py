"""Scripts written for PyTorch/XLA, each in a process of its own, because the names stay."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(text: str, tmp_path: Path, **variables: str) -> str:
    """What `text` prints under the names."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "torch_hlo.compat", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_names_resolve(tmp_path):
    """Every name of every module is there; others say what is."""
    out = script(
        """
        import importlib, torch_xla
        from torch_hlo.compat import modules
        for row in modules.MODULES:
            module = importlib.import_module(f"torch_xla.{row}".rstrip("."))
            for name in dir(module):
                getattr(module, name)
        import torch
        from torch_xla.experimental.assume_pure import PureModule
        assert PureModule(torch.nn.Linear(2, 3))(torch.ones(1, 2)).shape == (1, 3)
        from torch_xla.debug import graph_saver
        try:
            graph_saver.save_tensors_graph(".", "name", [])
        except NotImplementedError as error:
            print(error)
        import torch_xla.core.xla_model as xm
        for name in ("nothing", "send"):
            try:
                getattr(xm, name)()
            except (AttributeError, NotImplementedError) as error:
                print(type(error).__name__, error)
        """,
        tmp_path,
    )
    assert "AttributeError torch_hlo offers no 'nothing' in torch_xla.core.xla_model" in out
    assert "all_reduce" in out
    assert "torch_xla.debug.graph_saver.save_tensors_graph: torch_hlo does not offer it" in out
    assert "NotImplementedError torch_xla.core.xla_model.send" in out
    assert "torch.distributed.send" in out


def test_device(tmp_path):
    """The device is PyTorch's own "xla", with its autograd, autocast, generators and files."""
    out = script(
        """
        import copy, io, torch, torch_xla, torch_xla.core.xla_model as xm
        from torch_xla.amp import autocast
        x = torch.ones(2, 3, device="xla", requires_grad=True)
        print(x.device, x.is_xla, xm.xla_device() == x.device, x.to("hlo").device)
        model = torch.nn.Linear(3, 4).to(xm.xla_device())
        optimizer = torch.optim.AdamW(model.parameters())
        with autocast(xm.xla_device()):
            y = model(x)
        print(y.dtype, torch.randn(2, device="xla", generator=torch.Generator("xla")).device)
        y.float().square().sum().backward()
        xm.optimizer_step(optimizer, barrier=True)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file)["weight"]
        print(loaded.device, torch.equal(loaded, model.weight), x.grad.shape)
        print(copy.deepcopy(model).weight.device, torch.compile(model)(x).device)
        try:
            x + torch.ones(2, 3, device="meta")
        except RuntimeError as error:
            print(error)
        """,
        tmp_path,
    ).splitlines()
    assert out[0] == "xla:0 True True xla:0"
    assert out[1] == "torch.bfloat16 xla:0"
    assert out[2] == "xla:0 True torch.Size([2, 3])"
    assert out[3] == "xla:0 xla:0"
    assert "xla:0 and meta" in out[4]


def test_what_xla_lets_pass(tmp_path):
    """Tensors of the CPU beside ours, classes that are floating-point numbers, a second import."""
    out = script(
        """
        import importlib, torch, torch_xla, torch_xla.core.xla_model as xm
        x, y = torch.rand(4, 3), torch.rand(4, 3)
        ours = y.to("xla")
        print(torch.equal((x + ours).cpu(), x + y), torch.equal((ours + x).cpu(), x + y))
        print(torch_xla._XLAC._get_xla_tensors_hlo([x.to("xla")]).count("parameter(0)"))
        classes, w = torch.tensor([0, 2, 1, 1]), ours.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(w, classes.float().to("xla"))
        loss.backward()
        want = torch.nn.functional.cross_entropy(y.requires_grad_(), classes)
        want.backward()
        print(torch.allclose(loss.cpu(), want), torch.allclose(w.grad.cpu(), y.grad))
        print(xm.get_stablehlo_bytecode([ours + 1]).startswith(b"ML"))
        print(importlib.reload(torch_xla) is torch_xla, torch_xla.device())
        """,
        tmp_path,
    ).splitlines()
    assert out == ["True True", "1", "True True", "True", "True xla:0"]


def test_steps_and_operations_are_counted(tmp_path):
    """Operations that run alone have metrics of their own; a read in a whole graph is an error."""
    out = script(
        """
        import torch, torch_xla, torch_xla.debug.metrics as met
        from torch_xla.debug.profiler import trace_me
        x = torch.randn(3, 3, device="xla")

        @trace_me("cosine")
        def cosine(x):
            return torch.cos(torch.sin(x))

        for eager in (False, True):
            torch_xla.experimental.eager_mode(eager)
            met.clear_all()
            for f in (cosine, torch_xla.compile(cosine)):
                f(x)
                torch_xla.sync(wait=True)
            names = [n for n in met.metric_names() if n.endswith("ExecuteTime")]
            print({n: met.metric_data(n)[0] for n in names})
            try:
                torch_xla.compile(lambda x: x if x[0, 0] > 0 else -x, full_graph=True)(x)
            except RuntimeError as error:
                print(error)
        """,
        tmp_path,
    ).splitlines()
    assert out[0] == "{'ExecuteTime': 2}"
    assert out[2] == "{'EagerOpExecuteTime': 2, 'ExecuteTime': 1}"
    assert out[1] == out[3] and out[1].startswith("Unexpected execution")


def test_loader_runs_ahead(tmp_path):
    """Batches are made while the loop works on earlier ones; errors come where they belong."""
    out = script(
        """
        import time, torch, torch_xla, torch_xla.distributed.parallel_loader as pl
        made = []
        def batches():
            for i in range(6):
                made.append(i)
                yield torch.full((2,), i), {"x": torch.ones(1)}
            raise ValueError("no more")
        class Loader:
            __iter__ = lambda self: batches()
            __len__ = lambda self: 6
        seen = []
        try:
            for (x, more) in pl.MpDeviceLoader(Loader(), "xla", device_prefetch_size=2):
                if not seen:
                    time.sleep(0.5)
                    print("ahead", len(made))
                seen.append(int(x[0]))
                assert more["x"].device.type == "xla"
        except ValueError as error:
            print(error, seen)
        print(*(x.shape for x in pl.MpDeviceLoader([torch.ones(3)], "xla")))
        import torch.distributed as dist
        start = lambda index: dist.init_process_group("xla", init_method="xla://")
        torch_xla.launch(start)
        torch_xla.launch(start)  # the first one's group has ended
        """,
        tmp_path,
    )
    assert out.splitlines() == ["ahead 4", "no more [0, 1, 2, 3, 4, 5]", "torch.Size([3])"]


def test_processes(tmp_path):
    """Two processes: collectives, mean gradients, closures."""
    out = script(
        """
        import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr
        import torch.distributed as dist

        def work(index):
            dist.init_process_group("xla", init_method="xla://")
            device = torch_xla.device()
            rank = xr.global_ordinal()
            x = torch.full((2,), rank + 1.0, device=device)
            found = [xm.all_reduce("sum", x), xm.all_gather(x, 0)]
            found.append(xm.reduce_scatter("sum", x.repeat(2), 0.5, 0, 2))
            found.append(xm.all_to_all(torch.arange(4.0, device=device) + 10 * rank, 0, 0, 2))
            found.append(xm.collective_permute(x, [[0, 1], [1, 0]]))
            weight = torch.nn.Parameter(torch.zeros(1, device=device))
            (weight * (rank + 1)).sum().backward()
            xm.optimizer_step(torch.optim.SGD([weight], lr=1.0), barrier=True)
            found.append(weight)
            total = xm.mesh_reduce("rank", rank, sum)
            tags = xm.rendezvous("end", str(rank).encode())
            closures = []
            xm.add_step_closure(closures.append, (rank,))
            torch_xla.sync()
            if rank == 1:
                print([t.tolist() for t in found], total, tags, closures, xr.world_size())

        if __name__ == "__main__":
            torch_xla.launch(work)
        """,
        tmp_path,
        CPU_NUM_DEVICES="2",
    )
    assert out.strip() == (
        "[[3.0, 3.0], [1.0, 1.0, 2.0, 2.0], [1.5, 1.5], [2.0, 3.0, 12.0, 13.0], [1.0, 1.0],"
        " [-1.5]] 1 [b'0', b'1'] [1] 2"
    )


def test_sharding(tmp_path):
    """SPMD: XLA's text of shardings, blocks, FSDP, checkpoints."""
    out = script(
        """
        import numpy as np, torch, torch_xla, torch_xla.runtime as xr
        import torch_xla.distributed.spmd as xs
        from torch_xla.experimental.distributed_checkpoint import CheckpointManager
        from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
            SpmdFullyShardedDataParallel as FSDP)
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(4), (2, 2), ("fsdp", "model"))
        x = torch.arange(12.0).view(3, 4).to("xla")
        xs.mark_sharding(x, mesh, ("fsdp", None))
        print(torch_xla._XLAC._get_xla_sharding_spec(x), isinstance(x, xs.XLAShardedTensor))
        print([s.unpadded_data.tolist() for s in x.local_shards][2:])
        from torch.distributed.tensor import Partial, Replicate, Shard
        y = x.redistribute(mesh, [Replicate(), Shard(1)])
        assert y.partition_spec == (None, 1) and x.partition_spec == ("fsdp", None)
        assert torch_xla._XLAC._get_xla_sharding_spec(y).startswith("{devices=[1,2,2]0,2,1,3")
        assert torch.equal(y.cpu(), x.cpu())
        assert y.placements == (Replicate(), Shard(1)) and x.placements == (Shard(0), Replicate())
        spec = y._spec
        assert spec.placements == y.placements and spec.mesh.shape == y.mesh_shape == (2, 2)
        assert spec.tensor_meta.shape == (3, 4) and y._spec is spec and not hasattr(y + 1, "_spec")
        torch_xla.sync()
        z = xs.wrap_as_sharded_tensor(torch.ones(4, 4, device="xla"), (4,), (0, None))
        assert z._spec.placements == (Shard(0),)
        torch_xla.sync()
        assert not hasattr(y.cpu(), "placements") and not hasattr(y + 1, "placements")
        for placements in ([Shard(0)], [Partial(), Replicate()], [Shard(2), Replicate()]):
            try:
                x.redistribute(mesh, placements)
                raise AssertionError(placements)
            except (ValueError, NotImplementedError, IndexError):
                pass
        assert (mesh.get_axis_name_idx("model"), mesh.get_axis_name_idx("no")) == (1, None)
        model = FSDP(torch.nn.Linear(4, 6), mesh=mesh)
        out = model(x)
        out.square().sum().backward()
        torch_xla.sync()
        print(torch_xla._XLAC._get_xla_sharding_spec(model.weight), out.shape, mesh.shape())
        manager = CheckpointManager("saved", 2)
        before = model.weight.cpu()
        print(manager.save(2, {"model": model.state_dict()}), manager.all_steps())
        with torch.no_grad():
            model.weight.zero_()
        state = {"model": model.state_dict()}
        manager.restore(2, state)
        model.load_state_dict(state["model"])
        print(torch.equal(model.weight.cpu(), before))
        """,
        tmp_path,
        CPU_NUM_DEVICES="4",
    ).splitlines()
    assert out[0] == "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate} True"
    assert out[1] == "[[[8.0, 9.0, 10.0, 11.0]], [[8.0, 9.0, 10.0, 11.0]]]"
    assert out[2].startswith("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate} torch.Size([3, 6])")
    assert out[3:] == ["True [2]", "True"]


def test_loops_and_export(tmp_path):
    """scan with gradients, scan_layers, flash attention, StableHLO."""
    out = script(
        """
        import copy, torch, torch_xla
        from torch_xla.experimental.scan_layers import scan_layers
        from torch_xla.experimental.custom_kernel import flash_attention
        from torch_xla.stablehlo import exported_program_to_stablehlo
        layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
        ours = copy.deepcopy(layers).to("xla")
        x = torch.randn(2, 4)
        layers(x).square().sum().backward()
        scan_layers(ours, x.to("xla")).square().sum().backward()
        print(max((a.grad - b.grad.cpu()).abs().max() for a, b in
                  zip(layers.parameters(), ours.parameters())) < 1e-4)
        q, k, v = torch.randn(3, 1, 2, 8, 4)
        ids = torch.tensor([[0] * 4 + [1] * 4])
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, (ids.T == ids) & torch.ones(8, 8, dtype=torch.bool).tril(), scale=0.5)
        got = flash_attention(q.to("xla"), k.to("xla"), v.to("xla"), causal=True,
                              q_segment_ids=ids.to("xla"), kv_segment_ids=ids.to("xla"),
                              sm_scale=0.5)
        print((want - got.cpu()).abs().max() < 1e-4)
        program = exported_program_to_stablehlo(torch.export.export(layers, (x,)))
        print("stablehlo.dot_general" in program.get_stablehlo_text())
        print(program.get_stablehlo_bytecode().startswith(b"ML"))
        import os
        from torch_xla.stablehlo import StableHLOExportOptions
        program.save("with")
        program.save("without", StableHLOExportOptions(save_weights=False))
        kept = StableHLOExportOptions(export_weights=False)
        exported_program_to_stablehlo(program._program, kept).save("kept")
        assert [d for d in ("with", "without", "kept") if os.path.exists(d + "/program.pt2")] == ["with"]
        program.save("program")
        again = type(program).load("program")
        print(torch.allclose(again(x), layers(x), atol=1e-5))
        """,
        tmp_path,
    )
    assert out.splitlines() == ["tensor(True)", "tensor(True)", *["True"] * 3]


@pytest.mark.parametrize("imported", (True, False))
def test_never_shadows(tmp_path, imported):
    """A real torch_xla, installed or imported, is an error."""
    (tmp_path / "torch_xla.py").write_text("")
    code = "import torch_xla\n" * imported + (
        "import torch_hlo.compat\ntorch_hlo.compat.install_as_torch_xla()"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "pip uninstall torch_xla" in done.stderr


def test_after_tensors(tmp_path):
    """Tensors that say "hlo" cannot be renamed."""
    code = (
        "import torch, torch_hlo, torch_hlo.compat\ntorch.ones(1, device='hlo')\n"
        "torch_hlo.compat.install_as_torch_xla()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "right after import torch_hlo" in done.stderr


def test_checkpoints_of_sharded_tensors(tmp_path):
    """Planners write blocks and read them into other blocks; the manager writes in the background
    what tensors held when it was asked, keeps the last, and notices that the process shall end."""
    out = script(
        """
        import os, signal, torch, torch_xla, torch.distributed.checkpoint as dist_cp
        import torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
        from torch_xla.experimental import distributed_checkpoint as checkpoints
        xr.use_spmd()
        mesh = xs.Mesh(range(4), (2, 2))
        def state(value, *spec):
            w = torch.full((6, 4), float(value), device="xla")
            return {"m": {"w": xs.mark_sharding(w, mesh, spec), "b": torch.ones(3) * value}}
        dist_cp.save(state(3, 0, 1), checkpoint_id="a", planner=checkpoints.SPMDSavePlanner())
        other = state(5, (0, 1), None)
        dist_cp.load(other, checkpoint_id="a", planner=checkpoints.SPMDLoadPlanner())
        print("read", other["m"]["w"].sum().item(), other["m"]["b"].tolist())
        print(other["m"]["w"].sharding_spec)
        manager = checkpoints.CheckpointManager("run", save_interval=10, max_to_keep=2)
        print("saves", [manager.save_async(n, state(n, 0, 1)) for n in (5, 10, 20)])
        now = state(30, 0, 1)
        manager.save_async(30, now)
        now["m"]["w"] += 1
        now["m"]["b"] += 1
        manager.join()
        manager.restore(30, again := state(0, None, 1))
        print(manager.all_steps(), again["m"]["w"].max().item(), again["m"]["b"].tolist())
        os.kill(os.getpid(), signal.SIGTERM)
        print("preempted", manager.save(31, now), manager.reached_preemption(31))
        shards = now["m"]["w"].local_shards
        for s in shards:
            s.data.fill_(7)
        now["m"]["w"].load_local_shards_(shards)
        print("shards", now["m"]["w"].mean().item())
        try:
            now["m"]["w"].load_local_shards_(shards[:3])
        except RuntimeError as error:
            print(error)
        """,
        tmp_path,
        CPU_NUM_DEVICES="4",
    )
    assert "read 72.0 [3.0, 3.0, 3.0]" in out
    assert "{devices=[4,1]0,1,2,3}" in out
    assert "saves [False, True, True]" in out
    assert "[20, 30] 30.0 [30.0, 30.0, 30.0]" in out
    assert "preempted True True" in out
    assert "shards 7.0" in out
    assert "expected 4 shards, one for each device, got 3" in out


def test_barriers_and_patched_layers(tmp_path):
    """A barrier keeps what comes after it apart; layers are written as one product; a tensor that
    is no block is refused."""
    out = script(
        """
        import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.distributed.spmd as xs
        from torch_xla.distributed.fsdp.utils import apply_xla_patch_to_nn_linear
        hlo = torch_xla._XLAC._get_xla_tensors_hlo
        x, y = torch.randn(3, 4).to("xla"), torch.randn(2).to("xla")
        before = x.exp()
        xm.optimization_barrier_([x, y])
        after = x.exp()
        print(hlo([before, after]).count(" exponential("), torch.equal(before, after))
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to("xla")
        xs.xla_sharding.apply_backward_optimization_barrier(net[1])
        net(x).sum().backward()
        print("opt-barrier" in hlo([net[1].weight.grad]))
        apply_xla_patch_to_nn_linear(net, lambda m, given: given @ m.weight.t() * 0)
        print(net(x).abs().sum().item())
        try:
            xs._mark_manual_sharding(x + 1)
        except RuntimeError as error:
            print(error)
        """,
        tmp_path,
    ).splitlines()
    assert out[:3] == ["2 True", "True", "0.0"]
    assert "enable_manual_sharding" in out[3]


def test_quantized_products(tmp_path):
    """int8 weights with a scale per row and per block, and rows quantized on the way."""
    out = script(
        """
        import torch, torch_xla
        from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear
        x, w = torch.randn(3, 8), torch.randint(-127, 127, (4, 8), dtype=torch.int8)
        scale, zero = torch.rand(4), torch.rand(4)
        layer = XlaQuantizedLinear(8, 4)
        layer.load_quantized_weight(w, scale, zero)
        want = x @ (w * scale[:, None] - zero[:, None]).t()
        print(torch.allclose(layer.to("xla")(x.to("xla")).cpu(), want, atol=1e-3))
        product = torch.ops.xla.quantized_matmul
        coarse = product(*(t.to("xla") for t in (x, w, scale)), quantize_activation=True)
        print(((coarse.cpu() - x @ (w * scale[:, None]).t()).abs() < 8).all().item())
        blocks, scales = w.t().reshape(2, 4, 4), torch.rand(2, 4)
        want = x @ (blocks * scales[:, None]).reshape(8, 4)
        found = product(*(t.to("xla") for t in (x, blocks, scales)), block_size=4)
        print(torch.allclose(found.cpu(), want, atol=1e-3))
        numbers = torch_xla._XLAC._xla_dot_general(
            w.to("xla"), w.to("xla"), (([-1], [1]), ()), preferred_element_type=torch.int32
        )
        print(torch.equal(numbers.cpu(), w.int() @ w.int().t()))
        """,
        tmp_path,
    ).splitlines()
    assert out == ["True"] * 4


def test_who_looks_for_the_package_finds_it(tmp_path):
    """As Accelerate, Transformers and Lightning do."""
    out = script(
        """
        import importlib.util, torch_xla.core.xla_model as xm
        from torch_xla.experimental import pjrt, tpu
        print(importlib.util.find_spec("torch_xla").name, pjrt.using_pjrt())
        xm.set_replication(xm.xla_device(), xm.get_xla_supported_devices())
        try:
            tpu.version()
        except OSError as error:
            print(error)
        """,
        tmp_path,
    )
    assert out.split("\n")[:2] == ["torch_xla True", "there is no TPU"]
    pytest.importorskip("accelerate")
    out = script(
        """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator()
        model = torch.nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.backward(model(torch.ones(4, 3, device=accelerator.device)).sum())
        optimizer.step()
        print(accelerator.distributed_type, model.weight.device)
        """,
        tmp_path,
    )
    assert out.split() == ["DistributedType.XLA", "xla:0"]
