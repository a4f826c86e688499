"""Writes to tensors of which several elements are one place in memory, or which share memory with
other arguments."""

import pytest
import torch

import torch_hlo
from torch_hlo import config, metrics

VIEWS = {
    "windows": lambda x: x.unfold(0, 2, 1),
    "strides": lambda x: x.as_strided((4, 3), (1, 1)),
    "transposed": lambda x: x.as_strided((4, 3), (1, 1)).t(),
    "permuted": lambda x: x.as_strided((3, 2, 4), (2, 3, 1)).permute(1, 2, 0),
    "four dimensions": lambda x: x.as_strided((2, 2, 3, 3), (2, 3, 1, 1)),
    "expanded": lambda x: x[:3].expand(4, 3),
    "no place twice": lambda x: x.as_strided((2, 3), (4, 3)),
}


def at(*numbers):
    return lambda v: torch.tensor(numbers).to(v.device)


def new(t, start=100.0):
    return torch.arange(start, start + t.numel()).reshape(t.shape).to(t.device)


def first_rows(v):
    return torch.zeros(v[:1].shape, dtype=torch.long).to(v.device)


def places(v):
    return torch.empty(v.shape, dtype=torch.long).to(v.device)


WRITES = {
    "v[0] = 0": lambda v: v.__setitem__(0, 0),
    "v[i] = 9": lambda v: v.__setitem__(at(0, 1)(v), 9.0),
    "v[i] = t": lambda v: v.__setitem__(at(1)(v), new(v[:1])),
    "v[i] += 1": lambda v: v.index_put_((at(1)(v),), at(1.0)(v), accumulate=True),
    "v[mask] = 9": lambda v: v.__setitem__(v > 2, 9.0),
    "v[...] = t": lambda v: v.__setitem__(..., new(v)),
    "v[1:] = t": lambda v: v.__setitem__(slice(1, None), new(v[1:])),
    "fill_": lambda v: v.fill_(3),
    "copy_": lambda v: v.copy_(new(v)),
    "copy_ of itself": lambda v: v.copy_(v.flip(0)),
    "copy_ of a transposed": lambda v: v.copy_(new(v.mT).mT),
    "_foreach_copy_": lambda v: torch._foreach_copy_([v], [new(v)]),
    "add_": lambda v: v.add_(1),
    "pow_": lambda v: v.pow_(2),
    "lerp_": lambda v: v.lerp_(new(v), 0.5),
    "_foreach_add_": lambda v: torch._foreach_add_([v], 1),
    "masked_fill_": lambda v: v.masked_fill_(new(v) > 104, 9.0),
    "masked_scatter_": lambda v: v.masked_scatter_(new(v) > 104, new(v)),
    "index_fill_": lambda v: v.index_fill_(0, at(1)(v), 9.0),
    "index_copy_": lambda v: v.index_copy_(0, at(1)(v), new(v[:1])),
    "index_add_": lambda v: v.index_add_(0, at(1)(v), new(v[:1])),
    "scatter_": lambda v: v.scatter_(0, first_rows(v), 9.0),
    "scatter_add_": lambda v: v.scatter_add_(0, first_rows(v), new(v[:1])),
    "put_": lambda v: v.put_(at(1)(v), at(9.0)(v)),
    "tril_": lambda v: v.tril_(),
    "cumsum_": lambda v: v.cumsum_(0),
    "add into": lambda v: torch.add(new(v), 1, out=v),
    "add itself into": lambda v: torch.add(v, 1, out=v),
    "sum into": lambda v: torch.sum(torch.stack([new(v), new(v)]), 0, out=v),
    "cumsum into": lambda v: torch.cumsum(new(v), 0, out=v),
    "sort into": lambda v: torch.sort(-new(v), 0, out=(v, places(v))),
    "cat into": lambda v: torch.cat([new(v)[:1], new(v)[1:]], out=v),
    "full into": lambda v: torch.full(v.shape, 3.0, out=v),
}


def outcome(function, device, *args):
    """What the base holds then, or the error."""
    x = torch.arange(24.0).to(device)
    try:
        function(x, *args)
    except RuntimeError as error:
        return type(error), str(error)
    return x.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_changes_the_base_as_on_the_cpu(view, write):
    def run(x):
        WRITES[write](VIEWS[view](x))

    assert outcome(run, "hlo") == outcome(run, "cpu")


SHARING = {
    "add": lambda x: torch.add(x[:-1], 1, out=x[1:]),
    "add itself": lambda x: torch.add(x, 1, out=x),
    "gather": lambda x: torch.gather(x, 0, at(0, 1)(x), out=x[:2]),
    "gather itself": lambda x: torch.gather(x, 0, torch.zeros(24).long().to(x.device), out=x),
    "take": lambda x: torch.take(x, at(3, 2, 1)(x), out=x[:3]),
    "cat": lambda x: torch.cat([x[:3], x[5:7]], out=x[2:7]),
    "cumsum": lambda x: torch.cumsum(x, 0, out=x),
    "cumsum of a part": lambda x: torch.cumsum(x[:-1], 0, out=x[1:]),
    "kthvalue": lambda x: torch.kthvalue(x, 2, out=(x[0], at(1)(x)[0])),
    "index_add_": lambda x: x[1:].index_add_(0, at(0)(x), x[:1]),
    "index_copy_": lambda x: x[1:3].index_copy_(0, at(0)(x), x[2:3]),
    "columns": lambda x: torch.cumsum(x.view(4, 6)[:, :3], 0, out=x.view(4, 6)[:, 3:]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARING)
def test_arguments_that_share_memory(name):
    assert outcome(SHARING[name], "hlo") == outcome(SHARING[name], "cpu")


def test_it_is_announced_that_memory_is_written_on_the_cpu():
    metrics.clear_all()
    x = torch.arange(6.0).to("hlo")
    with config.override(FALLBACK="error"):
        with pytest.raises(NotImplementedError, match=r"aten.add_.*share memory.*clone\(\)"):
            x.unfold(0, 2, 1).add_(1)
        torch.cumsum(x[:3], 0, out=x[3:])
    assert x.tolist() == [0, 1, 2, 0, 1, 3]
    x.unfold(0, 2, 1).add_(1)
    torch_hlo.sync()
    assert metrics.counter_value("aten::add_") == 1
