"""Lightning: an accelerator named "hlo", which "auto" chooses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_hlo  # noqa: F401

L = pytest.importorskip("lightning")


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 2)
        self.seen, self.where = [], set()

    def training_step(self, batch, index):
        out = self.net(batch[0])
        self.where.add((out.device.type, out.dtype))
        loss = torch.nn.functional.cross_entropy(out, batch[1])
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        self.log("val", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(folder, **given):
    L.seed_everything(0, verbose=False)
    net = Net()
    x = torch.randn(16, 8)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 4)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)
    trainer = L.Trainer(max_epochs=2, default_root_dir=folder, devices=1, **quiet | given)
    trainer.fit(net, data, data)
    return net, [float(x) for x in net.seen] + [float(trainer.callback_metrics["val"])]


PRECISIONS = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(tmp_path, precision):
    net, got = train(tmp_path, accelerator="hlo", precision=precision)
    assert net.where == {("hlo", PRECISIONS[precision])}
    wanted = "bf16-mixed" if precision == "16-mixed" else precision
    _, want = train(tmp_path, accelerator="cpu", precision=wanted)
    assert got == pytest.approx(want, abs=1e-4 if precision == "32-true" else 3e-2)


def test_auto(tmp_path):
    net, _ = train(tmp_path, accelerator="auto")
    assert {device for device, _ in net.where} == {"hlo"}


def test_fabric():
    fabric = L.Fabric(accelerator="auto", devices=1)
    assert fabric.device.type == "hlo"
    net = torch.nn.Linear(4, 2)
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loss = net(fabric.to_device(torch.ones(3, 4))).square().sum()
    fabric.backward(loss)
    optimizer.step()
    assert loss.device.type == "hlo"
