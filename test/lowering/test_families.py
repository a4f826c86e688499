"""Cases per family that the operator database does not cover: whole ops of models, options, edge
sizes, symbolic sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.lowering.core.graph import Leaf, Node, Out, lower

from .support import aten, check, compare, evaluated, flatten, run_op

torch.manual_seed(0)
ATTENTION = aten._scaled_dot_product_fused_attention_overrideable.default
ATTENTION_BACKWARD = aten._scaled_dot_product_fused_attention_overrideable_backward.default


def randn(*dims, dtype=torch.float32):
    return torch.randn(*dims).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_linear(dtype, lead):
    x, w, b = (
        randn(*lead, 5, dtype=dtype),
        randn(4, 5, dtype=dtype),
        randn(4, dtype=dtype),
    )
    want = torch.nn.functional.linear(x, w, b)
    compare(evaluated(aten.linear.default, (x, w, b), {}, [want]), [want])
    x.requires_grad_(), w.requires_grad_(), b.requires_grad_()
    out = torch.nn.functional.linear(x, w, b)
    g = torch.randn_like(out)
    want = list(torch.autograd.grad(out, (x, w, b), g))
    compare(
        evaluated(aten.linear_backward.default, (x, g, w, [True, True, True]), {}, want),
        want,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_bytes(dtype):
    x, w, scales = (
        randn(3, 64, dtype=dtype),
        torch.randint(-128, 127, (8, 64), dtype=torch.int8),
        torch.rand(8).to(dtype),
    )
    want = torch._weight_int8pack_mm(x, w, scales)
    compare(evaluated(aten._weight_int8pack_mm.default, (x, w, scales), {}, [want]), [want])


def attention_meta(q, v):
    """Results of the op as PyTorch types them: output, logsumexp, …, seed, offset."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    scalar = torch.zeros((), dtype=torch.int64)
    return [
        out,
        torch.empty(q.shape[:-1]),
        None,
        None,
        None,
        None,
        scalar,
        scalar,
        None,
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "float", "bool"])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention(causal, masked, heads):
    q, k, v = (randn(2, h, n, 8).requires_grad_() for h, n in ((4, 5), (heads, 6), (heads, 6)))
    bias = {None: None, "float": randn(2, 1, 5, 6), "bool": torch.rand(5, 6) > 0.3}[masked]
    if masked and causal:
        pytest.skip("not both")
    if masked == "bool":
        bias[:, 0] = True
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, bias, is_causal=causal, enable_gqa=heads != 4
    )
    got = evaluated(ATTENTION, (q, k, v, bias, 0.0, causal), {}, attention_meta(q, v))
    compare(got[:1], [out])
    g = torch.randn_like(out)
    want = list(torch.autograd.grad(out, (q, k, v), g))
    args = (
        g,
        q,
        k,
        v,
        bias,
        [True, True, True, False],
        got[0],
        got[1],
        None,
        None,
        5,
        6,
        0.0,
        causal,
        got[6],
        got[7],
    )
    compare(evaluated(ATTENTION_BACKWARD, args, {}, [*want, None])[:3], want)


def test_attention_of_masked_rows():
    """A row whose keys are all masked gives 0."""
    q = k = v = randn(1, 1, 3, 4)
    bias = torch.zeros(3, 3)
    bias[1] = -math.inf
    out = evaluated(ATTENTION, (q, k, v, bias), {}, attention_meta(q, v))[0]
    assert out[0, 0, 1].eq(0).all() and out.isfinite().all()


def test_attention_dropout_is_undone_by_its_gradient():
    """Forward and backward draw the same mask: the gradient of sum(out) with respect to v is the
    column sum of the weights used."""
    q, k, v = (randn(1, 1, 16, 4) for _ in range(3))
    out = evaluated(
        ATTENTION,
        (q, k, torch.eye(16)[None, None], None, 0.5, False),
        {},
        attention_meta(q, torch.eye(16)[None, None]),
    )
    weights = out[0]
    assert 0.2 < weights.eq(0).float().mean() < 0.8
    g = torch.ones(1, 1, 16, 4)
    args = (
        g,
        q,
        k,
        v,
        None,
        [True, True, True, False],
        weights @ v,
        out[1],
        None,
        None,
        16,
        16,
        0.5,
        False,
        out[6],
        out[7],
    )
    dv = evaluated(ATTENTION_BACKWARD, args, {}, [q, k, v, None])[2]
    torch.testing.assert_close(dv, weights.mT @ g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spatial", [(), (2, 3)])
def test_nll_loss(ignore, reduction, weighted, spatial):
    x, t = randn(6, 5, *spatial), torch.randint(0, 5, (6, *spatial))
    t[0] = ignore
    w = torch.rand(5) if weighted else None
    name = "nll_loss2d" if spatial else "nll_loss"
    forward, backward = (
        getattr(aten, f"{name}_forward").default,
        getattr(aten, f"{name}_backward").default,
    )
    check(forward, x, t, w, reduction, ignore)
    out, total = forward(x, t, w, reduction, ignore)
    check(backward, torch.randn_like(out), x, t, w, reduction, ignore, total)


def test_nll_loss_of_no_rows():
    x, t = torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)
    check(aten.nll_loss_forward.default, x, t, None, 1, -100)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("labels", [[[1, 0, -1, 2], [0, -1, 3, 3], [-1, 1, 1, 1]], [2, 1, -1, 0]])
def test_labels_end_at_the_first_negative_one(labels, reduction):
    target = torch.tensor(labels)
    x = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    check(aten.multilabel_margin_loss_forward.default, x, target, reduction)


@pytest.mark.parametrize(
    "dims,padding",
    [
        ((2, 3, 9, 8), [2, 2, 1, 1]),
        ((2, 3, 9, 8), [7, 0, 0, 8]),
        ((1, 2, 9, 8), [0, 3, 5, 0]),
        ((1, 2, 9, 8), [-2, 3, 0, -1]),
    ],
)
@pytest.mark.parametrize(
    "op",
    [aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default],
)
def test_gradient_of_padding(op, dims, padding):
    left, right, top, bottom = padding
    check(
        op,
        randn(*dims[:2], dims[2] + top + bottom, dims[3] + left + right),
        randn(*dims),
        padding,
    )


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("frequency", [False, True])
def test_embedding_backward(padding_idx, frequency):
    check(
        aten.embedding_dense_backward.default,
        randn(4, 3, 6),
        torch.randint(0, 7, (4, 3)),
        7,
        padding_idx,
        frequency,
    )


def test_an_empty_bag_has_no_gradient():
    weight, index = randn(7, 6), torch.tensor([3, 1, 3, 5])
    offsets = torch.tensor([0, 2, 2])
    options = (False, 2)  # the maximum of each bag
    _, *found = aten._embedding_bag.default(weight, index, offsets, *options)
    check(
        aten._embedding_bag_dense_backward.default,
        randn(3, 6),
        index,
        *found,
        7,
        *options,
        None,
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("options", [(1, 0, 1, 0), (2, 1, 1, 1), (2, 2, 2, 1), (3, 1, 2, 2)])
@pytest.mark.parametrize("spatial", [1, 2])
def test_convolution(groups, transposed, options, spatial):
    stride, padding, dilation, output_padding = ([o] * spatial for o in options)
    output_padding = output_padding if transposed else [0] * spatial
    x = randn(2, 4, *([9, 10][:spatial]))
    w = (
        randn(4, 6 // groups, *([3, 2][:spatial]))
        if transposed
        else randn(6, 4 // groups, *([3, 2][:spatial]))
    )
    args = (stride, padding, dilation, transposed, output_padding, groups)
    check(aten.convolution.default, x, w, randn(6), *args, scale=5)
    g = torch.randn_like(aten.convolution.default(x, w, None, *args))
    check(
        aten.convolution_backward.default,
        g,
        x,
        w,
        [6],
        *args,
        [True, True, True],
        scale=5,
    )


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "options",
    [((2, 2), (2, 2), (0, 0)), ((3, 2), (2, 1), (1, 1)), ((3, 3), (3, 3), (1, 1))],
)
def test_pooling(ceil, include, options):
    kernel, stride, padding = (list(o) for o in options)
    x = randn(2, 3, 8, 7)
    check(aten.avg_pool2d.default, x, kernel, stride, padding, ceil, include)
    g = torch.randn_like(aten.avg_pool2d.default(x, kernel, stride, padding, ceil, include))
    check(
        aten.avg_pool2d_backward.default,
        g,
        x,
        kernel,
        stride,
        padding,
        ceil,
        include,
        None,
    )
    check(aten.max_pool2d_with_indices.default, x, kernel, stride, padding, [1, 1], ceil)
    values, indices = aten.max_pool2d_with_indices.default(x, kernel, stride, padding, [1, 1], ceil)
    check(
        aten.max_pool2d_with_indices_backward.default,
        torch.randn_like(values),
        x,
        kernel,
        stride,
        padding,
        [1, 1],
        ceil,
        indices,
    )


@pytest.mark.parametrize(
    "size,out",
    [
        ((8, 12), (4, 3)),
        ((8, 12), (8, 1)),
        ((7, 9), (3, 3)),
        ((3, 4), (6, 8)),
        ((5, 6), (5, 6)),
    ],
)
def test_adaptive_average(size, out):
    x = randn(2, 3, *size)
    check(aten._adaptive_avg_pool2d.default, x, list(out))
    check(aten._adaptive_avg_pool2d_backward.default, randn(2, 3, *out), x)


def test_max_pool_nan_and_dilation():
    x = randn(1, 1, 7, 7)
    x[0, 0, 3, 3] = math.nan
    check(aten.max_pool2d_with_indices.default, x, [2, 3], [1, 1], [1, 1], [2, 2])


@pytest.mark.parametrize("size", [(10, 14), (7, 3), (5, 18), (1, 1)])
@pytest.mark.parametrize(
    "mode",
    ["nearest", "nearest-exact", "bilinear", "bicubic", "aa_bilinear", "aa_bicubic"],
)
@pytest.mark.parametrize("align", [False, True])
def test_resampling(size, mode, align):
    x, g = randn(2, 3, 5, 7), randn(2, 3, *size)
    name = {
        "nearest": "upsample_nearest2d",
        "nearest-exact": "_upsample_nearest_exact2d",
        "aa_bilinear": "_upsample_bilinear2d_aa",
        "aa_bicubic": "_upsample_bicubic2d_aa",
    }.get(mode, f"upsample_{mode}2d")
    options = [] if "nearest" in mode else [align]
    check(getattr(aten, name).default, x, list(size), *options)
    check(
        getattr(aten, f"{name}_backward").default,
        g,
        list(size),
        list(x.shape),
        *options,
    )


@pytest.mark.parametrize("op", ["fused_adam", "fused_adamw"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_adam(op, amsgrad):
    make = {"fused_adam": torch.optim.Adam, "fused_adamw": torch.optim.AdamW}[op]
    params = [torch.nn.Parameter(randn(3, 2)), torch.nn.Parameter(randn(4))]
    optimizer = make(params, lr=0.1, weight_decay=0.05, amsgrad=amsgrad, foreach=False)
    state = [
        [p.detach().clone() for p in params],
        [torch.zeros_like(p) for p in params],
        [torch.zeros_like(p) for p in params],
    ]
    tops = [torch.zeros_like(p) for p in params] if amsgrad else []
    for step in range(1, 4):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(params, grads):
            p.grad = g
        optimizer.step()
        steps = [torch.tensor(float(step)) for _ in params]
        args = (state[0], grads, state[1], state[2], tops, steps)
        kwargs = dict(
            lr=0.1,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.05,
            eps=1e-8,
            amsgrad=amsgrad,
            maximize=False,
        )
        flat = evaluated(
            getattr(aten, f"_{op}").default,
            args,
            kwargs,
            [*state[0], *grads, *state[1], *state[2], *tops],
        )
        state = [flat[0:2], flat[4:6], flat[6:8]]
        tops = flat[8:]
        compare(state[0], [p.detach() for p in params])


def test_fused_sgd():
    params = [torch.nn.Parameter(randn(3, 2))]
    optimizer = torch.optim.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=False
    )
    state, momenta = [p.detach().clone() for p in params], [torch.zeros(3, 2)]
    for step in range(3):
        grads = [torch.randn_like(p) for p in params]
        params[0].grad = grads[0]
        optimizer.step()
        kwargs = dict(
            weight_decay=0.01,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=True,
            maximize=False,
            is_first_step=step == 0,
        )
        flat = evaluated(
            aten._fused_sgd.default,
            (state, grads, momenta),
            kwargs,
            [*state, *grads, *momenta],
        )
        state, momenta = flat[:1], flat[2:]
        compare(state, [p.detach() for p in params])


def test_foreach():
    xs, ys = [randn(3), randn(2, 2)], [randn(3), randn(2, 2)]
    check(aten._foreach_add.List, xs, ys, alpha=0.5)
    check(aten._foreach_add.Scalar, xs, 2)
    check(aten._foreach_mul.ScalarList, xs, [2.0, 3.0])
    check(aten._foreach_mul.Tensor, xs, torch.tensor(0.3))
    check(aten._foreach_div.ScalarList, xs, [2.0, 3.0])
    check(aten._foreach_addcdiv.ScalarList, xs, ys, [x.abs() + 1 for x in xs], [0.1, 0.2])
    check(aten._foreach_addcmul.Tensor, xs, ys, xs, torch.tensor([0.1, 0.2]))
    check(aten._foreach_lerp.Scalar, xs, ys, 0.3)
    check(aten._foreach_norm.Scalar, xs)
    check(aten._foreach_norm.Scalar, xs, math.inf)
    check(aten._foreach_pow.ScalarAndTensor, 0.9, [x.abs() for x in xs])
    check(aten._foreach_sqrt.default, [x.abs() for x in xs])
    check(aten._foreach_maximum.List, xs, ys)


def test_index_put_masks():
    x, mask = randn(4, 3), torch.rand(4, 3) > 0.5
    check(aten.index_put.default, x, [mask], torch.tensor(2.0))
    check(aten.index_put.default, x, [mask], randn(int(mask.sum())))
    check(aten.index_put.default, x, [mask[:, 0]], randn(int(mask[:, 0].sum()), 3), True)
    check(aten.index_put.default, x, [mask[:, 0]], randn(3))


@pytest.mark.parametrize(
    "indices",
    [
        [[0, -1, 2]],
        [None, [1, -2]],
        [[0, 1], None, [2, 0]],
        [[[0], [1]], [[0, 2]]],
        [None, [0, 1], [1, 1]],
    ],
)
def test_advanced_indexing(indices):
    x = randn(3, 4, 5)
    indices = [None if i is None else torch.tensor(i) for i in indices]
    check(aten.index.Tensor, x, indices)
    picked = aten.index.Tensor(x, indices)
    check(aten.index_put.default, x, indices, torch.randn_like(picked), True)


def test_random_moments():
    x = torch.empty(200, 300)
    (u,), (n,) = (
        run_op(aten.rand.default, [200, 300]),
        run_op(aten.randn.default, [200, 300]),
    )
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.01
    assert abs(n.mean()) < 0.02 and abs(n.std() - 1) < 0.02 and n.isfinite().all()
    (e,) = run_op(aten.exponential.default, x, 2.0)
    assert abs(e.mean() - 0.5) < 0.01 and e.min() > 0
    (i,) = run_op(aten.randint.low, 3, 9, [1000])
    assert sorted(i.unique().tolist()) == list(range(3, 9))
    (p,) = run_op(aten.randperm.default, 100)
    assert sorted(p.tolist()) == list(range(100)) and p.tolist() != list(range(100))
    (b,) = run_op(aten.bernoulli.p, x, 0.3)
    assert abs(b.mean() - 0.3) < 0.01
    (m,) = run_op(aten.multinomial.default, torch.tensor([0.0, 1.0, 3.0, 0.0]), 2)
    assert sorted(m.tolist()) == [1, 2]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="PyTorch's kernel rounds otherwise without fused multiply-add",
)
@pytest.mark.parametrize("first, last", [(-1, 1), (0.1, 0.7), (2, -2), (-3, 7.5)])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
        torch.complex128, torch.int8, torch.uint8, torch.int64,
    ],
)  # fmt: skip
def test_linspace_rounds_as_the_cpu_does(first, last, dtype):
    for count in (1, 2, 7, 100, 600):
        (got,) = run_op(aten.linspace.default, first, last, count, dtype=dtype)
        assert got.tolist() == torch.linspace(first, last, count, dtype=dtype).tolist()


@pytest.mark.parametrize("first, last", [(0, 1), (0.1, 0.7), (1.5, -2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_logspace_rounds_as_the_cpu_does(first, last, dtype):
    for count in (1, 2, 7, 100, 600):
        (got,) = run_op(aten.logspace.default, first, last, count, dtype=dtype)
        assert got.tolist() == torch.logspace(first, last, count, dtype=dtype).tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("op", [aten.median.default, aten.nanmedian.default])
def test_median_of_nothing(op, dtype):
    for sizes in ((0,), (3, 0)):
        check(op, torch.ones(sizes, dtype=dtype))


def test_dropout():
    x = torch.ones(100, 100)
    out, mask = run_op(aten.native_dropout.default, x, 0.25, True)
    assert abs(mask.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(out, mask / 0.75)
    assert run_op(aten.native_dropout.default, x, 1.0, True)[0].eq(0).all()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_cells(kind):
    """Against the cells of torch.nn, through autograd."""
    n, h = 3, 4
    gates = 4 if kind == "lstm" else 3
    a, b, state, cell = (
        randn(n, gates * h).requires_grad_(),
        randn(n, gates * h).requires_grad_(),
        randn(n, h).requires_grad_(),
        randn(n, h),
    )
    bias = randn(gates * h), randn(gates * h)
    if kind == "lstm":
        i, f, c, o = (a + b + sum(bias)).chunk(4, 1)
        cy = f.sigmoid() * state + i.sigmoid() * c.tanh()
        hy = o.sigmoid() * cy.tanh()
        workspace = torch.empty(n, 4 * h)
        got = evaluated(
            aten._thnn_fused_lstm_cell.default,
            (a, b, state, *bias),
            {},
            [hy, cy, workspace],
        )
        compare(got[:2], [hy, cy])
        gh, gc = torch.randn_like(hy), torch.randn_like(cy)
        want = torch.autograd.grad((hy, cy), (a, state), (gh, gc))
        args = (gh, gc, state, got[1], got[2], True)
        back = evaluated(
            aten._thnn_fused_lstm_cell_backward_impl.default,
            args,
            {},
            [want[0], want[1], bias[0]],
        )
        compare(back, [want[0], want[1], want[0].sum(0)])
        return
    x, y = (a + bias[0]).chunk(3, 1), (b + bias[1]).chunk(3, 1)
    r, z = (x[0] + y[0]).sigmoid(), (x[1] + y[1]).sigmoid()
    new = (x[2] + r * y[2]).tanh()
    hy = new + z * (state - new)
    got = evaluated(
        aten._thnn_fused_gru_cell.default,
        (a, b, state, *bias),
        {},
        [hy, torch.empty(n, 5 * h)],
    )
    compare(got[:1], [hy])
    g = torch.randn_like(hy)
    da, db, dh = torch.autograd.grad(hy, (a, b, state), g)
    back = evaluated(
        aten._thnn_fused_gru_cell_backward.default,
        (g, got[1], True),
        {},
        [da, db, dh, bias[0], bias[1]],
    )
    compare(back, [da, db, dh, da.sum(0), db.sum(0)])
    assert cell is not None


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_updates_its_statistics(training):
    x, w, b, mean, var = (
        randn(4, 3, 5),
        randn(3),
        randn(3),
        randn(3),
        torch.rand(3) + 0.5,
    )
    check(
        aten._native_batch_norm_legit_functional.default,
        x,
        w,
        b,
        mean,
        var,
        training,
        0.1,
        1e-5,
    )


def test_layer_norm_in_bf16():
    x, w, b = (
        randn(4, 16, dtype=torch.bfloat16),
        randn(16, dtype=torch.bfloat16),
        randn(16, dtype=torch.bfloat16),
    )
    check(aten.native_layer_norm.default, x, [16], w, b, 1e-5)


def test_as_strided():
    x = torch.arange(24.0)
    check(aten.as_strided.default, x, [3, 4], [1, 5], 2)
    check(aten.as_strided.default, x, [2, 3, 4], [12, 4, 1])
    check(aten.as_strided.default, x, [4, 3], [2, 0])
    check(aten.as_strided_scatter.default, x, randn(3, 4), [3, 4], [1, 5], 2)
    check(aten.as_strided_scatter.default, x, randn(3, 4), [3, 4], [4, 1], 6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.complex64])
def test_view_as_another_type(dtype):
    check(aten.view.dtype, randn(3, 4), dtype)
    check(aten.view.dtype, aten.view.dtype(randn(3, 4), dtype), torch.float32)


SIZE = symbol("s0")
MATRIX = Leaf(Shape("f32", (SIZE, 4)))
SYMBOLIC = [
    # op, arguments, result shape, what PyTorch computes from x
    (aten.mean.dim, (MATRIX, [0]), ("f32", 4), lambda x: x.mean(0)),
    (aten.mean.default, (MATRIX,), ("f32",), lambda x: x.mean()),
    (
        aten._softmax.default,
        (MATRIX, 0, False),
        ("f32", SIZE, 4),
        lambda x: x.softmax(0),
    ),
    (
        aten.view.default,
        (MATRIX, [4 * SIZE]),
        ("f32", 4 * SIZE),
        lambda x: x.reshape(-1),
    ),
    (aten.transpose.int, (MATRIX, 0, 1), ("f32", 4, SIZE), lambda x: x.mT),
    (aten.slice.Tensor, (MATRIX, 0, 0, SIZE), ("f32", SIZE, 4), lambda x: x),
    (aten.select.int, (MATRIX, 0, -1), ("f32", 4), lambda x: x[-1]),
    (
        aten.cat.default,
        ([MATRIX, MATRIX], 0),
        ("f32", 2 * SIZE, 4),
        lambda x: torch.cat([x, x]),
    ),
    (aten.add.Tensor, (MATRIX, 1), ("f32", SIZE, 4), lambda x: x + 1),
    (aten.argmax.default, (MATRIX, 0), ("s64", 4), lambda x: x.argmax(0)),
    (aten.cumsum.default, (MATRIX, 0), ("f32", SIZE, 4), lambda x: x.cumsum(0)),
    (
        aten.full_like.default,
        (MATRIX, 2),
        ("f32", SIZE, 4),
        lambda x: torch.full_like(x, 2),
    ),
    (aten.tril.default, (MATRIX,), ("f32", SIZE, 4), lambda x: x.tril()),
    (aten.roll.default, (MATRIX, [1], [0]), ("f32", SIZE, 4), lambda x: x.roll(1, 0)),
    (
        aten.native_layer_norm.default,
        (MATRIX, [4], None, None, 1e-5),
        ("f32", SIZE, 4),
        lambda x: torch.layer_norm(x, [4]),
    ),
    (
        aten.select_scatter.default,
        (MATRIX, Leaf(Shape("f32", (4,))), 0, 0),
        ("f32", SIZE, 4),
        None,
    ),
    (
        aten.repeat.default,
        (MATRIX, [2, 1]),
        ("f32", 2 * SIZE, 4),
        lambda x: x.repeat(2, 1),
    ),
    (aten.sort.default, (MATRIX, 0), ("f32", SIZE, 4), lambda x: x.sort(0)[0]),
    (
        aten.avg_pool1d.default,
        (Leaf(Shape("f32", (1, SIZE, 4))), [2], [2]),
        ("f32", 1, SIZE, 2),
        None,
    ),
]


@pytest.mark.parametrize("case", SYMBOLIC, ids=lambda c: str(c[0]))
def test_symbolic_sizes(case):
    """One program for every batch."""
    target, args, (dtype, *dims), reference = case
    leaves = list({id(a): a for a in tree_leaves(args) if isinstance(a, Leaf)}.values())
    outs = [Shape(dtype, tuple(dims))]
    outs += {
        aten.native_layer_norm.default: [Shape("f32", (SIZE, 1))] * 2,
        aten.sort.default: [Shape("s64", (SIZE, 4))],
    }.get(target, [])
    node = Node(target, args, {}, tuple(outs))
    module = lower([node], [Out(node, 0)], leaves)
    for n in (1, 3):
        feeds = [
            torch.randn([d if isinstance(d, int) else n for d in leaf.shape.dims])
            for leaf in leaves
        ]
        (got,) = evaluate(module, [f.numpy() for f in feeds])
        if reference is not None:
            np.testing.assert_allclose(got, reference(feeds[0]).numpy(), rtol=1e-5, atol=1e-6)


def test_flatten_counts_numbers_as_undefined():
    assert flatten((torch.ones(1), 3, [torch.ones(2)]))[1] is None


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim):
    v = randn(3, 4, 5)
    g = v.norm(dim=[d for d in range(3) if d != dim % 3], keepdim=True) + 1
    forward, backward = (
        aten._weight_norm_interface.default,
        aten._weight_norm_interface_backward.default,
    )
    want = list(forward(v, g, dim))
    compare(evaluated(forward, (v, g, dim), {}, want), want)
    grad = torch.randn_like(v)
    want_back = list(backward(grad, v, g, want[1], dim))
    compare(evaluated(backward, (grad, v, g, want[1], dim), {}, want_back), want_back)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(3, 1, 5, 7), (2, 3, 1, 4), (2, 1, 3, 4, 5), (1, 1, 1, 2, 3)])
def test_affine_grid(size, align):
    theta = randn(size[0], len(size) - 2, len(size) - 1)
    want = aten.affine_grid_generator.default(theta, size, align)
    compare(
        evaluated(aten.affine_grid_generator.default, (theta, list(size), align), {}, [want]),
        [want],
    )
