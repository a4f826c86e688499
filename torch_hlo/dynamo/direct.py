"""Calls of compiled graphs: of those recorded with their gradients (`trained`), and of
AOTAutograd's without its Python where they need none of it.

    graphs = Graphs(graph_module, example_inputs)
    aot = aot_autograd(fw_compiler=graphs.keep("forward", compile), …)(graph_module, example_inputs)
    call = graphs.direct(aot)

What AOTAutograd returns prepares each call for all that a graph may do: return views of its inputs,
resize them, hold tensor subclasses, number its random ops. Most graphs do nothing of the kind, and
small models spend more time there than in their programs. Whether a graph needs it is in the
metadata that AOTAutograd has collected. A training graph becomes a `torch.autograd.Function` that
inherits from AOTAutograd's own for that graph, found behind the first result: compiled autograd and
gradients of unusual types go on there.

A graph whose gradient is to be differentiated (`create_graph=True`: gradient penalties, equations
in derivatives) is beyond AOTAutograd, which raises. If it draws no random numbers and writes to no
input, it is computed again and differentiated by PyTorch, which also runs its later calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_hlo.frozen import frozen
from torch_hlo.lowering.core import is_random
from torch_hlo.pytorch import participants, shortcuts, tracing
from torch_hlo.pytorch.registration import PLACE

from .cut import Joint

# Of ViewAndMutationMeta: what it says of a graph that needs no preparation.
_PLAIN: dict[str, object] = {
    "num_mutated_inp_runtime_indices": 0,
    "num_outputs_aliased": 0,
    "num_intermediate_bases": 0,
    "tokens": {},
    "num_backward_tokens": 0,
    "num_graphsafe_rng_states": 0,
    "is_rng_op_functionalized": False,
    "grad_enabled_mutation": None,
}

# in a forward graph's `meta`: the number of its outputs that are not kept for the backward graph
LOSSES = "torch_hlo_losses"


class Graphs:
    """The compiled graphs of one Dynamo graph: an inference graph, or a forward and (from its first
    use on) a backward graph."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence) -> None:
        self.eager = graph_module
        self.arguments = len(example_inputs)
        self.tensors = [i for i, x in enumerate(example_inputs) if isinstance(x, torch.Tensor)]
        # Parameters of the module itself would be further arguments, and saved tensors' hooks are
        # compiled into the graph.
        hooks = participants.saved_tensors_hooks()
        # tensor subclasses of this package
        elsewhere = any(map(PLACE.has, example_inputs))
        self.plain = (
            hooks is None
            and not elsewhere
            and not [*graph_module.parameters(), *graph_module.buffers()]
        )
        self.repeatable = not torch.is_autocast_enabled("cpu")
        self.twice = False  # its gradient has been differentiated
        self.run: dict[str, Callable[[list], list]] = {}
        # for each input, whether the backward graph computes a gradient
        self.gradients: list[bool] = []

    def keep(self, kind: str, compiler: Callable) -> Callable:
        """The compiler, whose result is noted as the graph of this kind."""

        def compile(graph_module: fx.GraphModule, example_inputs: Sequence) -> Callable:
            if kind == "forward":
                graph_module.meta[LOSSES] = tracing.graph_metadata().num_forward_returns
            run = compiler(graph_module, example_inputs)
            if kind == "backward":
                (output,) = graph_module.graph.find_nodes(op="output")
                self.gradients = [x is not None for x in output.args[0]]
            else:
                metadata = self.metadata = tracing.graph_metadata()
                inputs = len(graph_module.graph.find_nodes(op="placeholder"))
                self.plain = (
                    self.plain
                    and inputs == self.arguments == len(metadata.input_info)
                    and _is_plain(metadata)
                )
                drawn = any(
                    is_random(n.target)
                    for n in graph_module.graph.nodes
                    if hasattr(n.target, "tags")
                )
                self.repeatable = (
                    self.repeatable and self.plain and not drawn and not _written(metadata)
                )
            self.run[kind] = run
            return run

        return compile

    def direct(self, aot: Callable) -> Callable:
        """A function that does what `aot` does."""
        run = self.run.get("inference")
        if not self.plain:
            return aot
        if run is None:
            return self._training(aot)
        if _written(self.metadata) or self.metadata.dynamic_outputs or not shortcuts.on("direct"):
            return aot

        def call(*args) -> list:
            return run(list(args))

        return call

    def _training(self, aot: Callable) -> Callable:
        apply: Callable | None = None
        in_transform = participants.in_transform

        def call(*args) -> Sequence:
            nonlocal apply
            if apply is not None and not self.twice and not in_transform():
                return apply(*args)
            if self.twice:
                return self.eager(*args)
            results = aot(*args)
            nodes = (r.grad_fn for r in results if isinstance(r, torch.Tensor))
            node = next(
                (n for n in nodes if hasattr(getattr(n, "_forward_cls", None), "compiled_fw")),
                None,
            )
            if node is not None:
                function = node._forward_cls
                if self.repeatable:
                    _keep_inputs(node, args, self.tensors)
                    if not hasattr(function.backward, "repeats"):
                        function.backward = staticmethod(
                            self._differentiable(
                                function.backward,
                                getattr(function, "boxed_grads_call", False),
                            )
                        )
                if "backward" in self.run and shortcuts.on("direct"):
                    apply = self._function(function)
            return results

        return call

    def _differentiable(self, compiled: Callable, boxed: bool) -> Callable:
        """The `backward` of a function, but that with create_graph=True the graph is computed
        again, by PyTorch. `boxed`: it takes a list of gradients."""

        def backward(ctx: Any, *args: Any) -> tuple:
            inputs = getattr(ctx, "inputs", None)
            if inputs is None or not torch.is_grad_enabled():
                return compiled(ctx, *args)
            if ctx.versions != [a._version for a in inputs if isinstance(a, torch.Tensor)]:
                raise RuntimeError(
                    "torch.compile(backend='hlo'): one of the inputs of a compiled graph has been"
                    " modified by an inplace operation, and the graph is differentiated twice;"
                    " clone the input"
                )
            if not self.twice:
                self.twice = True
                warnings.warn(
                    "torch.compile(backend='hlo'): a graph's gradient is differentiated"
                    " (create_graph=True); PyTorch runs the graph from now on",
                    stacklevel=2,
                )
            results = self.eager(*inputs)
            given = zip(results, args[0] if boxed else args)
            ends, tangents = zip(
                *(
                    (r, g)
                    for r, g in given
                    if g is not None and isinstance(r, torch.Tensor) and r.requires_grad
                )
            )
            wanted = [
                i for i, a in enumerate(inputs) if isinstance(a, torch.Tensor) and a.requires_grad
            ]
            found = torch.autograd.grad(
                ends,
                [inputs[i] for i in wanted],
                tangents,
                create_graph=True,
                allow_unused=True,
            )
            gradients = dict(zip(wanted, found))
            return tuple([gradients.get(i) for i in range(len(inputs))])

        backward.repeats = True
        return torch.compiler.disable(backward, reason="PyTorch runs the graph")

    def trained(
        self,
        joint: Joint,
        saved: Sequence[int | None],
        forward: Callable,
        backward: Callable,
    ) -> Callable:
        """A function of a graph that was recorded with its gradients (trace.py, cut.py)."""
        self.repeatable = (
            self.repeatable
            and not joint.writes
            and not any("seed" in node.kwargs for node in joint.nodes)
        )
        results = _Results.of_joint(joint)
        inputs = self.tensors if self.repeatable else None
        function = _recorded(results, inputs, saved, forward, backward)
        if self.repeatable:
            function.backward = staticmethod(self._differentiable(function.backward, False))
        else:
            function.backward = staticmethod(
                torch.compiler.disable(function.backward, reason="a compiled graph")
            )
        written = [position for position, _ in joint.writes]
        unread = [i for i, (g, _) in enumerate(joint.gradients) if g is None]
        in_transform, mark = (
            participants.in_transform,
            torch.autograd.graph.increment_version,
        )
        # without the questions that `in_transform` has answered
        apply = super(torch.autograd.Function, function).apply

        def call(*args: torch.Tensor) -> Sequence:
            if self.twice or in_transform():
                return self.eager(*args)
            if written:
                mark([args[i] for i in written])
            if unread:
                args = [
                    a.detach() if i in unread and a.requires_grad and not a.is_leaf else a
                    for i, a in enumerate(args)
                ]
            return apply(*args)

        return call

    def _function(self, aot: type[torch.autograd.Function]) -> Callable:
        """`apply` of a function like AOTAutograd's for this graph."""
        metadata = self.metadata
        results = _Results.of_metadata(metadata, aot)
        inputs = self.tensors if self.repeatable else None
        function = _inherited(aot, results, inputs, self.run["forward"], self.run["backward"])
        # without the questions that `in_transform` has answered
        apply = super(torch.autograd.Function, function).apply
        written = _written(metadata)
        detached = [
            i
            for i, (info, has) in enumerate(zip(metadata.input_info, self.gradients))
            if not has and info.requires_grad and not info.is_leaf
        ]
        dynamic = [
            (i, info.dynamic_dims)
            for i, info in enumerate(metadata.output_info)
            if info.dynamic_dims
        ]
        if not (written or detached or dynamic):
            return apply
        mark = tracing.dynamic_marker()

        def prepared(*args: torch.Tensor) -> tuple:
            if written:
                torch.autograd.graph.increment_version([args[i] for i in written])
            if detached:
                args = [a.detach() if i in detached else a for i, a in enumerate(args)]
            results = apply(*args)
            for i, dims in dynamic:
                mark(results[i], dims)
            return results

        return prepared


@frozen
class _Results:
    """What the outputs of a forward graph are."""

    returned: int  # of them, those that the caller gets
    constant: Sequence[int]  # of those, what has no gradient
    tangents: Sequence[int]  # and what has one
    symints: int = 0  # sizes at the end, kept for the backward graph
    unchecked: int = 0  # kept tensors before them that may be written to
    boxed: bool = False  # backward takes a list of gradients

    @classmethod
    def of_joint(cls, joint: Joint) -> _Results:
        returned = len(joint.outputs)
        tangents = [i for i, _, _ in joint.tangents]
        return cls(returned, [i for i in range(returned) if i not in tangents], tangents)

    @classmethod
    def of_metadata(cls, metadata: Any, aot: type[torch.autograd.Function]) -> _Results:
        tensors = [
            (i, info)
            for i, info in enumerate(metadata.output_info)
            if issubclass(info.raw_type, torch.Tensor)
        ]
        return cls(
            metadata.num_forward_returns,
            [i for i, info in tensors if not info.requires_grad],
            [
                i
                for i, info in tensors
                if getattr(info, "requires_grad_for_backward", info.requires_grad)
            ],
            aot.num_symints_saved_for_bw,
            metadata.num_tensors_saved_with_no_vc_check or 0,
            getattr(aot, "boxed_grads_call", False),
        )

    def returns(self, ctx: Any, results: Sequence) -> tuple:
        """The results that the caller gets, once autograd knows which are constant."""
        if self.constant:
            ctx.mark_non_differentiable(*[results[i] for i in self.constant])
            ctx._materialize_non_diff_grads = False
        return tuple(results[: self.returned])


def _keep_inputs(ctx: Any, args: tuple, inputs: Sequence[int] | None) -> None:
    """Note at the node of its backward graph what a graph was given that may be computed again.
    `inputs`: the tensors among that, if so."""
    if inputs is not None:
        ctx.inputs, ctx.versions = args, [args[i]._version for i in inputs]


def _drop_inputs(ctx: Any, inputs: Sequence[int] | None) -> None:
    """When the backward graph runs for the last time."""
    if inputs is not None and not participants.keeps_graph():
        ctx.inputs = None


def _recorded(
    results: _Results,
    inputs: Sequence[int] | None,
    saved: Sequence[int | None],
    forward: Callable,
    backward: Callable,
) -> type[torch.autograd.Function]:
    """The function of two programs. `inputs`: the tensors among the arguments, if the graph may be
    computed again; `saved`: for each value that backward takes, the argument that it is."""
    returned, tangents = results.returned, results.tangents

    class Trained(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: torch.Tensor) -> tuple:
            _keep_inputs(ctx, args, inputs)
            found = forward(list(args))
            more = iter(found[returned:])
            ctx.save_for_backward(*[next(more) if i is None else args[i] for i in saved])
            return results.returns(ctx, found)

        @staticmethod
        def backward(ctx: Any, *given: torch.Tensor) -> tuple:
            _drop_inputs(ctx, inputs)
            values = [*ctx.saved_tensors, *[given[i] for i in tangents]]
            del given
            if not torch.is_grad_enabled():
                return tuple(backward(values))
            with torch.no_grad():
                found = backward(values)
            return participants.refuse_second_backward(found, _NO_DOUBLE_BACKWARD)

    return Trained


def _inherited(
    aot: type[torch.autograd.Function],
    results: _Results,
    inputs: Sequence[int] | None,
    forward: Callable,
    backward: Callable,
) -> type[torch.autograd.Function]:
    """A function like AOTAutograd's `aot`, which has what is out of the ordinary. `inputs`: as for
    `_recorded`."""
    boxed = results.boxed

    class Direct(aot):
        @staticmethod
        def forward(ctx: Any, *args: torch.Tensor) -> tuple:
            _keep_inputs(ctx, args, inputs)
            found = forward(list(args))
            end = len(found) - results.symints
            saved = [x.detach() if x._is_view() else x for x in found[results.returned : end]]
            checked = len(saved) - results.unchecked
            ctx.save_for_backward(*saved[:checked])
            ctx._tensors_no_vc_check = saved[checked:]
            ctx.symints, ctx.opaque_objects = found[end:], ()
            return results.returns(ctx, found)

        @staticmethod
        def backward(ctx: Any, *args: Any) -> tuple:
            given = args[0] if boxed else args
            gradients = [given[i] for i in results.tangents]
            if torch.is_grad_enabled() or any([type(g) is not torch.Tensor for g in gradients]):
                return aot.backward(ctx, *args)
            if boxed:
                given.clear()
            del args, given
            _drop_inputs(ctx, inputs)
            values = [
                *ctx.symints,
                *ctx.saved_tensors,
                *ctx._tensors_no_vc_check,
                *gradients,
            ]
            del gradients
            ctx.maybe_clear_saved_tensors()
            return tuple(backward(values))

    Direct.backward = staticmethod(
        torch.compiler.disable(Direct.backward, reason="a compiled graph")
    )
    return Direct


_NO_DOUBLE_BACKWARD = (
    b"torch.compile(backend='hlo') has no double backward of graphs that draw random numbers, write"
    b" to their inputs or are called under autocast"
)


def _is_plain(metadata: Any) -> bool:
    subclasses = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta)
    return (
        all(getattr(metadata, name, value) == value for name, value in _PLAIN.items())
        and all(type(s).__name__ in ("PlainTensorMeta", "int") for s in subclasses)
        and not getattr(metadata, "indices_of_inputs_that_requires_grad_with_mutations_in_bw", ())
    )


def _written(metadata: Any) -> list[int]:
    """Inputs that the program writes to."""
    return list(metadata.mutated_graph_handled_indices_seen_by_autograd)
