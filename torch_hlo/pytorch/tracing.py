"""What Dynamo and AOTAutograd know and can be told, for torch.compile. Nothing of them is imported
before a function here is called. The same in 2.11 to 2.13, but where a line says otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .around import around

# functions that Dynamo puts into graphs as calls
set_grad_enabled = torch._C._set_grad_enabled
log_api_usage = torch._C._log_api_usage_once
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def trace_package(name: str) -> None:
    """Let Dynamo trace the functions of a package as it does its users'."""
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.add(name)


def trace_through(function: Callable, constants: tuple[type, ...]) -> None:
    """Let Dynamo put what `function` does into the graph without looking at its Python (as
    torch._dynamo.nonstrict_trace does)."""
    from torch._dynamo import trace_rules
    from torch.utils import _pytree

    trace_rules._allowed_callable_ids.add(id(function))
    trace_rules._nonstrict_trace_callable_ids.add(id(function))
    for kind in constants:
        _pytree.register_constant(kind)


def trace_as_plain(kind: type[torch.Tensor]) -> None:
    """Let Dynamo take tensors of class `kind` for plain tensors of their device. Without it, a
    class with a `__torch_dispatch__` has to show plain tensors that it is made of, or ends the
    graph."""
    from torch._dynamo.variables import builder

    def infer_subclass_type(infer: Callable, value: object) -> type | None:
        return None if type(value) is kind else infer(value)

    around(builder, "infer_subclass_type", infer_subclass_type)
    for numpy in (True, False):
        methods = builder.VariableBuilder._type_dispatch_impl(numpy)
        methods[kind] = methods[torch.Tensor]


def run_without_meta(device: torch.device) -> None:
    """Let FakeTensorMode ask the CPU about operators without a meta kernel, with zeros, where it
    would run them on this device."""
    from torch._subclasses import fake_tensor
    from torch.utils import _pytree

    def ask(run: Callable, mode: object, op: object, flat: list, *others: object) -> object:
        kind = fake_tensor.FakeTensor
        ours = [x for x in flat if isinstance(x, kind) and x.fake_device.type == device.type]
        for x in ours:
            x.fake_device = torch.device("cpu")
        try:
            results = run(mode, op, flat, *others)
        finally:
            for x in ours:
                x.fake_device = device
        for x in _pytree.tree_leaves(results) if ours else ():
            if isinstance(x, kind):
                x.fake_device = device
        return results

    around(fake_tensor, "run_fallback_kernel", ask)


def trace_networks(compiler: Callable) -> None:
    """Let Dynamo trace nn.LSTM, GRU and RNN for the backend `compiler`. For others it breaks graphs
    there, unless config.allow_rnn, because PyTorch's own kernels for them would be loops unrolled
    over time."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import VariableBuilder

    def wrap_module(wrap: Callable, self: VariableBuilder, value: torch.nn.Module) -> object:
        backend = self.tx.output.compiler_fn
        backend = getattr(backend, "_torchdynamo_orig_backend", backend)
        if (
            not isinstance(value, torch.nn.RNNBase)
            or getattr(backend, "compiler_fn", backend) is not compiler
        ):
            return wrap(self, value)
        with config.patch(allow_rnn=True):
            return wrap(self, value)

    around(VariableBuilder, "wrap_module", wrap_module)


def graph_metadata() -> object:
    """What AOTAutograd has found out about the graph that is being compiled: its
    ViewAndMutationMeta."""
    from torch._guards import TracingContext

    return TracingContext.get().fw_metadata


def dynamic_marker() -> Callable[[torch.Tensor, set[int]], None]:
    """PyTorch's function that notes which sizes of a compiled graph's result vary, for the next
    graph."""
    from torch._functorch._aot_autograd import runtime_wrappers

    return (
        getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices", None)
        or runtime_wrappers.maybe_mark_dynamic_helper
    )
