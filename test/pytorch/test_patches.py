"""What PyTorch says about results without computing them is what it computes, in all versions."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends import registry

import torch_hlo  # noqa: F401
from torch_hlo.pytorch.registration import name_flag


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    "sizes, dim",
    [
        ((3, 1), -1),
        ((1, 3), -2),
        ((1, 3), (-2,)),
        ((1, 2, 1), (0, -1)),
        ((1,), -1),
        ((), -1),
        ((1, 1), None),
        ((1, 1), ()),
    ],
)
@pytest.mark.parametrize("order", [0, 1, 2, 3.5, float("inf")])
def test_norms_have_the_shape_of_the_cpu_s(order, sizes, dim, keepdim) -> None:
    def norm(device: str) -> torch.Tensor:
        x = torch.full(sizes, 2.0, device=device)
        return torch.linalg.vector_norm(x, order, dim, keepdim)

    expected = norm("cpu")
    assert norm("meta").shape == expected.shape
    torch.testing.assert_close(norm("hlo").cpu(), expected)


@pytest.mark.parametrize("dim", [-3, 2, (0, -2)])
def test_norms_refuse_dimensions_that_are_not_there(dim) -> None:
    for device in ("cpu", "meta", "hlo"):
        with pytest.raises((IndexError, RuntimeError), match="[Dd]im"):
            torch.linalg.vector_norm(torch.ones(3, 1, device=device), 2, dim)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", ["cpu", "hlo"])
def test_norms_in_graphs(device: str, dynamic: bool) -> None:
    @torch.compile(backend="hlo", dynamic=dynamic, fullgraph=True)
    def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        length = x.norm(1, -1)
        return length, length.shape

    for n in (2, 3):
        length, shape = rows(torch.ones(n, 1, device=device))
        assert length.tolist() == [1.0] * n and shape == (n,)


def test_encoder_layers_without_data() -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().to("meta")
    with torch.no_grad():
        assert model(torch.ones(2, 3, 8, device="meta")).shape == (2, 3, 8)


def test_torch_cuda_may_be_the_accelerator_for_a_backward():
    flag = name_flag()
    if flag is None:
        pytest.skip("another machine code than x86-64's")
    hlo = torch.device("hlo")
    assert flag.value == 1 and torch.accelerator.current_accelerator() == hlo
    flag.value = 0
    try:
        assert torch.accelerator.current_accelerator() != hlo  # a CUDA build's is cuda
    finally:
        flag.value = 1
    assert torch.accelerator.current_accelerator() == hlo


def test_back_end_without_entry_points(monkeypatch):
    registry.list_backends()  # looks for entry points, once
    for known in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.delitem(known, "hlo", raising=False)
    double = torch.compile(lambda x: x * 2, backend="hlo")
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))


def test_modules_with_values_made_of_parameters_move():
    twin = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
    net = torch.nn.Sequential(torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3)), twin)
    x = torch.randn(4, 3)
    want = net(x)
    weight = twin.weight_g
    net.eval().to("hlo")
    assert twin.weight_g is weight
    with pytest.raises(RuntimeError, match="before"):
        want.sum().backward()
    torch.testing.assert_close(twin(net[0](x.to("hlo"))).cpu(), want)


def test_profiles_are_sorted_by_the_time_of_the_device() -> None:
    with torch.profiler.profile() as profile:
        torch.ones(3, device="hlo").sum().item()
    for key in ("self_hlo_time_total", "hlo_time_total"):
        assert "aten::ones" in profile.key_averages().table(sort_by=key)
        assert "aten::ones" in profile.events().table(sort_by=key)
