"""Keys of recorded graphs: equal exactly when one program computes both."""

import gc
import time
import weakref

import pytest
import torch

from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.lazy.record.storage import Array, Number
from torch_hlo.lazy.run.fingerprint import collect
from torch_hlo.lowering.core.graph import Node, Out

aten = torch.ops.aten
F4 = Shape("f32", (4,))


def leaf(shape=F4):
    return Array(shape, None)


def node(op, *args, shape=F4, **kwargs):
    return Out(Node(op, args, kwargs, (shape,)))


def key(*outs):
    return collect(outs).key


def pair(op=aten.add.Tensor, shape=F4, **kwargs):
    x, y = leaf(shape), leaf(shape)
    return node(aten.mul.Tensor, node(op, x, y, shape=shape, **kwargs), x, shape=shape)


def test_same_structure_same_key():
    assert key(pair()) == key(pair())
    assert hash(key(pair())) == hash(key(pair()))


@pytest.mark.parametrize(
    "other",
    [
        pair(aten.sub.Tensor),
        pair(shape=Shape("f32", (5,))),
        pair(shape=Shape("f64", (4,))),
        pair(alpha=2),
    ],
    ids=["op", "shape", "dtype", "keyword"],
)
def test_op_shape_dtype_keyword_differ(other):
    assert key(pair()) != key(other)


def test_wiring_differs():
    x, y = leaf(), leaf()
    # both are (input 0, input 1)
    assert key(node(aten.sub.Tensor, x, y)) == key(node(aten.sub.Tensor, y, x))
    assert key(node(aten.sub.Tensor, x, x)) != key(node(aten.sub.Tensor, x, y))
    a = node(aten.exp.default, x)
    assert key(node(aten.sub.Tensor, a, x)) != key(node(aten.sub.Tensor, x, a))


def test_the_same_leaf_is_one_input():
    x = leaf()
    graph = collect([node(aten.add.Tensor, node(aten.exp.default, x), x)])
    assert graph.leaves == [x]


# Values that Python calls equal or that do not equal themselves.
STATICS = [
    1,
    True,
    1.0,
    0.0,
    -0.0,
    "1",
    None,
    1j,
    [1],
    [True],
    [1.0],
    [],
    torch.float32,
    torch.preserve_format,
    float("inf"),
    [[1], 1],
    [1, 1],
]


def test_static_arguments_never_collide():
    keys = [key(node(aten.sum.dim_IntList, leaf(), value)) for value in STATICS]
    for i, a in enumerate(keys):
        for j, b in enumerate(keys):
            assert (a == b) == (i == j), (STATICS[i], STATICS[j])


def test_static_nan_equals_itself():
    assert key(node(aten.add.Tensor, leaf(), float("nan"))) == key(
        node(aten.add.Tensor, leaf(), float("nan"))
    )


def test_results_do_not_collide_with_integers():
    x = leaf()
    a = node(aten.exp.default, x)
    assert key(node(aten.add.Tensor, a, a)) != key(node(aten.add.Tensor, a, 0))
    assert key(node(aten.add.Tensor, a, x)) != key(node(aten.add.Tensor, a, -1))
    assert key(node(aten.cat.default, [a, a])) != key(node(aten.cat.default, [0, 0]))


def test_lifted_numbers_do_not_change_the_key():
    def scaled(value, dtype="f64"):
        return key(node(aten.mul.Tensor, leaf(), Number(value, dtype)))

    assert scaled(0.1) == scaled(0.2)
    assert scaled(1.0) != scaled(1, "s64")
    graph = collect([node(aten.mul.Tensor, leaf(), Number(0.1, "f64"))])
    assert [n.value for n in graph.numbers] == [0.1]


def test_outputs_are_part_of_the_key():
    x = leaf()
    a = node(aten.exp.default, x)
    b = node(aten.neg.default, a)
    assert key(b) != key(a, b)
    assert key(a, b) != key(b, a)
    split = Node(aten.split.Tensor, (x, 2), {}, (Shape("f32", (2,)), Shape("f32", (2,))))
    assert key(Out(split, 0)) != key(Out(split, 1))


def test_result_dtype_is_part_of_the_key():
    # arange's dtype follows the default dtype, which no argument shows.
    assert key(node(aten.arange.default, 4, shape=Shape("f32", (4,)))) != key(
        node(aten.arange.default, 4, shape=Shape("f64", (4,)))
    )


def test_evaluated_results_are_leaves():
    x = leaf()
    a = node(aten.exp.default, x)
    b = node(aten.neg.default, a)
    a.array = leaf()
    graph = collect([b])
    assert len(graph.nodes) == 1
    assert graph.leaves == [a.array]


def test_unknown_argument_is_named():
    with pytest.raises(TypeError, match=r"object.*aten.add.Tensor"):
        key(node(aten.add.Tensor, leaf(), object()))


def test_a_chain_of_fifty_thousand_ops():
    x = node(aten.exp.default, leaf())
    first = weakref.ref(x.node)
    for _ in range(50_000):
        x = node(aten.exp.default, x)
    graph = collect([x])
    assert len(graph.nodes) == 50_001
    assert graph.nodes[0] is first()
    del graph, x  # must not overflow the C stack either
    gc.collect()
    assert first() is None


def test_a_wide_and_deep_graph_is_linear():
    x = leaf()
    values = [x]
    for i in range(4000):
        values.append(node(aten.add.Tensor, values[-1], values[i // 2]))
    start = time.process_time()
    collect([values[-1]])
    assert time.process_time() - start < 1.0


def test_a_graph_is_no_circle():
    """What it holds is let go of at once: steps of new sizes would keep all their inputs."""
    x = leaf()
    array = weakref.ref(x)
    gc.disable()
    try:
        graph = collect([node(aten.add.Tensor, x, [x])])
        assert graph.leaves == [x]
        del graph, x
        assert array() is None
    finally:
        gc.enable()
