"""Writes to tensors of which several elements are one place in memory."""

import pytest
import torch

import torch_hlo  # noqa: F401

VIEWS = {
    "windows": lambda x: x.unfold(0, 2, 1),
    "long windows": lambda x: x.unfold(0, 3, 2),
    "windows of a slice": lambda x: x[::2].unfold(0, 2, 1),
    "strides": lambda x: x.as_strided((4, 3), (1, 1)),
    "transposed": lambda x: x.as_strided((4, 3), (1, 1)).t(),
    "no place twice": lambda x: x.as_strided((2, 3), (4, 3)),
}


def at(*numbers):
    return lambda v: torch.tensor(numbers).to(v.device)


def new(t):
    return torch.arange(100.0, 100.0 + t.numel()).reshape(t.shape).to(t.device)


def first_rows(v):
    return torch.zeros(1, v.shape[1], dtype=torch.long).to(v.device)


WRITES = {
    "v[0] = 0": lambda v: v.__setitem__(0, 0),
    "v[:, 1] = 5": lambda v: v.__setitem__((slice(None), 1), 5),
    "v[i] = 9": lambda v: v.__setitem__(at(0, 1)(v), 9.0),
    "v[i] = t": lambda v: v.__setitem__(at(1)(v), new(v[:1])),
    "v[i] = nan": lambda v: v.__setitem__(at(1)(v), float("nan")),
    "v[i, j] = 9": lambda v: v.__setitem__((at(0, 1)(v), at(1, 1)(v)), 9.0),
    "v[i] += 1": lambda v: v.index_put_((at(1)(v),), at(1.0)(v), accumulate=True),
    "v[mask] = 9": lambda v: v.__setitem__(v > 2, 9.0),
    "fill_": lambda v: v.fill_(3),
    "v[::2].copy_": lambda v: v[::2].fill_(4),
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(2),
    "eq_": lambda v: v.eq_(1),
    "pow_": lambda v: v.pow_(2),
    "v[1:].add_": lambda v: v[1:].add_(1),
    "lerp_": lambda v: v.lerp_(new(v), 0.5),
    "addcmul_": lambda v: v.addcmul_(new(v), new(v[0])),
    "clamp_": lambda v: v.clamp_(0, 2),
    "_foreach_add_": lambda v: torch._foreach_add_([v], 1),
    "masked_fill_": lambda v: v.masked_fill_(new(v) > 104, 9.0),
    "index_fill_": lambda v: v.index_fill_(0, at(1)(v), 9.0),
    "index_copy_": lambda v: v.index_copy_(0, at(1)(v), new(v[:1])),
    "index_add_": lambda v: v.index_add_(0, at(1)(v), new(v[:1])),
    "scatter_": lambda v: v.scatter_(0, first_rows(v), 9.0),
    "scatter_add_": lambda v: v.scatter_add_(0, first_rows(v), new(v[:1])),
    "put_": lambda v: v.put_(at(1)(v), at(9.0)(v)),
    "tril_": lambda v: v.tril_(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_changes_the_base_as_on_the_cpu(view, write):
    found = []
    for device in "cpu", "hlo":
        x = torch.arange(12.0).to(device)
        v = VIEWS[view](x)
        WRITES[write](v)
        found.append((x.cpu(), v.cpu()))
    for expected, actual in zip(*found):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_windows_over_two_dimensions():
    found = []
    for device in "cpu", "hlo":
        x = torch.arange(16, dtype=torch.int32).reshape(4, 4).to(device)
        v = x.unfold(0, 2, 1).unfold(1, 2, 1)
        v.add_(1)
        v[at(1)(v)] = 7
        found.append(x.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("write", ["cumsum_", "cumprod_"])
def test_what_reads_what_it_has_written_is_refused(write):
    v = torch.arange(6.0).to("hlo").unfold(0, 2, 1)
    with pytest.raises(RuntimeError, match=rf"{write}.*\[5, 2\].*clone\(\)"):
        getattr(v, write)(0)


def test_too_many_steps_are_refused():
    v = torch.zeros(2000).to("hlo").unfold(0, 1000, 1)
    with pytest.raises(RuntimeError, match="more than 256 steps"):
        v.add_(1)
