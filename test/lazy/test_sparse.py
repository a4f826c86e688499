"""Sparse tensors of the device are what they are on the CPU: made, taken apart, multiplied, trained
with. What is not there says what to do."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_hlo
from torch_hlo import metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("error:.*runs on the CPU"),
]

COO = torch.sparse_coo_tensor([[0, 1, 0, 2], [1, 2, 1, 0]], [1.0, 2.0, 3.0, 4.0], (3, 4))
KINDS = {
    "coo": COO,
    "coalesced": COO.coalesce(),
    "csr": COO.to_sparse_csr(),
    "csc": COO.to_sparse_csc(),
    "rows": torch.sparse_coo_tensor([[0, 1, 0]], torch.arange(12.0).view(3, 4), (3, 4)),
}
MATRICES = [k for k in KINDS if k != "rows"]
# PyTorch has no gradient of these products for csc on the CPU
DIFFERENTIABLE = ["coo", "coalesced", "csr"]
DENSE = torch.arange(12.0).view(3, 4) - 5
OTHER = torch.linspace(-1, 1, 20).view(4, 5)


def both(function, *args, gradients=()):
    """The results, and gradients of the arguments at these positions, here and on the CPU."""
    results = []
    for device in ("hlo", "cpu"):
        given = [a.detach().clone().to(device) for a in args]
        for i in gradients:
            given[i].requires_grad_()
        result = function(*given)
        if gradients:
            (
                result * torch.arange(result.numel(), device=device).view(result.shape)
            ).sum().backward()
        results.append([result.detach(), *(given[i].grad for i in gradients)])
    for a, b in zip(*results):
        assert a.device.type == "hlo" and a.layout is b.layout and a.dtype is b.dtype
        torch.testing.assert_close(a.cpu().to_dense(), b.to_dense())
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_copies(kind):
    x = KINDS[kind]
    y = x.to("hlo")
    assert (y.is_sparse, y.is_sparse_csr, y.layout) == (x.is_sparse, x.is_sparse_csr, x.layout)
    assert (y._nnz(), y.sparse_dim(), y.dense_dim()) == (x._nnz(), x.sparse_dim(), x.dense_dim())
    names = {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    }[x.layout]
    for z in (y, y.cpu().to("hlo"), copy.deepcopy(y), pickle.loads(pickle.dumps(y)), y.clone()):
        for name in names:
            part = getattr(z, name)()
            assert part.device.type == "hlo" and part.cpu().equal(getattr(x, name)())
    assert repr(y.cpu()) == repr(x) and repr(y).startswith("tensor(")
    both(lambda x: x.to_dense(), x)
    both(lambda x: -x.to(torch.float64) * 2.5, x)
    both(lambda x: x.zero_(), x)
    both(lambda x: torch.zeros_like(x).copy_(x), x) if x.is_sparse else None
    both(lambda x: x.t(), x) if kind != "rows" else None


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k].is_sparse])
def test_coalesce(kind):
    x, y = KINDS[kind].coalesce(), KINDS[kind].to("hlo").coalesce()
    assert y.is_coalesced() and y._nnz() == x._nnz()
    assert y.indices().cpu().equal(x.indices()) and y.values().cpu().equal(x.values())
    z = KINDS[kind].to("hlo")
    if not z.is_coalesced():
        with pytest.raises(RuntimeError, match=r"call .coalesce\(\) first"):
            z.indices()
    # places that the device computes
    moved = torch.sparse_coo_tensor(z._indices().mul(2) // 2, z._values(), z.shape).coalesce()
    assert moved.indices().cpu().equal(x.indices())


def test_makers():
    for make in (
        lambda **on: torch.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 2.0], **on),
        lambda **on: torch.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 2.0], (3, 3), **on),
        lambda **on: torch.sparse_coo_tensor(size=(2, 3), **on),
        lambda **on: torch.zeros(2, 3, layout=torch.sparse_coo, **on),
        lambda **on: torch.sparse_csr_tensor([0, 1, 2], [1, 2], [1.0, 2.0], (2, 3), **on),
        lambda **on: torch.sparse_csr_tensor([0, 1, 2], [1, 2], [1.0, 2.0], **on),
        lambda **on: DENSE.relu().to(**on).to_sparse(),
        lambda **on: DENSE.relu().to(**on).to_sparse(1),
        lambda **on: DENSE.relu().to(**on).to_sparse_csr(),
        lambda **on: KINDS["csr"].to(**on).to_sparse(),
        lambda **on: KINDS["csc"].to(**on).to_sparse_csr(),
    ):
        here, there = make(device="hlo"), make(device="cpu")
        assert here.device.type == "hlo" and here.layout is there.layout
        assert here._nnz() == there._nnz() and here.shape == there.shape
        assert here.to_dense().cpu().equal(there.to_dense())


@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_elementwise_products(kind):
    x = KINDS[kind]
    both(lambda x, y: y + x, x, DENSE)
    both(lambda x, y: y.add_(x, alpha=-0.5), x, DENSE)
    both(lambda x, y: y.mul_(x), x, DENSE) if x.layout is torch.sparse_coo else None
    both(lambda x: x + x, x) if kind != "csc" else None
    if x.is_sparse:
        both(lambda x, y: y.sub_(x), x, DENSE)
        both(lambda x, y: x * y, x, DENSE)
        both(lambda x, y: y.sparse_mask(x), x, DENSE)
        both(lambda x: x.add_(x, alpha=2).mul_(3), x)
        both(torch.sparse.sum, x)
        with torch.no_grad():
            both(lambda x, y: y * x, x, DENSE)
            both(lambda x: x.coalesce() * x.coalesce(), x)
    with pytest.raises(RuntimeError, match="can't be cast"):
        DENSE.long().to("hlo").add_(x.to("hlo"))


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k].is_sparse])
def test_reductions(kind):
    x = KINDS[kind] * 0.5
    for dims in (0, -1, (0, 1)):
        both(lambda x: torch.sparse.sum(x, dims), x)
        both(lambda x: torch.sparse.sum(x, dims).to_dense(), x, gradients=(0,))
    for dim in (0, -1):
        both(lambda x: torch.sparse.softmax(x, dim), x)
        # along a dense dimension PyTorch takes the sums of the gradient along another one
        trained = (0,) if dim % x.dim() < x.sparse_dim() else ()
        both(lambda x: torch.sparse.softmax(x, dim).to_dense(), x, gradients=trained)
        both(lambda x: torch.sparse.log_softmax(x, dim).to_dense(), x, gradients=trained)
        both(lambda x, i: x.index_select(dim, i), x, torch.tensor([2, 0, 2, 1]))
    both(lambda x: torch.sparse.softmax(x, 0, dtype=torch.float64), x * 300)


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_elements(kind):
    x = KINDS[kind] * 0.05
    for name in ("abs", "asin", "ceil", "erf", "expm1", "isnan", "log1p", "sgn", "sqrt", "tanh"):
        both(getattr(torch, name), x)
    both(torch.relu_, x.coalesce() if x.is_sparse else x.clone())
    if x.is_sparse:
        both(lambda x: x.square(), x)
        both(lambda x: x.nan_to_num(), x)


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k].is_sparse])
def test_sums_along_dimensions_and_tensors_together(kind):
    x = KINDS[kind]
    for dims in (0, -1, (0, 1), ()):
        both(lambda x: x.sum(dims), x)
    both(lambda x: x.sum(1), x.long())
    both(lambda x: x.sum(0, dtype=torch.float64), x)
    for dim in (0, -1) if kind != "rows" else (0,):
        both(lambda x: torch.cat([x, x * 2], dim), x)
    for y in (DENSE.to("hlo"), x.to("hlo").t() if kind != "rows" else x.to("hlo").to_dense()):
        with pytest.raises(NotImplementedError, match="equal in all other dimensions"):
            torch.cat([x.to("hlo"), y], 0)


def test_gradient_of_softmax_along_a_dense_dimension():
    x = KINDS["rows"].to("hlo").coalesce().requires_grad_()
    y = x.detach().values().requires_grad_()
    found = torch.sparse.softmax(x, 1).to_dense()
    (found * found).sum().backward()
    want = torch.zeros(3, 4, device="hlo").index_add(0, x.indices()[0], y.softmax(1))
    (want * want).sum().backward()
    torch.testing.assert_close(x.grad.values(), y.grad)


def test_reductions_of_large_matrices_stay_sparse():
    places = torch.stack([torch.arange(1000) * 97, torch.arange(1000) * 89])
    x = torch.sparse_coo_tensor(places, torch.ones(1000), (100_000, 100_000)).to("hlo").coalesce()
    x.requires_grad_()
    torch.sparse.sum(x, 1).to_dense().sum().backward()
    chosen = x.index_select(1, torch.tensor([89], device="hlo"))
    for y in (x.grad, torch.sparse.softmax(x, 1), torch.sparse.sum(x, 1)):
        assert y._values().cpu().equal(torch.ones(1000))
    assert chosen._indices().tolist() == [[97], [0]] and chosen._values().tolist() == [1]


@pytest.mark.parametrize("kind", MATRICES)
def test_products(kind):
    x = KINDS[kind]
    both(lambda x, y: x @ y, x, OTHER)
    both(lambda x, y: y.t() @ x.t(), x, OTHER)
    both(lambda x, y: x @ y[:, 0], x, OTHER)
    both(lambda x, y: nn.functional.linear(y.t(), x), x, OTHER)
    if kind != "csc":
        both(lambda x: (x @ x.to_dense().t().to_sparse(layout=x.layout)).to_dense(), x)
    bias = torch.ones(3, 5)
    for add in (torch.addmm, torch.sparse.addmm):
        both(lambda b, x, y: add(b, x, y, beta=0.5, alpha=2), bias, x, OTHER)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(\[3, 4\] and \[3, 4\]"):
        x.to("hlo") @ DENSE.to("hlo")


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
def test_gradients(kind):
    x = KINDS[kind]
    both(torch.sparse.mm, x, OTHER, gradients=(0, 1))
    both(lambda x, y: x @ y, x, OTHER, gradients=(1,))
    both(lambda x: x.to_dense(), x, gradients=(0,))
    both(
        lambda b, x, y: torch.sparse.addmm(b, x, y, beta=0.5, alpha=2),
        torch.ones(3, 5), x, OTHER, gradients=(0, 1, 2),
    )  # fmt: skip


def test_gradients_of_values():
    def coo(values):
        places = torch.tensor([[0, 1, 0], [1, 2, 1]], device=values.device)
        x = torch.sparse_coo_tensor(places, values, (3, 4))
        return torch.sparse.mm(x, OTHER.to(values.device)) + x.to_dense().sum()

    def csr(values):
        rows, columns = (torch.tensor(t, device=values.device) for t in ([0, 1, 3], [1, 0, 2]))
        return torch.sparse_csr_tensor(rows, columns, values, (2, 3)).to_dense()

    for function in (coo, csr):
        both(function, torch.tensor([1.0, 2.0, 3.0]), gradients=(0,))
    both(lambda x: torch.sparse.mm(x.relu().to_sparse(), OTHER.to(x.device)), DENSE, gradients=(0,))


TABLES = {
    "embedding": lambda: nn.Embedding(12, 5, sparse=True),
    "padding": lambda: nn.Embedding(12, 5, sparse=True, padding_idx=2),
    "bags": lambda: nn.EmbeddingBag(12, 5, sparse=True, mode="sum"),
    "means": lambda: nn.EmbeddingBag(12, 5, sparse=True, mode="mean"),
}
OPTIMIZERS = {
    "SparseAdam": dict(lr=0.1),
    "SGD": dict(lr=0.05),
    "SGD momentum": dict(lr=0.05, momentum=0.9),
    "Adagrad": dict(lr=0.1),
}


def trained(device, table, optimizer, steps=4):
    torch.manual_seed(0)
    model = TABLES[table]().to(device)
    options = OPTIMIZERS[optimizer]
    optimizer = getattr(torch.optim, optimizer.split()[0])(model.parameters(), **options)
    losses = []
    for i in range(steps):
        ids = torch.randint(12, (4, 3), generator=torch.Generator().manual_seed(i)).to(device)
        optimizer.zero_grad()
        for part in ids.chunk(2):
            model(part).pow(2).sum().backward()
        (gradient,) = (p.grad for p in model.parameters())
        assert gradient.is_sparse and gradient._values().device.type == device
        optimizer.step()
        losses.append(model(ids).detach().pow(2).sum())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(table, optimizer):
    torch.testing.assert_close(
        trained("hlo", table, optimizer), trained("cpu", table, optimizer), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags(mode, last):
    """Rows of indices, and bags of any sizes, the empty ones too."""
    rows = torch.tensor([[1, 4, 4], [0, 2, 5]])
    offsets = torch.tensor([0, 0, 2, 6][: 4 if last else 3])

    def bags(weight):
        def of(*given, **options):
            given = [g.to(weight.device) for g in given]
            return F.embedding_bag(given[0], weight, *given[1:], mode=mode, **options)

        some = of(rows.flatten(), offsets, include_last_offset=last)
        return torch.cat((some * some, of(rows), of(rows, padding_idx=4)))

    both(bags, torch.linspace(-1, 1, 30).view(6, 5), gradients=(0,))


def programs():
    return (metrics.metric_data("TensorsGraphSize") or [0])[0]


def test_indices_from_the_cpu_cut_no_step():
    table = nn.Embedding(12, 5, sparse=True).to("hlo")
    optimizer = torch.optim.SparseAdam(table.parameters())
    ids = torch.tensor([1, 2, 1]).to("hlo")
    torch_hlo.sync()
    before = programs()
    table(ids).sum().backward()
    optimizer.step()
    assert programs() == before
    assert table.weight.grad.coalesce().indices().tolist() == [[1, 2]]


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam"])
def test_captured_step(optimizer):
    """A backward pass with sparse gradients is a graph of its own."""
    losses = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        table = nn.Embedding(12, 5, sparse=True).to(device)
        steps = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1)

        def step(ids, table=table, steps=steps):
            steps.zero_grad()
            loss = table(ids).pow(2).sum()
            loss.backward()
            steps.step()
            return loss.detach()

        run = step if device == "cpu" else torch_hlo.compile(step)
        losses.append([run(torch.tensor([1, i, 1]).to(device)).item() for i in range(4)])
        assert table.weight.grad.is_sparse
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to_sparse_csr().sum(1),
        lambda x: x.cos(),
        lambda x: x.amax(1),
        lambda x: x.norm(),
        lambda x: x.sum(0, keepdim=True),
        lambda x: x.to_sparse_bsr((1, 1)),
        lambda x: 1 / x,
    ],
    ids=["rows", "cos", "amax", "norm", "kept", "bsr", "divisor"],
)
def test_refusals(function):
    with pytest.raises(NotImplementedError, match=r"use .to_(dense|sparse_coo)\(\)"):
        function(COO.to("hlo"))


def test_what_pytorch_refuses():
    x = COO.to("hlo")
    with pytest.raises(RuntimeError, match="be on the same device"):
        x + DENSE
    with pytest.raises(RuntimeError, match="different"):
        x + torch.sparse_coo_tensor([[0], [0]], [1.0], (4, 3), device="hlo")
    with pytest.raises(RuntimeError, match="a number, 2.0, is not added"):
        x + 2.0
    with pytest.raises(RuntimeError, match="does not fit"):
        x.add_(DENSE.to("hlo"))
