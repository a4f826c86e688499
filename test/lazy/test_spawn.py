"""Processes started with spawn, and DataLoader workers, after the device has been used."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_hlo  # noqa: F401


def doubled(queue, array) -> None:
    queue.put((torch.tensor(array).to("hlo") * 2).tolist())


def test_spawn_after_use():
    assert (torch.ones(3, device="hlo") + 1).tolist() == [2, 2, 2]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=doubled, args=(queue, [1.0, 2.0]))
    process.start()
    assert queue.get(timeout=120) == [2.0, 4.0]
    process.join(60)
    assert process.exitcode == 0


def weighed(queue, layer) -> None:
    layer.weight.data.mul_(2)
    queue.put(layer.weight.detach())


def test_tensors_are_sent_as_copies():
    layer = torch.nn.Linear(2, 1, bias=False).to("hlo")
    sent = layer.weight.tolist()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=weighed, args=(queue, layer))
    process.start()
    came = queue.get(timeout=120)
    process.join(60)
    assert came.device.type == "hlo" and came.tolist() == [[2 * x for x in sent[0]]]
    assert layer.weight.tolist() == sent
    with pytest.raises(NotImplementedError, match="use torch.distributed"):
        layer.share_memory()


def test_data_loader_workers_after_use():
    assert torch.ones(2, device="hlo").sum().item() == 2
    data = TensorDataset(torch.arange(8.0))
    batches = [
        x.to("hlo") * 2 for (x,) in DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
    ]
    assert torch.cat(batches).tolist() == [2.0 * i for i in range(8)]
