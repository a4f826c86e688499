"""What PyTorch says about results without computing them is what it computes, in all versions."""

from __future__ import annotations

import pytest
import torch

import torch_hlo  # noqa: F401


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
