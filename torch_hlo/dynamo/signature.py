"""The arguments of Dynamo's graphs on hlo tensors: tensors, whole numbers, and floats, which Dynamo
passes as tensors of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_hlo.lazy.record import HloTensor, Storage, from_cpu
from torch_hlo.pytorch import steps
from torch_hlo.pytorch.numbers import plain
from torch_hlo.pytorch.registration import PLACE


class Signature:
    """What a graph takes. `tensors`, `floats`, `whole`: positions of arguments; `run`: the graph as
    a function that is given floats as numbers; `constants`: storages of its own tensors; `reason`:
    why calls of it have to be recorded each time, or ""; `boxed`: positions of results that are
    floats, which Dynamo wants as tensors of the CPU."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.tensors: list[int] = []
        self.floats: list[int] = []
        self.whole: list[int] = []
        self.boxed: set[int] = set()
        self.moved: list[int] = []  # tensors of the CPU that are only copied to the device
        self.reason = ""
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        self.count = len(placeholders)
        for at, node in enumerate(placeholders):
            self._argument(at, node)
        own = [*graph_module.parameters(), *graph_module.buffers()]
        self.constants: list[Storage] = [t._storage for t in own if type(t) is HloTensor]
        for node in graph_module.graph.nodes:
            if node.kwargs.get("generator") is not None:
                self.reason = "it draws from a generator of its own"
            if node.op == "output":
                self._results(node)
        self.module = self._with_numbers(graph_module)
        self.run = self.module.forward

    def _argument(self, at: int, node: fx.Node) -> None:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            self.whole.append(at)
        elif value.device.type in PLACE.names:
            self.tensors.append(at)
        elif _is_float(node, value):
            self.floats.append(at)
        elif node.users and not value.requires_grad and all(map(_moves, node.users)):
            self.moved.append(at)
            self.tensors.append(at)
        else:
            self.reason = "an argument is on the CPU"

    def _results(self, output: fx.Node) -> None:
        for node in output.args[0]:
            if not isinstance(node, fx.Node) or steps.CONSUMED in node.meta:
                continue
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                self.reason = "gradients flow from a result"

    def _with_numbers(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """The graph as one that is given numbers at the positions `floats`, and gives them
        at the positions `boxed`."""
        if not self.floats:
            return graph_module
        graph = fx.Graph()
        results = list(graph.graph_copy(graph_module.graph, copied := {}))
        for at, node in enumerate(results):
            if isinstance(node, fx.Node) and _is_boxed(node):
                results[at] = node.args[0]
                self.boxed.add(at)
                if not node.users:  # else it would take the number for granted
                    graph.erase_node(node)
        graph.output(results)
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        for at in self.floats:
            for user in placeholders[at].users:
                copied[user].replace_all_uses_with(copied[placeholders[at]])
                graph.erase_node(copied[user])
        return fx.GraphModule(graph_module, graph)

    def result(self, at: int, value: Any) -> Any:
        """The result at this position, as Dynamo wants it."""
        value = plain(value)
        return torch.scalar_tensor(value, dtype=torch.float64) if at in self.boxed else value

    def meta(self, argument: int, key: tuple) -> Any:
        """The metadata of the tensor at this position in calls with this key."""
        return key[0][self.tensors.index(argument)]

    def brought(self, args: Sequence) -> Sequence:
        """The arguments, with those of the CPU on the device."""
        if not self.moved:
            return args
        args = list(args)
        for at in self.moved:
            args[at] = from_cpu(args[at])
        return args

    def arguments(self, given: Given, numbers: Sequence) -> list:
        """The arguments, with these floats."""
        args = list(given.args)
        for at, number in zip(self.floats, numbers):
            args[at] = number
        return args


class Given:
    """The arguments of one call. `key`: what calls that one recording may serve have in common."""

    __slots__ = ("args", "signature", "storages", "numbers", "versions", "key")

    def __init__(self, signature: Signature, args: Sequence) -> None:
        self.args = args
        self.signature = signature
        tensors = [args[i] for i in signature.tensors]
        self.storages = [t._storage for t in tensors]
        self.numbers = [args[i].item() for i in signature.floats] if signature.floats else ()
        views = [t._view for t in tensors]
        self.key = (
            [t._meta for t in tensors],
            [_steps(v) for v in views] if any(views) else None,
            [args[i] for i in signature.whole],
            torch.is_inference_mode_enabled(),
        )

    def rebound(self) -> bool:
        """Whether a tensor has become another view, or has other memory (`x.data = y`), since."""
        tensors = [self.args[i] for i in self.signature.tensors]
        return any(t._storage is not s for t, s in zip(tensors, self.storages)) or (
            Given(self.signature, self.args).key != self.key
        )

    def watch_versions(self) -> None:
        """From here on, writes are noticed."""
        self.versions = [_version(self.args[i]) for i in self.signature.tensors]

    def written(self) -> list[int]:
        """Positions of the tensors that were written to, as often as they were."""
        at = self.signature.tensors
        counts = [_version(self.args[i]) - v for i, v in zip(at, self.versions)]
        return [i for i, n in zip(at, counts) for _ in range(n)]


def _version(x: torch.Tensor) -> int:
    """Of tensors made in inference mode writes are not counted."""
    return 0 if x.is_inference() else x._version


def _is_float(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether a placeholder is a number of Python: Dynamo makes a tensor of it, and the graph the
    number of that."""
    return (
        value.dtype == torch.float64
        and value.dim() == 0
        and bool(node.users)
        and all(user.op == "call_method" and user.target == "item" for user in node.users)
    )


def _moves(user: fx.Node) -> bool:
    """Whether this copies a tensor to the device."""
    made = user.meta.get("example_value")
    to = user.op == "call_method" and user.target == "to"
    return to and PLACE.has(made)


def _is_boxed(node: fx.Node) -> bool:
    """Whether a result is a float that Dynamo has made a tensor of."""
    return node.target is torch.scalar_tensor and node.kwargs == {"dtype": torch.float64}


def _steps(view: Any) -> tuple:
    """How a view follows from its storage."""
    steps = []
    while view is not None:
        steps.append((view.op, repr(view.args)))
        view = view.parent
    return tuple(steps)
