"""Whole training steps under Dynamo: gradients inside graphs, and the steps of PyTorch's optimizers
as calls in them. Gradients inside graphs are new in 2.13; before, a graph ends where they are
taken."""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakValueDictionary, finalize

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, get_eval_frame_callback
from torch._dynamo import config, eval_frame, output_graph, trace_rules
from torch._dynamo.exc import TorchRuntimeError, UncapturedHigherOrderOpError, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, TypeSource
from torch._dynamo.variables import ConstantVariable, TensorVariable, VariableTracker
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._subclasses.fake_tensor import FakeTensor

from . import shortcuts, version
from .around import around
from .graphs import scan
from .registration import PLACE

CONSUMED = "torch_hlo_consumed"  # in a node's meta: its graph of gradients has been used up
# What Dynamo is told while it traces a step: to trace backward passes, to notice hooks that modules
# get later and defaults of arguments that change, and to take a float that has changed for a number
# that may change.
SETTINGS = {
    name: value
    for name, value in {
        "trace_autograd_ops": True,
        "skip_nnmodule_hook_guards": False,
        "skip_guards_on_constant_func_defaults": False,
        "suppress_errors": True,
        "specialize_float": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "skip_no_tensor_aliasing_guards_on_parameters": False,
        "record_runtime_overhead": False,
        "use_numpy_random_stream": True,
    }.items()
    if hasattr(config, name)
}


class _Convert:
    """Dynamo's callback for new frames, under SETTINGS. A step that is to be one graph is traced as
    often as it must be: there is no other way to run it. In others, `assert` raises where it
    stands."""

    def __init__(self, inner: Callable, full_graph: bool) -> None:
        self._torchdynamo_orig_backend, self._inner = inner, inner
        self._settings = SETTINGS | {"rewrite_assert_with_torch_assert": full_graph}
        if full_graph:
            self._settings["recompile_limit"] = config.accumulated_recompile_limit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with config.patch(self._settings):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def compiled(fn: Callable, backend: Callable, full_graph: bool, why: Callable) -> Callable:
    """`torch.compile(fn, backend=backend, fullgraph=full_graph)` for a training step. `why(reason)`
    is told of each guard that fails."""
    context = torch._dynamo.optimize(
        backend=backend,
        nopython=full_graph,
        guard_fail_fn=lambda failure: why(failure.reason),
    )
    if hasattr(context, "callback"):  # TORCHDYNAMO_DISABLE leaves a context that does nothing
        context.callback = _Convert(context.callback, full_graph)
    return context(fn)


class Direct:
    """Dynamo's graphs of a function, without Dynamo's way to them: the guards are the same, and so
    is the bytecode that runs. Only for what is one graph: where another begins, Dynamo has to be
    asked."""

    def __init__(self, fn: Callable, backend: Callable) -> None:
        self.code = fn.__code__
        self.names = self.code.co_varnames[: self.code.co_argcount]
        self.cells = list(zip(self.code.co_freevars, fn.__closure__ or ()))
        self.fn, self.backend = fn, backend
        self.known: dict[int, tuple[types.CodeType, Callable | None]] = {}
        self.last: tuple[Any, Callable | None] | None = None  # guards that held in the last call

    @classmethod
    def of(cls, fn: Callable, backend: Callable) -> Direct | None:
        """None for what is no plain function of positional arguments."""
        more = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
        if type(fn) is not types.FunctionType or fn.__code__.co_flags & more:
            return None
        if fn.__code__.co_kwonlyargcount or not shortcuts.on("direct_steps"):
            return None
        return cls(fn, backend)

    def find(self, args: tuple) -> Callable | None:
        """The function to call with these arguments; None if Dynamo has to be asked."""
        stance = eval_frame._stance
        if self.fn.__code__ is not self.code:
            return None
        if len(args) != len(self.names) or get_eval_frame_callback() is not None:
            return None
        if stance.stance != "default" or stance.backend is not None:
            return None
        scope = dict(zip(self.names, args))
        try:
            for name, cell in self.cells:
                scope[name] = cell.cell_contents
        except ValueError:  # not yet set
            return None
        if self.last is not None:
            guards, run = self.last
            # Dynamo takes the entry away from guards that are void
            if guards.cache_entry is not None and guards.check(scope):
                return run
        for entry in _debug_get_cache_entry_list(self.code):
            guards = entry.guard_manager
            if entry.backend is self.backend and guards.check(scope):
                known = self.known.get(id(entry.code))
                run = self._learn(entry.code) if known is None else known[1]
                self.last = guards, run
                return run
        return None

    def _learn(self, code: types.CodeType) -> Callable | None:
        run = None
        whole = not any("resume" in name for name in code.co_names)
        if whole and code.co_freevars == self.code.co_freevars:
            fn = self.fn
            plain = code.replace(co_names=tuple(map(self._plain, code.co_names)))
            run = types.FunctionType(plain, fn.__globals__, fn.__name__, None, fn.__closure__)
        self.known[id(code)] = code, run
        return run

    def _plain(self, name: str) -> str:
        """The name of a graph without what switches Dynamo off around it, which it is here."""
        scope = self.fn.__globals__
        graph = scope.get(name) if name.startswith("__compiled_fn") else None
        if not hasattr(graph, "_torchdynamo_orig_callable"):
            return name
        plain = f"{name}_of_{id(self)}"
        scope[plain] = eval_frame.innermost_fn(graph)
        finalize(self, scope.pop, plain, None)
        return plain


def is_fake(x: object) -> bool:
    """Whether Dynamo only asks what a function would return."""
    return isinstance(x, FakeTensor)


def trace_file(path: str) -> None:
    """Let Dynamo trace the functions of a file of this package as it does its users'."""
    trace_rules.get_mod_inlinelist().add(Path(path).as_posix())


def graph_call(function: Callable) -> None:
    """Let Dynamo put calls of `function`, which returns nothing, into graphs. It calls it once with
    fake tensors."""
    trace_rules._allowed_callable_ids.add(id(function))


def trace_loops(traced: dict[Callable, Callable]) -> None:
    """Let Dynamo trace other functions in place of these, which hand functions to PyTorch's
    operators, and end the graph where those refuse one: it prints, say, or keeps a tensor. Before
    2.13 the gradient of a scan draws other random numbers than the scan has drawn."""
    if version.VERSION < (2, 13):
        return
    for function, instead in traced.items():
        trace_file(instead.__code__.co_filename)
        torch.compiler.substitute_in_graph(function)(instead)

    def call_function(
        call: Callable, self: PolyfilledFunctionVariable, *args: Any
    ) -> VariableTracker:
        try:
            return call(self, *args)
        except (UncapturedHigherOrderOpError, TorchRuntimeError) as error:
            if self.fn not in traced:
                raise
            end_graph(f"{self.fn.__name__} of what only Python can do", str(error))

    around(PolyfilledFunctionVariable, "call_function", call_function)
    gradient = scan.__globals__.get("ScanAutogradImpl")
    if gradient is not None:  # Dynamo refuses the gradient of a sum there: it has no strides
        gradient.call_backward = torch.compiler.disable(gradient.call_backward)


def _consumed(
    validate: Callable, self: output_graph.OutputGraph, results: list[VariableTracker], tx: Any
) -> None:
    """Results of a graph that was differentiated inside are results all the same. They carry a
    mark, and raise what PyTorch raises when somebody differentiates them again."""
    for result in results:
        if getattr(result, "requires_grad", False):
            node = result.as_proxy().node
            fake = node.meta.get("example_value")
            if getattr(fake, "grad_fn", None) is not None:
                reached = output_graph.collect_reachable_grad_fns([(fake, None)])
                if reached & self.autograd_grad_consumed_grad_fns:
                    node.meta[CONSUMED] = True
    if any(
        isinstance(r, VariableTracker)
        and r.is_tensor()
        and CONSUMED in r.as_proxy().node.meta
        and r.as_proxy().node.meta["example_value"].device.type not in PLACE.names
        for r in results
    ):
        validate(self, results, tx)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


_SHARED = [ConstantVariable.create(value) for value in (None, True, False)]


def constants_apart() -> None:
    """Keep Dynamo from mistaking one constant for another. 2.13 has one variable for every None,
    one for True and one for False. It notes at it which attribute it was read from last, and later
    writes what that attribute holds: `p.grad = None` sets what another tensor's gradient was."""

    def var_getattr(
        attribute: Callable, self: TensorVariable, tx: Any, name: str
    ) -> VariableTracker:
        changed = tx.output.side_effects
        if name == "grad" and changed.has_pending_mutation_of_attr(self, name):
            return changed.load_attr(self, name)
        found = attribute(self, tx, name)
        if isinstance(found, ConstantVariable) and any(found is x for x in _SHARED):
            source, found.source = found.source, None
            found = ConstantVariable(found.value, source=source)
        return found

    around(TensorVariable, "var_getattr", var_getattr)


def without_streams() -> None:
    """This device has one stream. 2.13 asks in every call which it is, in case the graph uses
    it."""
    from torch._dynamo.variables import streams

    state = getattr(streams, "SymbolicStreamState", None)
    if state is None:
        return
    forget = getattr(streams, "reset_user_object_tracking", lambda: None)  # not in 2.11

    def start(begin: Callable, self: Any) -> None:
        if PLACE.leads():
            forget()
            self.cur_stream_stack = collections.deque()
        else:
            begin(self)

    around(state, "__init__", start)


def trace_gradients() -> None:
    """End a graph at `backward()` where Dynamo would leave something out: hooks of parameters,
    which it runs once, when it traces, or never; and a backward pass that goes on beyond the graph,
    of which it knows no parameters."""
    name = "method_backward"
    if "trace_autograd_ops" not in SETTINGS or not hasattr(TensorVariable, name):
        return

    def method_backward(
        backward: Callable, self: TensorVariable, tx: Any, *args: Any, **kwargs: Any
    ) -> Any:
        outside = set()
        for variable in tx.output.input_source_to_var.values():
            node = variable.as_proxy().node
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                outside.add(value.grad_fn)
            tensor = getattr(node.meta.get("grapharg"), "example", None)
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                for kind in _HOOKS:
                    hooks = getattr(tensor, kind)
                    if hooks:
                        end_graph("hooks of a parameter", variable.source.name)
                    source = AttrSource(variable.source, kind)
                    VariableTracker.build(tx, hooks, source).realize()
        end = self.as_proxy().node.meta["example_value"]
        if outside & output_graph.collect_reachable_grad_fns([(end, None)]):
            end_graph("a backward pass beyond the graph", str(self.source))
        return backward(self, tx, *args, **kwargs)

    around(TensorVariable, name, method_backward)


def end_graph(kind: str, context: str) -> NoReturn:
    """End the graph here."""
    unimplemented(
        gb_type=kind,
        context=context,
        explanation="This is done outside of graphs.",
        hints=[],
    )


def _is_known(optimizer: torch.optim.Optimizer, kind: type, methods: Iterable[str]) -> bool:
    """Whether these methods are PyTorch's own, and all parameters of class `kind`."""
    whose = type(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        whose.__module__.startswith("torch.optim.")
        and not isinstance(optimizer, torch.optim.LBFGS)
        and all(getattr(whose, n).__module__.startswith("torch.optim.") for n in methods)
        and bool(parameters)
        and all(type(p) is kind for p in parameters)
    )


def trace_optimizers(kind: type, step: Callable, zero_grad: Callable) -> None:
    """Let Dynamo trace `step(optimizer, token, names, *args)` for the steps of PyTorch's own
    optimizers whose parameters are of class `kind`: `names` are the options of the groups, `token`
    is the optimizer's number in OPTIMIZERS. `zero_grad` likewise."""
    for function in (step, zero_grad):
        trace_file(function.__code__.co_filename)
    ours: dict[str, Callable] = {"step": step, "zero_grad": zero_grad}

    def guard_function(self: OptimizerVariable, name: str) -> None:
        if name in ours and self.source:
            function = AttrSource(TypeSource(self.source), name)
            install_guard(function.make_guard(GuardBuilder.ID_MATCH))

    def var_getattr(
        original: Callable, self: OptimizerVariable, tx: Any, name: str
    ) -> VariableTracker:
        guard_function(self, name)
        if not _is_known(self.value, kind, ours):
            return original(self, tx, name)
        if name in ours and self.source and not _is_replaced(self, name):
            found = getattr(self.value, name)
            return GetAttrVariable(
                self, name, py_type=type(found), source=AttrSource(self.source, name)
            )
        # not what OptimizerVariable does: it takes parameters for memory that never moves
        return UserDefinedObjectVariable.var_getattr(self, tx, name)

    def call_method(
        original: Callable,
        self: OptimizerVariable,
        tx: Any,
        name: str,
        args: Sequence,
        kwargs: dict,
    ) -> VariableTracker:
        guard_function(self, name)
        if name not in ours or not _is_known(self.value, kind, ours) or _is_replaced(self, name):
            return original(self, tx, name, args, kwargs)
        given = [self]
        if name == "step":
            token = id(self.value)
            OPTIMIZERS[token] = self.value
            names = [n for n in self.value.param_groups[0] if n != "params"]
            given += [ConstantVariable.create(token), VariableTracker.build(tx, tuple(names))]
        function = VariableTracker.build(tx, ours[name])
        return tx.inline_user_function_return(function, [*given, *args], kwargs)

    around(OptimizerVariable, "var_getattr", var_getattr)
    around(OptimizerVariable, "call_method", call_method)
    name = "_validate_outputs_safe_for_autograd_nodes"
    if hasattr(output_graph.OutputGraph, name):
        around(output_graph.OutputGraph, name, _consumed)


def trace_modules(kind: type, zero_grad: Callable) -> None:
    """Let Dynamo trace `zero_grad(module, ...)` for modules whose parameters are of class
    `kind`."""

    def is_ours(self: UnspecializedNNModuleVariable, name: str) -> bool:
        if name != "zero_grad" or not self.source or _is_replaced(self, name):
            return False
        parameters = list(self.value.parameters())
        plain = type(self.value).zero_grad is torch.nn.Module.zero_grad
        return plain and bool(parameters) and all(type(p) is kind for p in parameters)

    def var_getattr(
        original: Callable, self: UnspecializedNNModuleVariable, tx: Any, name: str, *args: Any
    ) -> VariableTracker:
        if not is_ours(self, name):
            return original(self, tx, name, *args)
        source = AttrSource(self.source, name)
        return GetAttrVariable(self, name, py_type=types.MethodType, source=source)

    def call_method(
        original: Callable,
        self: UnspecializedNNModuleVariable,
        tx: Any,
        name: str,
        args: Sequence,
        kwargs: dict,
    ) -> VariableTracker:
        if not is_ours(self, name):
            return original(self, tx, name, args, kwargs)
        function = VariableTracker.build(tx, zero_grad)
        return tx.inline_user_function_return(function, [self, *args], kwargs)

    around(UnspecializedNNModuleVariable, "var_getattr", var_getattr)
    around(UnspecializedNNModuleVariable, "call_method", call_method)


def _is_replaced(self: UserDefinedObjectVariable, name: str) -> bool:
    """Whether the object has a function of its own in place of its class's, which graphs
    are guarded against. Schedulers put one there that only notes the call."""
    own = vars(self.value).get(name)
    if own is None:
        absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
        install_guard(self.source.make_guard(absent))
    else:
        source = AttrSource(self.source, name)
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


# Optimizers whose steps are in graphs, by their numbers. A graph is for one object: Dynamo guards
# on that.
OPTIMIZERS: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
