"""Sizes that are new: what is known of an op's result from other sizes is what PyTorch says
(lazy/record/sizes.py)."""

import pytest
import torch
import torch.nn.functional as F

from torch_hlo.lazy.record import meta


def _index(n, rows):
    return torch.arange(rows) % max(n, 1)


# Each is called with sizes (n, m): operands of one kind for all n > 1 and m > 1.
OPS = {
    "add": lambda n, m: (torch.add, torch.ones(n, m), torch.ones(m)),
    "add, middle size of 1": lambda n, m: (
        torch.add,
        torch.ones(n, 1, m),
        torch.ones(n, m, 1),
    ),
    "compare": lambda n, m: (
        torch.lt,
        torch.ones(n, 1),
        torch.ones(n, m, dtype=torch.int32),
    ),
    "int and float": lambda n, m: (
        torch.mul,
        torch.ones(n, m, dtype=torch.int64),
        torch.tensor(2.5),
    ),
    "int and number": lambda n, m: (
        lambda x: x * 0.5,
        torch.ones(n, m, dtype=torch.int64),
    ),
    "where": lambda n, m: (
        torch.where,
        torch.ones(n, 1) > 0,
        torch.ones(m),
        torch.ones(n, m, dtype=torch.float64),
    ),
    "sigmoid": lambda n, m: (torch.sigmoid, torch.ones(n, 3, m)),
    "linear": lambda n, m: (
        F.linear,
        torch.ones(2, n, m),
        torch.ones(7, m),
        torch.ones(7),
    ),
    "mm": lambda n, m: (torch.mm, torch.ones(n, m), torch.ones(m, 5)),
    "bmm": lambda n, m: (torch.bmm, torch.ones(3, n, m), torch.ones(3, m, 5)),
    "embedding": lambda n, m: (F.embedding, torch.ones(n, 1).long(), torch.ones(9, 4)),
    "index_select": lambda n, m: (
        torch.index_select,
        torch.ones(4, m),
        1,
        _index(m, n),
    ),
    "index_add": lambda n, m: (
        torch.index_add,
        torch.ones(4, m),
        0,
        _index(4, n),
        torch.ones(n, m),
    ),
    "index": lambda n, m: (lambda x, i: x[i], torch.ones(n, 3), _index(n, m)),
    "index by two": lambda n, m: (
        lambda x, i, j: x[i, j],
        torch.ones(n, 3),
        _index(n, m),
        _index(3, m),
    ),
    "index_put": lambda n, m: (
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        torch.ones(n, 3),
        _index(n, m),
        torch.ones(m, 3),
    ),
    "sum": lambda n, m: (lambda x: x.sum((0, -1)), torch.ones(n, 4, m)),
    "sum of bytes, kept": lambda n, m: (
        lambda x: x.sum(0, keepdim=True),
        torch.ones(n, m, dtype=torch.uint8),
    ),
    "mean": lambda n, m: (lambda x: x.mean(1), torch.ones(n, m)),
    "softmax": lambda n, m: (lambda x: x.softmax(-1), torch.ones(n, m)),
}


def _run(op, args):
    return op(*[a.to("hlo") if isinstance(a, torch.Tensor) else a for a in args])


@pytest.mark.parametrize("name", OPS)
def test_sizes_are_predicted_as_pytorch_has_them(name, monkeypatch):
    op, *args = OPS[name](5, 6)
    _run(op, args)

    def no_run(op, *rest):
        raise AssertionError(f"{op} was run on meta tensors")

    for sizes in ((11, 13), (13, 11), (2, 17)):
        op, *args = OPS[name](*sizes)
        with monkeypatch.context() as m:
            m.setattr(meta, "infer", no_run)
            result = _run(op, args)
        expected = op(*args)
        assert (result.shape, result.stride(), result.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize("sizes", [(1, 6), (5, 1), (1, 1), (0, 6)])
@pytest.mark.parametrize("name", OPS)
def test_sizes_of_one_and_none_are_another_kind(name, sizes):
    for n, m in ((5, 6), sizes):
        op, *args = OPS[name](n, m)
        try:
            expected = op(*args)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                _run(op, args)
            continue
        result = _run(op, args)
        assert (result.shape, result.stride(), result.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )


@pytest.mark.parametrize(
    "op,good,bad",
    [
        (torch.add, ((5, 6), (6,)), ((5, 6), (7,))),
        (F.linear, ((5, 6), (7, 6)), ((5, 6), (7, 8))),
        (torch.mm, ((5, 6), (6, 7)), ((5, 6), (8, 7))),
        (torch.bmm, ((3, 5, 6), (3, 6, 7)), ((3, 5, 6), (4, 6, 7))),
    ],
)
def test_sizes_that_do_not_fit_raise_what_pytorch_raises(op, good, bad):
    with pytest.raises(RuntimeError) as expected:
        op(*[torch.ones(s, device="hlo") for s in bad])
    op(*[torch.ones(s, device="hlo") for s in good])
    with pytest.raises(RuntimeError) as found:
        op(*[torch.ones(s, device="hlo") for s in bad])
    assert str(found.value) == str(expected.value)


def test_columns_that_nonzero_found_are_judged_by_their_own_values():
    """Rows up to 63 and columns up to 2 lie in one storage; three columns are enough."""
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.where(x.to("hlo") > 0)
    result = torch.arange(3.0, device="hlo")[columns]
    assert result.tolist() == torch.arange(3.0)[torch.where(x > 0)[1]].tolist()
    with pytest.raises(IndexError):
        torch.arange(3.0, device="hlo")[rows]
