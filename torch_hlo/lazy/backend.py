"""Registration of "hlo" as a PyTorch device from Python alone. The only file that touches PyTorch's private API.

The first half names the private things that the rest of lazy/ uses; `register` wires the device up, once per process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable

import torch
import torch._library.simple_registry
import torch.autograd.graph
import torch.utils._foreach_utils
from torch._ops import OpOverload

from torch_hlo.device.cpu import constant_function

NAME = "hlo"
SUPPORTED = ((2, 11), (2, 13))

# ---- private names

make_wrapper = torch.Tensor._make_wrapper_subclass
tensor_data = torch._C.TensorBase.data
disabled_torch_function = torch._C._disabled_torch_function_impl
plain_attributes = torch._C.DisableTorchFunctionSubclass  # context manager: PyTorch does not look for `__torch_function__`, which takes longer than an attribute
Key = torch._C.DispatchKey
PRIVATE_USE, AUTOGRAD_PRIVATE_USE = "PrivateUse1", "AutogradPrivateUse1"
_AUTOCAST = torch._C.DispatchKeySet(Key.AutocastPrivateUse1)
_LAZY_BITS = (
    torch._C.DispatchKeySet(Key.Conjugate)
    | torch._C.DispatchKeySet(Key.Negative)
    | torch._C.DispatchKeySet(Key.ZeroTensor)
)


def autocasts() -> bool:
    """Whether autocast is on for this device."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("hlo")


def without_autocast():
    """Context manager: autocast does not see the ops called inside."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def on_the_host():
    """Context manager: ops of CPU tensors work as everywhere else. On the way into `__torch_dispatch__` the dispatcher has excluded what makes conjugated
    and negated views (and tensors known to be zero) mean what they say, and kernels that use such views inside would compute without."""
    tls = torch._C
    return tls._ForceDispatchKeyGuard(
        tls._dispatch_tls_local_include_set(), tls._dispatch_tls_local_exclude_set() - _LAZY_BITS
    )


def has_kernel(op: OpOverload, key: torch._C.DispatchKey) -> bool:
    """True if a kernel of `op` is registered for this very key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def call_kernel(op: OpOverload, key: torch._C.DispatchKey, *args, **kwargs):
    """Call the kernel of `op` for one key."""
    return op._op_dk(key, *args, **kwargs)


def generator_new(cls: type) -> torch.Generator:
    """An instance of a subclass of torch.Generator; C++ takes it for a CPU generator."""
    return torch._C.Generator.__new__(cls, "cpu")


def forward_mode() -> bool:
    """True while forward-mode differentiation is under way."""
    return torch.autograd.forward_ad._current_level >= 0


def unobserved() -> bool:
    """True if an op called now is seen by this device alone: neither autograd nor a TorchDispatchMode takes part."""
    return not (torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack())


_forward_ad = torch.autograd.forward_ad
_modes, _functions, _casts, _profiled, _traced = (
    torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled, torch._C._is_any_autocast_enabled, torch.autograd._profiler_enabled,
    torch._C._get_tracing_state)  # fmt: skip


def alone() -> bool:
    """True if an op called now, with gradients off, is nobody's business but this device's: no mode, autocast, tracer, profiler or forward-mode differentiation sees it."""
    return (
        not (_modes() or _functions() or _casts() or _profiled() or _forward_ad._current_level >= 0)
        and _traced() is None
    )


def process_group(group) -> torch.distributed.ProcessGroup:
    """The process group that an argument of a communication op means: its name, the boxed group, or itself."""
    import torch.distributed._functional_collectives  # noqa: F401 - the shapes of functional collectives

    if isinstance(group, str):
        return torch._C._distributed_c10d._resolve_process_group(group)
    if isinstance(group, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(group)
    return group


def trace_through(function: Callable, constants: tuple[type, ...]) -> None:
    """Let Dynamo put what `function` does into the graph without looking at its Python (as torch._dynamo.nonstrict_trace does)."""
    from torch._dynamo import trace_rules
    from torch.utils import _pytree

    trace_rules._allowed_callable_ids.add(id(function))
    trace_rules._nonstrict_trace_callable_ids.add(id(function))
    for kind in constants:
        _pytree.register_constant(kind)


def trace_networks(compiler: Callable) -> None:
    """Let Dynamo trace nn.LSTM, GRU and RNN for the backend `compiler`. For others it breaks graphs there, unless config.allow_rnn, because
    PyTorch's own kernels for them would be loops unrolled over time."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import VariableBuilder

    wrap = VariableBuilder.wrap_module

    def wrap_module(self, value):
        backend = self.tx.output.compiler_fn
        backend = getattr(backend, "_torchdynamo_orig_backend", backend)
        if (
            not isinstance(value, torch.nn.RNNBase)
            or getattr(backend, "compiler_fn", backend) is not compiler
        ):
            return wrap(self, value)
        with config.patch(allow_rnn=True):
            return wrap(self, value)

    VariableBuilder.wrap_module = wrap_module


in_transform = (
    torch._C._are_functorch_transforms_active
)  # whether a transform of torch.func is under way
keeps_graph = (
    torch._C._autograd._get_current_graph_task_keep_graph
)  # whether the backward pass under way leaves the graph as it is


def saved_tensors_hooks():
    """The hooks for tensors that autograd saves which are in effect, or None; while a graph is traced, too."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def graph_metadata():
    """What AOTAutograd has found out about the graph that is being compiled: its ViewAndMutationMeta."""
    from torch._guards import TracingContext

    return TracingContext.get().fw_metadata


def dynamic_marker() -> Callable[[torch.Tensor, set[int]], None]:
    """PyTorch's function that notes which sizes of a compiled graph's result vary, for the next graph."""
    from torch._functorch._aot_autograd import runtime_wrappers

    return (
        getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices", None)
        or runtime_wrappers.maybe_mark_dynamic_helper
    )


def wait_work(work) -> None:
    """Block until a collective (the boxed Work of a c10d op) is done."""
    torch._C._distributed_c10d.Work.unbox(work).wait()


def done_work(tensors: list[torch.Tensor]):
    """A boxed Work that is done, with these tensors as the value of its future."""
    done = torch.futures.Future()
    done.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(done).boxed()


# ---- the device guard

_PRIVATE_USE = torch._C._autograd.DeviceType.PrivateUse1


class _Guard(torch._C._acc.DeviceGuard):
    asked = 0

    def type_(self):  # see _answer_natively
        self.asked += 1
        return _PRIVATE_USE


# Methods of c10::impl::DeviceGuardImplInterface by their place in its virtual table that PyTorch's guard for Python back ends answers by calling
# `type_`: type, exchangeDevice, getDevice, getStream, getNewStream, exchangeStream.
_METHODS = (0, 1, 2, 5, 8, 9)
_TABLE = 64  # words that are copied; the table has less


def _answer_natively(guard: _Guard) -> None:
    """Let machine code say which device is current. PyTorch asks some five times for each node of backward, also in destructors while an exception is
    under way, where entering Python would be a SystemError and raising KeyboardInterrupt the end of the process.

    Every answer is one pair of words: a DeviceType is the first byte of a Device (type, index 0), which is the first word of a Stream (device, stream 0).
    """
    kind, word = int(_PRIVATE_USE), ctypes.sizeof(ctypes.c_void_p)
    library = next(
        (path for path in map(_library, ("libc10.so", "libc10.dylib")) if os.path.exists(path)),
        None,
    )
    known = library is not None
    if known:
        address = (ctypes.c_void_p * (kind + 1)).in_dll(
            ctypes.CDLL(library), "_ZN3c104impl26device_guard_impl_registryE"
        )[kind]
        table = ctypes.c_void_p.from_address(address)
        words = (ctypes.c_void_p * _TABLE).from_address(
            table.value - 2 * word
        )  # two words before its address belong to it
        asks = ctypes.PYFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(words[2 + _METHODS[0]])
        known = asks(address) == kind and guard.asked == 1
    if not known:
        raise ImportError(
            f"torch_hlo does not know the device guard of PyTorch {torch.__version__} on this platform"
        )
    _ANSWERS[:] = words
    answer = constant_function(kind, 0)
    for method in _METHODS:
        _ANSWERS[2 + method] = answer
    table.value = ctypes.addressof(_ANSWERS) + 2 * word


_ANSWERS = (ctypes.c_void_p * _TABLE)()  # in use until the process ends


def _library(name: str) -> str:
    return os.path.join(os.path.dirname(torch.__file__), "lib", name)


# ---- backward


def _patch_backward(tensor_class: type) -> None:
    # Graphs of this device run on the thread that calls `backward`: handing each op over to the engine's thread for the device, and the interpreter
    # with it, takes longer than recording it. And a thread numbers the nodes of a graph that it makes by itself, so that the order of a second derivative
    # would be another one at each call: torch.func's transforms wrap tensors, hence the question for the device.
    original = torch.autograd.graph._engine_run_backward
    threads_wanted, set_threads = (
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    )

    @functools.wraps(original)
    def run_backward(roots, *args, **kwargs):
        if not threads_wanted() or not any(
            type(root) is tensor_class
            or isinstance(root, torch.Tensor)
            and root.device.type == "hlo"
            for root in roots
        ):
            return original(roots, *args, **kwargs)
        set_threads(False)
        try:
            return original(roots, *args, **kwargs)
        finally:
            set_threads(True)

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward


# ---- registration

_registered = False


VERSION = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])


def check_version() -> None:
    """Raises ImportError for a PyTorch that this file was not written for."""
    if not SUPPORTED[0] <= VERSION <= SUPPORTED[1]:
        wanted = " to ".join(".".join(map(str, v)) for v in SUPPORTED)
        raise ImportError(
            f"torch_hlo needs PyTorch {wanted}, found {torch.__version__}: its device API is private and changes between versions"
        )


def register_device(module: types.ModuleType) -> None:
    """Make "hlo" a device whose module `torch.hlo` is `module`. Raises RuntimeError if another Python or C++ backend has taken PrivateUse1."""
    global _registered
    if _registered:
        return
    check_version()
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(
            f"torch_hlo needs PyTorch's PrivateUse1 device, which the backend {taken!r} has taken in this process"
        )
    guard = _Guard()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module, device_guard=guard)
    _answer_natively(guard)
    _registered = True


def patch(
    tensor_class: type,
    module: types.ModuleType,
    generator_class: type,
    default_dtype_changed: Callable[[], None],
) -> None:
    """Behaviour of PyTorch that has no hook: see each line."""
    _patch_backward(tensor_class)
    _shorten_dispatch(tensor_class)
    _patch_module_apply()
    # Optimizers and clip_grad_norm_ take the _foreach_ and _fused_ paths only for these exact types.
    # (torch.optim deletes its attribute `optimizer`, hence import_module.)
    for holder in (torch.utils._foreach_utils, importlib.import_module("torch.optim.optimizer")):
        if tensor_class not in holder._foreach_supported_types:
            holder._foreach_supported_types.append(tensor_class)
    torch.Generator = generator_class
    _patch_default_dtype(default_dtype_changed)
    _patch_pin_memory()
    _patch_accelerator(module)


def _patch_module_apply() -> None:
    # `module.to("hlo")` and back must keep Parameter objects, so that optimizers made before and tied weights stay valid: PyTorch does so
    # when it swaps the contents of tensors. Only conversions that change the device need it.
    from torch_hlo.lazy import uninitialized

    uninitialized.patch()
    original = torch.nn.Module._apply
    future = torch.__future__

    @functools.wraps(original)
    def _apply(self, fn, recurse=True):
        return uninitialized.convert(self, fn, lambda: swapping(self, fn, recurse))

    def swapping(self, fn, recurse):
        if future.get_swap_module_params_on_conversion() or not _changes_device(self, fn):
            return original(self, fn, recurse)
        future.set_swap_module_params_on_conversion(True)
        try:
            return original(self, fn, recurse)
        finally:
            future.set_swap_module_params_on_conversion(False)

    torch.nn.Module._apply = _apply


def _changes_device(module: torch.nn.Module, fn: Callable) -> bool:
    """True if `fn` moves the module's parameters to or from the hlo device; tried on an empty tensor."""
    first = next((p for p in module.parameters() if not torch.nn.parameter.is_lazy(p)), None)
    if first is None:
        return False
    try:
        with torch.no_grad():
            probe = fn(first.detach().new_empty(0))
        return (probe.device.type == NAME) != (first.device.type == NAME)
    except Exception:
        return False


def _patch_default_dtype(changed: Callable[[], None]) -> None:
    for name in ("_set_default_dtype", "_set_default_tensor_type"):
        original = getattr(torch._C, name)

        def function(*args, _original=original):
            _original(*args)
            changed()

        setattr(torch._C, name, function)


def _patch_pin_memory() -> None:
    # DataLoader(pin_memory=True) asks "the" accelerator for page-locked memory. The device reads any CPU memory.
    original = torch.Tensor.pin_memory

    @functools.wraps(original)
    def pin_memory(self, device=None):
        if self.device.type == "cpu" and (device is None or torch.device(device).type == NAME):
            return self
        return original(self, device) if device is not None else original(self)

    torch.Tensor.pin_memory = pin_memory


def _patch_accelerator(module: types.ModuleType) -> None:
    # The C++ side of these wants a C++ backend.
    accelerator = torch.accelerator

    def bind(holder, name: str, replacement) -> None:
        original = getattr(holder, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def function(*args, **kwargs):
            current = accelerator.current_accelerator()
            if current is None or current.type != NAME:
                return original(*args, **kwargs)
            return replacement(*args, **kwargs)

        setattr(holder, name, function)

    for name in (
        "empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    ):  # fmt: skip
        for holder in (accelerator, accelerator.memory):
            bind(holder, name, getattr(module, name))
    for name in ("synchronize", "current_stream", "set_stream"):
        bind(accelerator, name, getattr(module, name))
    for name in ("set_device_index", "set_device_idx"):
        bind(accelerator, name, module.set_device)
    for name in ("current_device_index", "current_device_idx"):
        bind(accelerator, name, module.current_device)


def plain_tensor(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the device without memory that is no subclass."""
    return torch._C._acc.create_empty_tensor(tuple(size), dtype)


def spare_dynamo() -> None:
    """Let PyTorch's Python shape functions run without importing torch._dynamo, which takes longer than most first steps.

    They are wrapped so that Dynamo does not trace into them; the wrapper imports it on the first call to make the exempt function,
    unless there is one already. Nothing is changed once Dynamo is there.
    """
    if "torch._dynamo" in sys.modules:
        return
    from torch._compile import _disable_dynamo
    from torch._decomp import global_decomposition_table

    wrapper = _disable_dynamo(lambda: None).__code__
    stack = [f for table in global_decomposition_table.values() for f in table.values()]
    for name in ("torch._refs", "torch._refs.nn.functional", "torch._refs.special"):
        stack += vars(sys.modules.get(name, types)).values()
    seen: set[int] = set()
    while stack:
        f = stack.pop()
        if not isinstance(f, types.FunctionType) or id(f) in seen or not f.__closure__:
            continue
        seen.add(id(f))
        if f.__code__ is wrapper:
            inner = f.__closure__[f.__code__.co_freevars.index("fn")].cell_contents
            if not hasattr(inner, "__dynamo_disable"):
                setattr(inner, "__dynamo_disable", inner)
        for cell in f.__closure__:  # decorators within decorators
            with contextlib.suppress(ValueError):  # an empty cell
                stack.append(cell.cell_contents)


# ---- a shorter way from C++ to __torch_dispatch__


class _StandIn(type):
    """Type of what C++ takes for the class DTensor; it forwards to the real one once that exists."""

    @property
    def __torch_dispatch__(cls):
        return _dtensor().__torch_dispatch__


def _dtensor() -> type | None:
    return getattr(sys.modules.get("torch.distributed.tensor._api"), "DTensor", None)


class _Watch:
    """Entry of sys.meta_path: from the import of DTensor on, its stand-in has instances."""

    @classmethod
    def find_spec(cls, name: str, path=None, target=None) -> None:
        if name == "torch.distributed.tensor._api":
            sys.meta_path.remove(cls)
            _StandIn.__instancecheck__ = _is_dtensor


def _is_dtensor(stand_in: type, x) -> bool:
    real = _dtensor()
    if real is None:  # it is being imported
        return False
    _StandIn.__instancecheck__ = type.__instancecheck__.__get__(
        real
    )  # asked for every op: without Python
    return isinstance(x, real)


def _shorten_dispatch(tensor_class: type) -> None:
    """Make every op on a tensor subclass cheaper, and the first one by an import of half a second.

    For each op C++ asks a Python function whether a rule was registered for this op and class, and whether the tensor is a DTensor. The
    function and the class are looked up at the first op of the process; the latter imports torch.distributed.tensor and, with it, sympy.
    """
    registry = torch._library.simple_registry
    find = registry.find_torch_dispatch_rule
    registry.find_torch_dispatch_rule = lambda op, cls: (
        None if cls is tensor_class else find(op, cls)
    )
    module = "torch.distributed.tensor"
    stand_in = (
        VERSION >= (2, 13) and module not in sys.modules
    )  # before, C++ compares types and asks no __instancecheck__
    if stand_in:
        sys.modules[module] = types.SimpleNamespace(DTensor=_StandIn("DTensor", (), {}))
        sys.meta_path.insert(0, _Watch)
    try:

        class Probe(torch.Tensor):
            __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: args[0])

        torch.ops.aten.neg.default(
            make_wrapper(Probe, (), dtype=torch.float32, device="cpu")
        )  # the first op: C++ looks both up
    finally:
        if stand_in:
            del sys.modules[module]
