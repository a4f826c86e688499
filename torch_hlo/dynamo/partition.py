"""How AOTAutograd's joint graph is cut into a forward and a backward graph: PyTorch's minimal cut, after attention that is written out has been changed so that
only two numbers per row are kept of its weights.

    w = softmax(s(q k^T)); y = (w f) v;  backward: g = f (dy v^T); ds = w (g - sum(g w))       f: dropout
 -> w = softmax(s); m = max(s) / ln 2; l = log2(sum(exp(s - max(s))));  backward: w = exp((s / ln 2 - m - l) ln 2); ds = w (g - sum(dy y))

Scores and weights are computed again in the backward graph; the products of each graph become one kernel (compiler/passes/attention_match.py), and nothing of
rows x columns is in memory but the mask of a dropout (Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 4).
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_hlo.dynamo.share import share

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.unsqueeze.default,
          aten.squeeze.dim, aten._to_copy.default, torch.ops.prims.convert_element_type.default}  # fmt: skip
_SCORES = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.tanh.default,
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LOG2E = 1 / math.log(2)
_FEW = 32  # rows or columns: the array of weights is small


def partition(joint: fx.GraphModule, inputs, **kwargs) -> tuple[fx.GraphModule, fx.GraphModule]:
    """`min_cut_rematerialization_partition`, of a graph that computes weights of attention again."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    changed = [
        _recomputed(joint.graph, n)
        for n in joint.graph.find_nodes(
            op="call_function", target=aten._softmax_backward_data.default
        )
    ]
    if any(changed):
        joint.graph.lint()
        joint.recompile()
    share(joint.graph)
    with config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def _recomputed(graph: fx.Graph, gradient: fx.Node) -> bool:
    """Change one attention around the gradient of its softmax, if it is one."""
    g, w, dim, _ = gradient.args
    path: list[fx.Node] = []
    softmax = _through_views(w, [])
    shape = gradient.meta["val"].shape
    if (
        gradient.meta["val"].device.type != "cpu"
    ):  # kernels of a GPU are not found by structure; graphs on hlo tensors become one program
        return False
    if (
        softmax.target is not aten._softmax.default
        or dim not in (-1, len(shape) - 1)
        or len(shape) < 3
        or softmax.args[0].meta["val"].dtype not in _FLOATS
    ):
        return False
    if any(isinstance(n, int) and n < _FEW for n in shape[-2:]) or not _scores(
        softmax.args[0], path
    ):
        return False
    used = _product(softmax)
    if used is None:
        return False
    out, turned, dropout = used
    grad = _gradient_of_output(g, out, dropout)
    if grad is None:
        return False
    _rewrite(graph, softmax, gradient, out, grad, turned, dropout, path)
    return True


def _through_views(x: fx.Node, path: list[fx.Node]) -> fx.Node:
    """What `x` is a view or conversion of, with the same last two dimensions; `path` gets the views."""
    while x.target in _VIEWS and x.args[0].meta["val"].shape[-2:] == x.meta["val"].shape[-2:]:
        path.append(x)
        x = x.args[0]
    return x


def _scores(x: fx.Node, path: list[fx.Node]) -> bool:
    """Whether `x` is a product, scaled, biased and masked; `path` gets what leads to it."""
    x = _through_views(x, path)
    if x.target is aten.bmm.default:
        path.append(x)
        return True
    if x.target not in _SCORES:
        return False
    for operand in x.args[1:] if x.target is aten.where.self else x.args[:2]:
        if (
            isinstance(operand, fx.Node)
            and operand.meta["val"].shape[-2:] == x.meta["val"].shape[-2:]
        ):
            mine: list[fx.Node] = []
            if _scores(operand, mine):
                path += (x, *mine)
                return True
    return False


def _readers(x: fx.Node) -> list[fx.Node]:
    """Who reads `x` or a view of it that has its last two dimensions."""
    views = _views(x)
    return [u for y in (x, *views) for u in y.users if u not in views]


def _views(x: fx.Node) -> list[fx.Node]:
    """The views of `x` that have its last two dimensions."""
    mine = [
        u
        for u in x.users
        if u.target in _VIEWS and u.meta["val"].shape[-2:] == x.meta["val"].shape[-2:]
    ]
    return [*mine, *(v for u in mine for v in _views(u))]


def _product(softmax: fx.Node) -> tuple[fx.Node, list[fx.Node], fx.Node | None] | None:
    """(the product of the weights and the values, the transposes in other products, for the gradient of the values, the dropout); None if something else reads the weights."""
    weights, dropout = softmax, None
    readers = [u for u in _readers(softmax) if u.target is not aten._softmax_backward_data.default]
    if (
        len(readers) == 1
        and readers[0].target is aten.native_dropout.default
        and readers[0].args[2]
    ):
        dropout = readers[0]
        weights = next(
            (u for u in dropout.users if u.target is operator.getitem and u.args[1] == 0), None
        )
        if weights is None:
            return None
        readers = _readers(weights)
    outs = [
        u
        for u in readers
        if u.target is aten.bmm.default and _through_views(u.args[0], []) is weights
    ]
    turned = [u for u in readers if u not in outs]
    return (outs[0], turned, dropout) if len(outs) == 1 and all(map(_is_turned, turned)) else None


def _is_turned(x: fx.Node) -> bool:
    """Whether `x` exchanges the last two dimensions for a product: that is the gradient of the values."""
    if x.target not in (aten.transpose.int, aten.permute.default):
        return False
    rank = len(x.meta["val"].shape)
    swaps = x.target is aten.transpose.int and {d % rank for d in x.args[1:]} == {
        rank - 2,
        rank - 1,
    }
    swaps = (
        swaps
        or x.target is aten.permute.default
        and list(x.args[1]) == [*range(rank - 2), rank - 1, rank - 2]
    )
    return swaps and all(u.target is aten.bmm.default for u in x.users)


def _gradient_of_output(g: fx.Node, out: fx.Node, dropout: fx.Node | None) -> fx.Node | None:
    """The gradient of `out`, if `g` is its product with the values of `out`, after dropout."""
    g = _through_views(g, [])
    if dropout is not None:
        mask = g.args[1] if g.target is aten.native_dropout_backward.default else None
        if mask is None or mask.target is not operator.getitem or mask.args != (dropout, 1):
            return None
        g = _through_views(g.args[0], [])
    if (
        g.target is not aten.bmm.default
        or not _is_turned(g.args[1])
        or g.args[1].args[0] is not out.args[1]
    ):
        return None
    return g.args[0] if g.args[0].meta["val"].shape == out.meta["val"].shape else None


def _rewrite(graph: fx.Graph, softmax: fx.Node, gradient: fx.Node, out: fx.Node, grad: fx.Node, turned: list[fx.Node], dropout: fx.Node | None,
             path: list[fx.Node]) -> None:  # fmt: skip
    def call(target, *args) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda a: a.meta["val"]))
        return node

    def wide(x: fx.Node) -> fx.Node:
        return (
            x
            if x.meta["val"].dtype == torch.float32
            else call(torch.ops.prims.convert_element_type.default, x, torch.float32)
        )

    def like(x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return (
            x
            if x.meta["val"].dtype == dtype
            else call(torch.ops.prims.convert_element_type.default, x, dtype)
        )

    def sizes(x: fx.Node) -> list:
        return [
            n if isinstance(n, int) else call(aten.sym_size.int, x, d)
            for d, n in enumerate(x.meta["val"].shape)
        ]

    with graph.inserting_before(softmax):
        s = wide(softmax.args[0])
        top = call(aten.amax.default, s, [-1])
        e = call(aten.exp.default, call(aten.sub.Tensor, s, call(aten.unsqueeze.default, top, -1)))
        total = call(aten.sum.dim_IntList, e, [-1])
        weights = like(
            call(aten.div.Tensor, e, call(aten.unsqueeze.default, total, -1)),
            softmax.meta["val"].dtype,
        )
        kept = (
            call(aten.mul.Tensor, top, _LOG2E),
            call(aten.mul.Tensor, call(aten.log.default, total), _LOG2E),
        )
        relative = call(aten.mul.Tensor, s, _LOG2E)
        again = [*path, s, relative]
        for row in kept:
            relative = call(aten.sub.Tensor, relative, call(aten.unsqueeze.default, row, -1))
            again.append(relative)
        exponent = call(aten.mul.Tensor, relative, 1 / _LOG2E)
        recomputed = call(aten.exp.default, exponent)
        narrow = like(recomputed, softmax.meta["val"].dtype)
        again += (exponent, recomputed, narrow)
    if dropout is not None:
        with graph.inserting_before(dropout.next):
            mask = graph.call_function(operator.getitem, (dropout, 1))
            mask.meta["val"] = dropout.meta["val"][1]
            unscaled = call(aten.mul.Tensor, narrow, mask)
            narrow = call(aten.mul.Tensor, unscaled, 1 / (1 - dropout.args[1]))
        again += (unscaled, narrow)
    for x in turned:
        used = x.args[0]
        with graph.inserting_before(x):
            view = call(aten.view.default, narrow, sizes(used))
            y = like(view, used.meta["val"].dtype)
        x.replace_input_with(used, y)
        again += (view, y)
    softmax.replace_all_uses_with(weights)
    for n in again:
        n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for n in kept:
        n.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with graph.inserting_before(gradient):
        delta = call(aten.sum.dim_IntList, call(aten.mul.Tensor, wide(grad), wide(out)), [-1], True)
        delta = call(aten.view.default, delta, [*sizes(gradient.args[0])[:-1], 1])
        ds = call(aten.mul.Tensor, recomputed, call(aten.sub.Tensor, wide(gradient.args[0]), delta))
        ds = like(ds, gradient.meta["val"].dtype)
    gradient.replace_all_uses_with(ds)
    graph.erase_node(gradient)
