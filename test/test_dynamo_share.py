"""What the joint graph of forward and backward computes once, and what stays apart."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hlo.dynamo.share import share

aten = torch.ops.aten


def graph_of(build) -> fx.Graph:
    """A graph of aten calls on x (f32[4]), each with its fake value, as AOTAutograd writes it."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(4)

    def call(op, *args, **kwargs) -> fx.Node:
        node = graph.call_function(op, args, kwargs)
        with mode:
            node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    graph.output(build(x, call))
    return graph


def calls(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_equal_calls_are_computed_once():
    graph = graph_of(
        lambda x, call: [
            call(aten.mul.Tensor, call(aten.sin.default, x), call(aten.sin.default, x))
        ]
    )
    assert share(graph) == 1
    assert calls(graph) == ["aten.sin.default", "aten.mul.Tensor"]


@pytest.mark.parametrize("a, b", [(1, 1.0), (True, 1), (0.0, -0.0), (2.0, 3.0)])
def test_arguments_that_differ(a, b):
    graph = graph_of(
        lambda x, call: [
            call(
                aten.add.Tensor,
                call(aten.mul.Scalar, x, a),
                call(aten.mul.Scalar, x, b),
            )
        ]
    )
    assert share(graph) == 0


def test_results_stay_apart():
    graph = graph_of(lambda x, call: [call(aten.sin.default, x), call(aten.sin.default, x)])
    assert share(graph) == 0


def test_random_numbers_stay_apart():
    graph = graph_of(
        lambda x, call: [
            call(
                aten.add.Tensor,
                call(aten.rand_like.default, x),
                call(aten.rand_like.default, x),
            )
        ]
    )
    assert share(graph) == 0


def test_reads_before_and_after_a_write():
    def build(x, call):
        a, other = (
            call(aten.sin.default, x),
            call(aten.cos.default, call(aten.full.default, [4], 1.0)),
        )
        call(aten.copy_.default, x, a)
        b, same = (
            call(aten.sin.default, x),
            call(aten.cos.default, call(aten.full.default, [4], 1.0)),
        )
        return [
            call(
                aten.add.Tensor,
                call(aten.add.Tensor, a, b),
                call(aten.add.Tensor, other, same),
            )
        ]

    graph = graph_of(build)
    assert share(graph) == 2  # full and cos, but not sin of what has been written
    assert calls(graph).count("aten.sin.default") == 2


def test_training_imports_no_inductor_lowerings():
    """They take longer than everything else in the first step of a small model."""
    code = """
        import sys, torch
        model = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)), backend="hlo")
        model(torch.randn(2, 4)).sum().backward()
        assert "torch._inductor.lowering" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
