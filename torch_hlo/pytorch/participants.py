"""Who takes part in an operation besides the device (autograd, modes, autocast, transforms, the
profiler), and blocks that leave some of them out. The same in 2.11 to 2.13."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.autograd.forward_ad
from torch.utils import _pytree as pytree

# context manager: PyTorch does not look for `__torch_function__`, which takes longer than an
# attribute
plain_attributes = torch._C.DisableTorchFunctionSubclass
# the `__torch_function__` of a class that has none
disabled_torch_function = torch._C._disabled_torch_function_impl
# context manager: operations do not reach `__torch_dispatch__`
without_dispatch = torch._C._DisableTorchDispatch
# whether a transform of torch.func is under way
in_transform = torch._C._are_functorch_transforms_active
# whether the backward pass under way leaves the graph as it is
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

# grows with each operation that autograd notes, in this thread
sequence_number = torch._C._autograd._get_sequence_nr

_Keys, _Key = torch._C.DispatchKeySet, torch._C.DispatchKey
_AUTOCAST = _Keys(_Key.AutocastPrivateUse1) | _Keys(torch._C._parse_dispatch_key("AutocastXLA"))
_LAZY_BITS = _Keys(_Key.Conjugate) | _Keys(_Key.Negative) | _Keys(_Key.ZeroTensor)
_NOTHING = nullcontext()
_forward_ad = torch.autograd.forward_ad
_modes, _functions, _casts, profiled, _traced = (
    torch._C._len_torch_dispatch_stack,
    torch._C._is_torch_function_mode_enabled,
    torch._C._is_any_autocast_enabled,
    torch.autograd._profiler_enabled,
    torch._C._get_tracing_state,
)


def skips_python() -> bool:
    """Whether C++ has left `__torch_dispatch__` out, as where torch.tensor reads a list."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_Key.Python)


def block(name: str) -> AbstractContextManager:
    """Context manager: a named range of PyTorch's profiler, if that runs."""
    return torch.profiler.record_function(name) if profiled() else _NOTHING


def without_autocast() -> AbstractContextManager:
    """Context manager: autocast does not see the ops called inside."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def on_the_host() -> AbstractContextManager:
    """Context manager: ops of CPU tensors work as everywhere else. On the way into
    `__torch_dispatch__` the dispatcher has excluded what makes conjugated and negated views (and
    tensors known to be zero) mean what they say, and kernels that use such views inside would
    compute without."""
    tls = torch._C
    return tls._ForceDispatchKeyGuard(
        tls._dispatch_tls_local_include_set(),
        tls._dispatch_tls_local_exclude_set() - _LAZY_BITS,
    )


def unseen() -> AbstractContextManager:
    """Context manager: what is called inside makes ordinary tensors, also in inference mode, and no
    TorchDispatchMode sees it."""
    return _unseen() if _modes() or torch.is_inference_mode_enabled() else _NOTHING


@contextmanager
def _unseen() -> Iterator[None]:
    with without_dispatch(), torch.inference_mode(False), torch.no_grad():
        yield


def forward_mode() -> bool:
    """True while forward-mode differentiation is under way."""
    return _forward_ad._current_level >= 0


def unobserved() -> bool:
    """True if an op called now is seen by this device alone: neither autograd nor a
    TorchDispatchMode takes part."""
    return not (torch.is_grad_enabled() or _modes())


def alone() -> bool:
    """True if an op called now, with gradients off, is nobody's business but this device's: no
    mode, autocast, tracer, profiler or forward-mode differentiation sees it."""
    return (
        not (_modes() or _functions() or _casts() or profiled() or _forward_ad._current_level >= 0)
        and _traced() is None
    )


def transformed() -> bool:
    """True if an op called now is also somebody else's business: a TorchDispatchMode's, a
    transform's of torch.func, forward-mode differentiation's, a tracer's."""
    return bool(_modes() or in_transform() or _forward_ad._current_level >= 0) or (
        _traced() is not None
    )


def function_modes() -> bool:
    """True if a TorchFunctionMode sees the functions called now."""
    return _functions()


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Context manager: no TorchFunctionMode sees the functions called inside."""
    stack, tls = torch.overrides, torch._C
    modes = [stack._pop_mode() for _ in range(tls._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            stack._push_mode(mode)


def modes_now() -> Callable[[], bool]:
    """A function that says whether PyTorch's modes (gradients, autocast, the default dtype and
    more) are what they are now."""
    return torch._C._dynamo.guards.GlobalStateGuard().check


def forward_trace() -> Sequence[str]:
    """Python's stack, as `traceback.format_stack` gives it, at the operation whose backward pass
    runs now; () if none does, or if PyTorch does not keep that (`torch.autograd.detect_anomaly`
    does)."""
    node = torch._C._current_autograd_node()
    return () if node is None else node.metadata.get("traceback_", ())


def set_forward_trace(values: object, line: str, since: int) -> None:
    """Let `forward_trace` say `line` ("file:12") in the backward passes of what was noted from the
    number `since` on for these values: what Python's stack says in a graph is of no use."""
    file, _, number = line.rpartition(":")
    left = [getattr(x, "grad_fn", None) for x in pytree.tree_leaves(values)]
    while left:
        node = left.pop()
        # what accumulates gradients has the greatest number
        if node is not None and since <= node._sequence_nr() < sequence_number():
            text = [f'  File "{file}", line {number}, in a graph']
            if node.metadata.get("traceback_") != text:
                node.metadata["traceback_"] = text
                left += [x for x, _ in node.next_functions]


def saved_tensors_hooks() -> object:
    """The hooks for tensors that autograd saves which are in effect, or None; while a graph is
    traced, too."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def refuse_second_backward(
    gradients: list[torch.Tensor | None], message: bytes
) -> tuple[torch.Tensor | None, ...]:
    """The gradients as results of a node that raises `message` when they are differentiated."""
    delayed = torch._C._functions.DelayedError(message, len(gradients))
    found = delayed(*[g if g is None else g.detach().requires_grad_() for g in gradients])
    return found if isinstance(found, tuple) else (found,)
