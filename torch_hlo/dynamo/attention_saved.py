"""What attention that is written out saves for its backward pass: two numbers per row, and no
weights. For that AOTAutograd's joint graph is changed before PyTorch's minimal cut makes a forward
and a backward graph of it.

    w = softmax(s(q k^T)); y = (w f) v;  backward: g = f (dy v^T); ds = w (g - sum(g w))    f:
    dropout
 -> w, m, l = attention_weights(s);      backward: w = attention_weights_again(s, m, l);
                                                   ds = w (g - sum(dy y))

Scores and weights are computed again in the backward graph; both ops say that they belong to an
attention (lowering/nn/attention_weights.py), the products of each graph become one kernel
(compiler/attention/attention_match.py), and nothing of rows x columns is in memory but the mask of
a dropout (Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 4)."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_hlo.lowering.nn.attention_weights import WEIGHTS, WEIGHTS_AGAIN

from .share import share

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}
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
_FEW = 32  # rows or columns: the array of weights is small


def forward_and_backward(
    joint: fx.GraphModule, inputs: Sequence[object], **kwargs: object
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """`min_cut_rematerialization_partition`, of a graph that computes weights of attention
    again."""
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
    # kernels of a GPU are not found by structure; graphs on hlo tensors become one program
    if gradient.meta["val"].device.type != "cpu":
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
    """What `x` is a view or conversion of, with the same last two dimensions; `path` gets the
    views."""
    while x.target in _VIEWS and _last(x.args[0]) == _last(x):
        path.append(x)
        x = x.args[0]
    return x


def _last(x: fx.Node) -> torch.Size:
    """The last two dimensions."""
    return x.meta["val"].shape[-2:]


def _scores(x: fx.Node, path: list[fx.Node]) -> bool:
    """Whether `x` is a product, scaled, biased and masked; `path` gets what leads to it."""
    x = _through_views(x, path)
    if x.target is aten.bmm.default:
        path.append(x)
        return True
    if x.target not in _SCORES:
        return False
    for operand in x.args[1:] if x.target is aten.where.self else x.args[:2]:
        if isinstance(operand, fx.Node) and _last(operand) == _last(x):
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
    mine = [u for u in x.users if u.target in _VIEWS and _last(u) == _last(x)]
    return [*mine, *(v for u in mine for v in _views(u))]


def _product(
    softmax: fx.Node,
) -> tuple[fx.Node, list[fx.Node], fx.Node | None] | None:
    """(the product of the weights and the values, the transposes in other products, for the
    gradient of the values, the dropout); None if something else reads the weights."""
    weights = softmax
    dropout = None
    readers = [u for u in _readers(softmax) if u.target is not aten._softmax_backward_data.default]
    if (
        len(readers) == 1
        and readers[0].target is aten.native_dropout.default
        and readers[0].args[2]
    ):
        dropout = readers[0]
        weights = next(
            (u for u in dropout.users if u.target is operator.getitem and u.args[1] == 0),
            None,
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
    """Whether `x` exchanges the last two dimensions for a product: that is the gradient of the
    values."""
    if x.target not in (aten.transpose.int, aten.permute.default):
        return False
    rank = len(x.meta["val"].shape)
    swapped = [rank - 1, rank - 2]
    if x.target is aten.transpose.int:
        swaps = {d % rank for d in x.args[1:]} == {*swapped}
    else:
        swaps = list(x.args[1]) == [*range(rank - 2), *swapped]
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


def _rewrite(
    graph: fx.Graph,
    softmax: fx.Node,
    gradient: fx.Node,
    out: fx.Node,
    grad: fx.Node,
    turned: list[fx.Node],
    dropout: fx.Node | None,
    path: list[fx.Node],
) -> None:
    """Marked weights in place of a softmax and its gradient; `path`: what leads to the scores."""
    with graph.inserting_before(softmax):
        s = _like(graph, softmax.args[0], torch.float32)
        results = _call(graph, WEIGHTS, s)
        weights, *kept = (_call(graph, operator.getitem, results, i) for i in range(3))
        weights = _like(graph, weights, softmax.meta["val"].dtype)
        recomputed = _call(graph, WEIGHTS_AGAIN, s, *kept)
        narrow = _like(graph, recomputed, softmax.meta["val"].dtype)
    again = [*path, s, recomputed, narrow]
    again += _used_again(graph, narrow, turned, dropout)
    softmax.replace_all_uses_with(weights)
    for n in again:
        n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for n in kept:
        n.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with graph.inserting_before(gradient):
        wide, wide_out = (_like(graph, x, torch.float32) for x in (grad, out))
        delta = _call(
            graph,
            aten.sum.dim_IntList,
            _call(graph, aten.mul.Tensor, wide, wide_out),
            [-1],
            True,
        )
        rows = _sizes(graph, gradient.args[0])[:-1]
        delta = _call(graph, aten.view.default, delta, [*rows, 1])
        difference = _call(
            graph,
            aten.sub.Tensor,
            _like(graph, gradient.args[0], torch.float32),
            delta,
        )
        ds = _call(graph, aten.mul.Tensor, recomputed, difference)
        ds = _like(graph, ds, gradient.meta["val"].dtype)
    gradient.replace_all_uses_with(ds)
    graph.erase_node(gradient)


def _used_again(
    graph: fx.Graph, weights: fx.Node, turned: list[fx.Node], dropout: fx.Node | None
) -> list[fx.Node]:
    """Has the gradient of the values read `weights`, computed again, after dropout; what that
    takes."""
    again: list[fx.Node] = []
    if dropout is not None:
        with graph.inserting_before(dropout.next):
            mask = graph.call_function(operator.getitem, (dropout, 1))
            mask.meta["val"] = dropout.meta["val"][1]
            unscaled = _call(graph, aten.mul.Tensor, weights, mask)
            weights = _call(graph, aten.mul.Tensor, unscaled, 1 / (1 - dropout.args[1]))
        again += (unscaled, weights)
    for x in turned:
        used = x.args[0]
        with graph.inserting_before(x):
            view = _call(graph, aten.view.default, weights, _sizes(graph, used))
            y = _like(graph, view, used.meta["val"].dtype)
        x.replace_input_with(used, y)
        again += (view, y)
    return again


def _call(graph: fx.Graph, target: Callable[..., object], *args: object) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda a: a.meta["val"]))
    return node


def _like(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    if x.meta["val"].dtype == dtype:
        return x
    return _call(graph, torch.ops.prims.convert_element_type.default, x, dtype)


def _sizes(graph: fx.Graph, x: fx.Node) -> list[int | fx.Node]:
    return [
        n if isinstance(n, int) else _call(graph, aten.sym_size.int, x, d)
        for d, n in enumerate(x.meta["val"].shape)
    ]
