"""Calls of compiled graphs without AOTAutograd's Python, for graphs that need none of it.

    graphs = Graphs(graph_module, example_inputs)
    aot = aot_autograd(fw_compiler=graphs.keep("forward", compile), …)(graph_module, example_inputs)
    call = graphs.direct(aot)

What AOTAutograd returns prepares each call for all that a graph may do: return views of its inputs, resize them, hold tensor subclasses, number
its random ops. Most graphs do nothing of the kind, and small models spend more time there than in their programs. Whether a graph needs it is in
the metadata that AOTAutograd has collected. A training graph becomes a `torch.autograd.Function` that inherits from AOTAutograd's own for that
graph, found behind the first result: differentiating twice, compiled autograd and gradients of unusual types go on there.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._guards import TracingContext

# Of ViewAndMutationMeta: what it says of a graph that needs no preparation.
_PLAIN: dict[str, object] = {
    "num_mutated_inp_runtime_indices": 0, "num_outputs_aliased": 0, "num_intermediate_bases": 0, "tokens": {}, "num_backward_tokens": 0,
    "num_graphsafe_rng_states": 0, "is_rng_op_functionalized": False, "grad_enabled_mutation": None,
}  # fmt: skip


class Graphs:
    """The compiled graphs of one Dynamo graph: an inference graph, or a forward and (from its first use on) a backward graph."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence) -> None:
        self.arguments = len(example_inputs)
        # Parameters of the module itself would be further arguments, and saved tensors' hooks are compiled into the graph.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.plain = hooks is None and not [*graph_module.parameters(), *graph_module.buffers()]
        self.run: dict[str, Callable[[list], list]] = {}
        self.gradients: list[bool] = []  # for each input, whether the backward graph computes a gradient

    def keep(self, kind: str, compiler: Callable) -> Callable:
        """The compiler, whose result is noted as the graph of this kind."""

        def compile(graph_module: fx.GraphModule, example_inputs: Sequence) -> Callable:
            run = compiler(graph_module, example_inputs)
            if kind == "backward":
                (output,) = (n for n in graph_module.graph.nodes if n.op == "output")
                self.gradients = [x is not None for x in output.args[0]]
            else:
                metadata = self.metadata = TracingContext.get().fw_metadata
                inputs = len(graph_module.graph.find_nodes(op="placeholder"))
                self.plain = self.plain and inputs == self.arguments == len(metadata.input_info) and _is_plain(metadata)
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
        if _written(self.metadata) or self.metadata.dynamic_outputs:
            return aot

        def call(*args) -> list:
            return run(list(args))

        return call

    def _training(self, aot: Callable) -> Callable:
        apply: Callable | None = None
        in_transform = torch._C._are_functorch_transforms_active

        def call(*args) -> Sequence:
            nonlocal apply
            if apply is not None and not in_transform():
                return apply(*args)
            results = aot(*args)
            if "backward" in self.run:
                found = (getattr(r.grad_fn, "_forward_cls", None) for r in results if isinstance(r, torch.Tensor))
                function = next((f for f in found if hasattr(f, "compiled_fw")), None)
                if function is not None:
                    apply = self._function(function)
            return results

        return call

    def _function(self, aot: type[torch.autograd.Function]) -> Callable:
        """`apply` of a function like AOTAutograd's for this graph."""
        forward, backward, metadata = self.run["forward"], self.run["backward"], self.metadata
        returned, symints = metadata.num_forward_returns, aot.num_symints_saved_for_bw
        unchecked = metadata.num_tensors_saved_with_no_vc_check or 0
        boxed = getattr(aot, "boxed_grads_call", False)
        tensors = [(i, info) for i, info in enumerate(metadata.output_info) if issubclass(info.raw_type, torch.Tensor)]
        constant = [i for i, info in tensors if not info.requires_grad]
        tangents = [i for i, info in tensors if getattr(info, "requires_grad_for_backward", info.requires_grad)]
        written = _written(metadata)
        inputs = zip(metadata.input_info, self.gradients)
        detached = [i for i, (info, has) in enumerate(inputs) if not has and info.requires_grad and not info.is_leaf]
        dynamic = [(i, info.dynamic_dims) for i, info in enumerate(metadata.output_info) if info.dynamic_dims]
        Tensor = torch.Tensor

        class Direct(aot):
            @staticmethod
            def forward(ctx, *args):
                results = forward(list(args))
                end = len(results) - symints
                saved = [x.detach() if x._is_view() else x for x in results[returned:end]]
                checked = len(saved) - unchecked
                ctx.save_for_backward(*saved[:checked])
                ctx._tensors_no_vc_check = saved[checked:]
                ctx.symints, ctx.opaque_objects = results[end:], ()
                if constant:
                    ctx.mark_non_differentiable(*[results[i] for i in constant])
                    ctx._materialize_non_diff_grads = False
                return tuple(results[:returned])

            @staticmethod
            def backward(ctx, *args):
                given = args[0] if boxed else args
                gradients = [given[i] for i in tangents]
                if torch.is_grad_enabled() or any([type(g) is not Tensor for g in gradients]):
                    return aot.backward(ctx, *args)
                if boxed:
                    given.clear()
                del args, given
                values = [*ctx.symints, *ctx.saved_tensors, *ctx._tensors_no_vc_check, *gradients]
                del gradients
                ctx.maybe_clear_saved_tensors()
                return tuple(backward(values))

        Direct.backward = staticmethod(torch.compiler.disable(Direct.backward, reason="a compiled graph"))
        apply = super(torch.autograd.Function, Direct).apply  # without the questions that `in_transform` has answered
        if not (written or detached or dynamic):
            return apply

        mark = _marker()

        def prepared(*args) -> tuple:
            if written:
                torch.autograd.graph.increment_version([args[i] for i in written])
            if detached:
                args = [a.detach() if i in detached else a for i, a in enumerate(args)]
            results = apply(*args)
            for i, dims in dynamic:
                mark(results[i], dims)
            return results

        return prepared


def _is_plain(metadata) -> bool:
    subclasses = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta)
    return (
        all(getattr(metadata, name, value) == value for name, value in _PLAIN.items())
        and all(type(s).__name__ in ("PlainTensorMeta", "int") for s in subclasses)
        and not getattr(metadata, "indices_of_inputs_that_requires_grad_with_mutations_in_bw", ())
    )


def _marker() -> Callable[[torch.Tensor, set[int]], None]:
    """PyTorch's function that notes which sizes of a result vary, for the next graph."""
    from torch._functorch._aot_autograd import runtime_wrappers

    return getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices", None) or runtime_wrappers.maybe_mark_dynamic_helper


def _written(metadata) -> list[int]:
    """Inputs that the program writes to."""
    return list(metadata.mutated_graph_handled_indices_seen_by_autograd)
