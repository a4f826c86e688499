"""What names CUDA where there is none, or chooses the CPU, means the device."""

from __future__ import annotations

import copy

import pytest
import torch


def test_mixed_precision_for_cuda_is_that_of_the_device():
    assert torch.amp.GradScaler()._device == torch.amp.GradScaler(device="cuda")._device == "hlo"
    assert torch.amp.GradScaler().is_enabled()
    x = torch.ones(2, 2)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        assert (x.to("hlo") @ x.to("hlo")).dtype == torch.float16
        assert (x @ x).dtype == torch.float32


def test_the_norm_of_no_gradients_is_on_the_device():
    weight = torch.nn.Parameter(torch.ones(3).to("hlo"))
    for given in (weight, iter([weight])):
        assert torch.nn.utils.clip_grad_norm_(given, 1.0).device.type == "hlo"
    assert (
        torch.nn.utils.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0).device.type == "cpu"
    )
    weight.grad = torch.full((3,), 2.0).to("hlo")
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    torch.testing.assert_close(weight.grad.cpu().norm(), torch.tensor(1.0))


def test_accelerate_scales_float16():
    from_package = pytest.importorskip("accelerate.utils.modeling")
    assert from_package.get_grad_scaler().is_enabled()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    return x, (x[:, 0] > 0).long()


def test_ignite():
    ignite = pytest.importorskip("ignite.distributed")
    from ignite.engine import create_supervised_trainer

    assert ignite.device().type == "hlo"
    seen = {}
    for device in ("cpu", ignite.device()):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 16)
        net = torch.nn.Linear(8, 2).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy
        amp = {"amp_mode": "amp", "scaler": True} if device != "cpu" else {}
        trainer = create_supervised_trainer(net, optimizer, loss, device=device, **amp)
        seen[str(device)] = trainer.run(loader, max_epochs=2).output
    assert seen["hlo"] == pytest.approx(seen["cpu"], abs=1e-2)


def test_fastai(tmp_path):
    pytest.importorskip("fastai")
    from fastai.basics import DataLoaders, Learner, default_device
    from fastai.callback import fp16  # noqa: F401  Learner.to_fp16

    assert default_device().type == "hlo"
    pairs = list(zip(*data()))
    loaders = DataLoaders.from_dsets(pairs, pairs, bs=16, device=default_device())
    loss = torch.nn.functional.cross_entropy
    learner = Learner(loaders, torch.nn.Linear(8, 2), loss_func=loss, path=tmp_path).to_fp16()
    with learner.no_bar(), learner.no_logging():
        learner.fit(2, 1e-2)
    assert learner.model.weight.device.type == "hlo"
    assert learner.recorder.values[1][0] < learner.recorder.values[0][0]
    try:
        assert default_device(False).type == "cpu"
    finally:
        default_device(None)


def test_fastai_images():
    pytest.importorskip("fastai")
    import numpy
    from fastai.vision import all as vision

    pixels = numpy.random.RandomState(0).randint(0, 255, (8, 16, 16, 3)).astype("uint8")
    blocks = vision.DataBlock(
        (vision.ImageBlock, vision.CategoryBlock(vocab=[0, 1])),
        get_x=lambda i: vision.PILImage.create(pixels[i]),
        get_y=lambda i: i % 2,
        splitter=vision.IndexSplitter([6, 7]),
        batch_tfms=[vision.Normalize.from_stats(*vision.imagenet_stats)],
    )
    seen = {}
    try:
        for wanted in (False, None):
            device = vision.default_device(wanted)
            loaders = blocks.dataloaders(list(range(8)), bs=2, shuffle=False, num_workers=0)
            batch, _ = loaders.one_batch()
            assert isinstance(batch, vision.TensorImage) and batch.device.type == device.type
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 2))
            learner = vision.Learner(loaders, net, loss_func=torch.nn.CrossEntropyLoss())
            with learner.no_bar(), learner.no_logging():
                learner.fit(2, 1e-2)
            assert net[1].weight.device.type == device.type
            seen[device.type] = [float(x) for x in learner.recorder.losses]
    finally:
        vision.default_device(None)
    assert seen["hlo"] == pytest.approx(seen["cpu"], rel=1e-3)


@pytest.mark.parametrize(
    "module, choose",
    [
        ("sentence_transformers.util", lambda module: module.get_device_name()),
        ("torch_geometric", lambda module: module.device("auto").type),
    ],
)
def test_chosen_by_others(module, choose):
    assert choose(pytest.importorskip(module)) == "hlo"


def test_data_parallel_of_one_device():
    twin = torch.nn.Linear(3, 2)
    net = torch.nn.DataParallel(copy.deepcopy(twin).to("hlo"), device_ids=[0])
    x = torch.randn(4, 3)
    net(x.to("hlo")).sum().backward()
    twin(x).sum().backward()
    torch.testing.assert_close(net.module.weight.grad.cpu(), twin.weight.grad)
    assert [*net.state_dict()] == ["module.weight", "module.bias"]
