"""What Dynamo's guards leave out: that two names mean one object (one of them global, or of an
optimizer), functions of classes that are replaced, names that begin to hide others, keys that were
missing, caches, hooks of all modules, the sign of a zero, the order of an OrderedDict, the length
of a deque, generators of random numbers that somebody holds. And what it copies by half, and lists
that it writes anew. The same in 2.11 to 2.13, but where said."""

from __future__ import annotations

import abc
import builtins
import functools
import gc
import inspect
import itertools
import math
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch._C._dynamo.guards import dict_version
from torch._dynamo import (
    assume_constant_result,
    exc,
    graph_break,
    polyfills,
    symbolic_convert,
    trace_rules,
    variables,
)
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_call_method,
    create_instruction,
)
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import (
    AttrSource,
    CallFunctionNoArgsSource,
    GlobalSource,
    Source,
    TypeSource,
    is_from_optimizer_source,
)
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    VariableTracker,
    builder,
    functions,
    user_defined,
)
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.user_defined import (
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)
from torch._guards import TracingContext
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from . import steps
from .around import around

Same = Callable[[Any], bool]  # of the frame's variables: whether a graph is still right

# classes whose objects are more than their attributes
_CONTENTS = (dict, list, set, frozenset, tuple, deque, str, bytes, int, float)
_ARITHMETIC = vars(float).keys() - vars(object).keys() - {"__getnewargs__"}
# classes whose functions nobody replaces
_FIXED = ("torch.", "builtins", "collections", "typing", "enum", "abc", "functools", "types")
_MRO = operator.attrgetter("__mro__")
_VERSIONS = sys.version_info < (3, 12)  # what `dict_version` knows
_GLOBAL_HOOKS = [d for name, d in vars(modules).items() if name.startswith("_global_") and d == {}]


@functools.cache
def complete() -> None:
    """Add the guards, for graphs that are made from here on."""
    kind = UserDefinedObjectVariable
    around(kind, "var_getattr call_method", _guarding_functions)
    around(builder, "make_dupe_guard", _one_object)
    around(GuardBuilder, "DUPLICATE_INPUT", _each_pair)
    for seen in (kind, UserDefinedClassVariable):
        around(seen, "__init__", _noting_classes)
    around(InstructionTranslatorBase, "load_builtin_from_argval", _noting_builtins)
    around(InstructionTranslatorBase, "import_source", _noting_modules)
    around(functions.LocalGeneratorObjectVariable, "reconstruct", _refusing_generators)
    whole = symbolic_convert.InstructionTranslator
    name = "replace_tos_if_return_is_generator"
    setattr(whole, name, lambda self: None)
    number = getattr(user_defined, "UserDefinedConstantVariable", None)  # new in 2.13
    if number is not None:
        around(number, "as_proxy", _plain_numbers)
    around(variables.BuiltinVariable, "call_isinstance call_issubclass", _noting_abstract)
    around(variables.TensorVariable, "call_method", _noting_methods)
    around(variables.TensorVariable, "var_getattr", _without_versions)
    around(functions.WrapperUserFunctionVariable, "call_function", _asking_caches)
    around(ConstDictVariable, "getitem_const_raise_exception_if_absent", _guarding_keys)
    around(GuardBuilder, "GLOBAL_STATE", _with_surroundings)
    around(GuardBuilder, "requires_key_order_guarding", _unless_empty)
    around(GuardBuilder, "EQUALS_MATCH", _with_signs)
    around(GuardBuilder, "TYPE_MATCH", _with_order)
    for numpy in (True, False):
        wrappers = builder.VariableBuilder._type_dispatch_impl(numpy)
        for sort, wrap in ((deque, _with_length), (list, _appending)):
            wrappers[sort] = functools.partial(wrap, wrappers[sort])
    around(SideEffects, "_get_modified_vars", _without_appended)
    around(SideEffects, "codegen_update_mutated", _with_appended)
    trace_rules.get_mod_inlinelist().add(Path(__file__).as_posix())
    _copies_whole()
    polyfills.accumulate_grad = _dense(polyfills.accumulate_grad)
    around(whole, "call_function", _delaying)
    around(OutputGraph, "codegen_suffix", _with_delayed)
    # Dynamo takes the numbers that such an object gives while it traces for constants.
    RandomVariable.is_supported_random_obj = staticmethod(lambda value: False)


def _dense(accumulate: Callable) -> Callable:
    """End the graph before a backward pass with sparse gradients: Dynamo would make dense ones."""

    def accumulate_grad(x: Any, *gradients: Any) -> Any:  # before 2.13 the new one alone
        if gradients[-1] is not None and gradients[-1].is_sparse:
            graph_break()
        return accumulate(x, *gradients)

    return accumulate_grad


def _copies_whole() -> None:
    """End the graph where an object is copied that is more than its attributes. Since 2.12 Dynamo
    copies those only, so that copies of an OrderedDict are empty."""
    known = PolyfilledFunctionVariable._get_polyfill_handlers().get(object.__reduce_ex__)
    if known is None:
        return
    attributes = known.__torch_dynamo_polyfill__

    def reduce_ex(value: Any, protocol: int, /) -> Any:
        if not _only_attributes(type(value)):
            graph_break()
        return attributes(value, protocol)

    known.__torch_dynamo_polyfill__ = reduce_ex


@assume_constant_result
def _only_attributes(kind: type) -> bool:
    """Whether `object.__reduce_ex__` gives the attributes of such an object, and nothing else."""
    more = {"__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__", "__slots__"}
    return not issubclass(kind, _CONTENTS) and not any(
        more & vars(k).keys() for k in kind.__mro__ if k is not object
    )


def _one_object(make: Callable, name: Source, other: Source | None) -> Callable | None:
    """The guard that two names mean one object, as they do while Dynamo traces: it knows the object
    by the first. Dynamo makes none where one of the two is global and the other is not."""
    found = make(name, other)
    if found is None and other is not None and other != name:
        return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
    return found


def _each_pair(match: Callable, self: GuardBuilder, guard: Any, source_b: Source) -> None:
    """The same guard for what was found in an optimizer, where Dynamo leaves it out: the optimizer
    may have a parameter that the module has no more."""
    match(self, guard, source_b)
    sources = source_b, guard.originating_source
    pair = self.arg_ref(source_b.name), self.arg_ref(guard)
    known = self._cached_duplicate_input_guards
    if any(map(is_from_optimizer_source, sources)) and pair not in known:
        known |= {pair, pair[::-1]}
        code = " is ".join(pair)
        self.object_aliasing_guard_codes.append((code, code))


def _guarding_functions(
    method: Callable, self: UserDefinedObjectVariable, tx: Any, name: str, *args: Any, **kwargs: Any
) -> Any:
    """`var_getattr` or `call_method` of an object, with a guard on the function of its class that
    is found."""
    kind = type(self.value)
    if name == "__dict__" and self.source is not None:
        install_guard(self.source.make_guard(_same_names))
    if self.source is not None and not kind.__module__.startswith(_FIXED):
        function = inspect.getattr_static(kind, name, None)
        source = AttrSource(TypeSource(self.source), name)
        if isinstance(function, classmethod):
            source = AttrSource(source, "__func__")
        if isinstance(function, (types.FunctionType, staticmethod, classmethod)):
            install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))
        if function is None and hasattr(kind, "__getattr__") and _lacks(self.value, name):
            absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
            install_guard(self.source.make_guard(absent))
    return method(self, tx, name, *args, **kwargs)


def _same_names(builder: GuardBuilder, guard: Any) -> None:
    """The guard that an object has the attributes that it has now."""
    names = list(vars(builder.get(guard)))
    builder.get_guard_manager(guard).add_lambda_guard(
        lambda x: list(vars(x)) == names, [f"names of {guard.name}"], None
    )


def _lacks(value: object, name: str) -> bool:
    """Whether an object has a dictionary without this name."""
    return not isinstance(value, torch.nn.Module) and name not in getattr(value, "__dict__", [name])


def _guarding_keys(
    method: Callable, self: ConstDictVariable, tx: Any, key: VariableTracker
) -> VariableTracker:
    """What a dictionary has at a key, with a guard if that is missing."""
    if key not in self:
        self.install_dict_contains_guard(tx, [key])
    return method(self, tx, key)


def _asking_caches(
    call: Callable, self: Any, tx: Any, args: Sequence, kwargs: dict
) -> VariableTracker:
    """A call of a function with a cache of its results, which Dynamo leaves out: the guard asks the
    cache."""
    function = self.wrapper_obj
    if not hasattr(function, "cache_info") or function.__module__.startswith("torch."):
        return call(self, tx, args, kwargs)
    try:
        given = [x.as_python_constant() for x in (*self.self_args(), *args)]
        named = {name: x.as_python_constant() for name, x in kwargs.items()}
    except NotImplementedError:
        steps.end_graph("a cache is asked with arguments that may change", str(function))
    install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
    asked = functools.partial(function, *given, **named)
    source = CallFunctionNoArgsSource(GlobalSource(tx.output.install_global("asked", asked)))
    return VariableTracker.build(tx, asked(), source)


class _Surroundings:
    """What a graph was traced with besides values: classes, and the globals of functions that name
    builtins."""

    def __init__(self) -> None:
        self.kinds: dict[type, None] = {}
        self.builtins: dict[int, tuple[dict, set[str]]] = {}
        self.modules: dict[str, Any] = {}
        self.methods: set[str] = set()  # of tensors
        self.abstract = False  # whether classes were asked that others may be registered with

    @staticmethod
    def of(context: TracingContext | None) -> _Surroundings:
        if context is None:
            return _Surroundings()
        return vars(context).setdefault("torch_hlo_surroundings", _Surroundings())


def _noting_classes(
    begin: Callable, self: VariableTracker, value: Any, *args: Any, **kwargs: Any
) -> None:
    """The `__init__` of the variable of an object or a class."""
    begin(self, value, *args, **kwargs)
    if isinstance(value, torch.fx.GraphModule) and self.source is None:
        return  # Dynamo's own, of a loop
    kind = value if isinstance(value, type) else type(value)
    _Surroundings.of(TracingContext.try_get()).kinds[kind] = None


def _noting_builtins(load: Callable, self: InstructionTranslatorBase, name: str) -> VariableTracker:
    """The variable of a builtin that a function names."""
    scope = self.f_globals
    noted = _Surroundings.of(TracingContext.try_get()).builtins
    if name not in scope:
        noted.setdefault(id(scope), (scope, set()))[1].add(name)
    return load(self, name)


def _noting_modules(find: Callable, self: InstructionTranslatorBase, name: str) -> GlobalSource:
    """The name of a module that a function imports."""
    found = sys.modules.get(name)
    alias, scope = f"__import_{name.replace('.', '_dot_')}", self.output.global_scope
    if scope.get(alias, found) is not found:  # another has taken its place
        del scope[alias]
        symbolic_convert._import_module.cache_clear()
    _Surroundings.of(TracingContext.try_get()).modules[name] = found
    return find(self, name)


def _noting_methods(
    call: Callable, self: VariableTracker, tx: Any, name: str, *args: Any, **kwargs: Any
) -> VariableTracker:
    """A call of a tensor's method."""
    _Surroundings.of(TracingContext.try_get()).methods.add(name)
    return call(self, tx, name, *args, **kwargs)


def _plain_numbers(value: Callable, self: Any) -> Any:
    """A number of a class of its own, where an operation takes it: Dynamo leaves out how such a
    class adds or multiplies."""
    classes = [c for c in type(self.value).__mro__ if c.__module__ != "builtins"]
    if any(_ARITHMETIC & vars(c).keys() for c in classes):
        steps.end_graph("a number of a class of its own", str(type(self.value)))
    return value(self)


def _noting_abstract(
    ask: Callable, self: Any, tx: Any, x: VariableTracker, kind: VariableTracker
) -> Any:
    """`isinstance` or `issubclass`, of classes that answer themselves."""
    asked = kind.as_python_constant() if kind.is_python_constant() else ()
    for c in pytree.tree_leaves(asked):
        how = (
            getattr(type(c), "__instancecheck__", None),
            getattr(type(c), "__subclasscheck__", None),
        )
        if isinstance(c, abc.ABCMeta):
            _Surroundings.of(TracingContext.try_get()).abstract = True
        elif isinstance(c, type) and not type(c).__module__.startswith(_FIXED):
            if how != (type.__instancecheck__, type.__subclasscheck__):
                steps.end_graph("a class that says what is an instance of it", str(c))
    return ask(self, tx, x, kind)


def _without_versions(
    attribute: Callable, self: VariableTracker, tx: Any, name: str
) -> VariableTracker:
    """An attribute of a tensor. How often it was written is asked outside of graphs: Dynamo takes
    what it is now for a constant."""
    if name == "_version":
        steps.end_graph("a tensor's version", str(self.source))
    return attribute(self, tx, name)


def _refusing_generators(write: Callable, self: Any, codegen: Any) -> None:
    """Bytecode for a generator that leaves the graph. Dynamo runs it to its end, with what its
    variables hold now."""
    if not self.inline_tracer.generator_exhausted:
        steps.end_graph("a generator that leaves the graph", str(self))
    write(self, codegen)


def _with_surroundings(
    match: Callable, self: GuardBuilder, guard: Any, *args: Any, **kwargs: Any
) -> None:
    """The guard on PyTorch's modes, which every graph has."""
    match(self, guard, *args, **kwargs)
    graph = self.check_fn_manager.output_graph
    seen = _Surroundings.of(getattr(graph, "tracing_context", None))
    kinds, hidden = list(seen.kinds), list(seen.builtins.values())
    written = _Unchanged(
        [
            *_classes([*kinds, torch.Tensor]),
            *(scope for scope, _ in hidden),
            *_GLOBAL_HOOKS,
            vars(builtins),
            sys.modules,
        ],
        [
            _same_functions(kinds),
            _same_builtins(hidden),
            _same_hooks(),
            _same_values(sys.modules, seen.modules),
            _same_values(vars(torch.Tensor), seen.methods),
        ],
    )
    present = functools.partial(_present, kinds, seen.abstract)
    before = present()
    said = "functions and bases of classes, names that hide builtins, hooks of all modules"
    self.guard_manager.root.add_lambda_guard(
        lambda scope: written(scope) and present() == before,
        [f"{said}, autocast's dtypes"],
        None,
    )


class _Unchanged:
    """Whether guards on dictionaries hold. They are looked at only if a dictionary has another
    version than when they last held: any write gives it a number that none had before (`PEP 509`,
    up to Python 3.11)."""

    def __init__(self, dicts: Sequence[dict], same: Sequence[Same]) -> None:
        self.dicts, self.same = dicts, same
        self.seen: list[int] | None = None

    def __call__(self, scope: Any) -> bool:
        versions = list(map(dict_version, self.dicts)) if _VERSIONS else None
        if versions is not None and versions == self.seen:
            return True
        if not all([same(scope) for same in self.same]):
            return False
        self.seen = versions
        return True


def _classes(kinds: Sequence[type]) -> list[dict]:
    """The dictionaries of these classes, of those that they inherit from, and of their classes."""
    classes = dict.fromkeys(c for kind in kinds for c in kind.__mro__)
    classes |= dict.fromkeys(map(type, list(classes)))
    return [d for c in classes for d in gc.get_referents(vars(c)) if type(d) is dict]


def _same_functions(kinds: Sequence[type]) -> Same:
    """Whether these classes have the functions that they have now; of PyTorch's own, `forward`."""
    classes = dict.fromkeys(c for kind in kinds for c in kind.__mro__)
    sizes, watched = [], []
    for c in [*classes, *dict.fromkeys(map(type, classes))]:
        d, names = vars(c), ["forward"]
        if not c.__module__.startswith(_FIXED):
            sizes.append((d, len(d)))
            meta = issubclass(c, type)
            names = [n for n, v in d.items() if meta or hasattr(type(v), "__get__")]
        if names := [n for n in names if n in d]:
            get = operator.itemgetter(*names)
            watched.append((get, d, get(d)))

    def same(scope: Any) -> bool:
        for d, size in sizes:
            if len(d) != size:
                return False
        for get, d, values in watched:
            if get(d) != values:
                return False
        return True

    return same


def _same_builtins(named: Sequence[tuple[dict, set[str]]]) -> Same:
    """Whether no global variable has the name of a builtin that was read, and builtins are what
    they are now."""
    values = _same_values(vars(builtins), set().union(*[names for _, names in named]))
    return lambda scope: values(scope) and all([d.keys().isdisjoint(n) for d, n in named])


def _same_values(d: Any, names: Collection[str]) -> Same:
    """Whether a dictionary has the objects that it has now, or lacks them."""
    names = [n for n in names if n != "torch" and not n.startswith("torch.")]
    values = [d.get(n) for n in names]
    return lambda scope: all([d.get(n) is v for n, v in zip(names, values)])


def _same_hooks() -> Same:
    before = list(map(list, _GLOBAL_HOOKS))
    return lambda scope: list(map(list, _GLOBAL_HOOKS)) == before


def _present(kinds: Sequence[type], abstract: bool) -> list:
    """What no dictionary shows."""
    dtypes = torch.get_autocast_dtype("hlo"), torch.get_autocast_dtype("cpu")
    return [*dtypes, abstract and abc.get_cache_token(), *map(_MRO, kinds)]


def _unless_empty(ordered: Callable, self: GuardBuilder, source: Source) -> bool:
    """Whether the order of a dictionary's keys is guarded. Where it is, all other guards are left
    out if the dictionary is empty: those of its class, too."""
    return ordered(self, source) and self.get(source) != {}


def _with_signs(match: Callable, self: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
    """The guard that a value is equal to what it was, which 0.0 is to -0.0."""
    match(self, guard, *args, **kwargs)
    value = self.get(guard)
    if type(value) is float and value == 0:
        sign = math.copysign(1.0, value)
        self.get_guard_manager(guard).add_lambda_guard(
            lambda x: math.copysign(1.0, x) == sign, [f"{guard.name} is {value}"], None
        )


def _with_length(wrap: Callable, self: builder.VariableBuilder, value: deque) -> VariableTracker:
    """The variable of a deque, which keeps no more than the deque does."""
    found = wrap(self, value)
    found.maxlen = ConstantVariable.create(value.maxlen)
    return found


class AppendedList(ListVariable):
    """A list from outside that a graph only appends to: neither its length nor what it holds is
    guarded. If it is read after all, the trace begins anew and takes it for any other list.
    `appended`: what, each with its turn among those of all lists."""

    def __init__(self, read: set[str], turns: Iterator[int], **kwargs: Any) -> None:
        super().__init__([], **kwargs)
        self.read, self.turns = read, turns
        self.appended: list[tuple[int, VariableTracker]] = []

    @property
    def items(self) -> Any:
        self.read.add(self.source.name)
        raise exc.UnspecializeRestartAnalysis(restart_reason="a list is read")

    @items.setter
    def items(self, items: list) -> None:
        pass

    def call_method(
        self, tx: Any, name: str, args: Sequence[VariableTracker], kwargs: dict
    ) -> VariableTracker:
        if name != "append" or len(args) != 1 or kwargs:
            return super().call_method(tx, name, args, kwargs)
        tx.output.side_effects.mutation(self)
        self.appended.append((next(self.turns), args[0]))
        return ConstantVariable.create(None)


def _appending(wrap: Callable, self: builder.VariableBuilder, value: Any) -> VariableTracker:
    """The variable of a list or tuple that is about to be used."""
    kept = vars(self.tx.speculation_log)  # while the trace begins anew
    read = kept.setdefault("torch_hlo_read", set())
    how = self.tx.current_instruction
    if type(value) is not list or how.argval != "append" or self.source.name in read:
        return wrap(self, value)
    turns = kept.setdefault("torch_hlo_turns", itertools.count())
    self.install_guards(GuardBuilder.TYPE_MATCH)
    kind = variables.base.ValueMutationExisting()
    found = AppendedList(read, turns, source=self.source, mutation_type=kind)
    return self.tx.output.side_effects.track_mutable(value, found)


def _without_appended(modified: Callable, self: SideEffects) -> list[VariableTracker]:
    return [x for x in modified(self) if type(x) is not AppendedList]


def _with_appended(write: Callable, self: SideEffects, cg: Any, *args: Any, **kwargs: Any) -> None:
    """Bytecode that does outside what was done inside."""
    lists = [x for x in self.id_to_variable.values() if type(x) is AppendedList]
    done = [(turn, x, value) for x in lists for turn, value in x.appended]
    done.sort(key=operator.itemgetter(0), reverse=True)
    for _, x, value in done:
        cg(x.source)
        cg.load_method("append")
        cg(value)
    write(self, cg, *args, **kwargs)
    for _ in done:
        cg.extend_output([*create_call_method(1), create_instruction("POP_TOP")])


def _with_order(match: Callable, self: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
    """The guard that a value has the type that it had. Dynamo's guards on the order of keys do not
    see `OrderedDict.move_to_end`."""
    match(self, guard, *args, **kwargs)
    value = self.get(guard)
    if type(value) is OrderedDict and len(value) > 1:
        order, known = list(value), ref(value)
        self.guard_manager.root.add_lambda_guard(
            lambda scope: (d := known()) is None or list(d) == order,
            [f"the order of {guard.name}"],
            None,
        )


_LAST = {"LOAD_FAST", "LOAD_CONST", "BUILD_TUPLE", "BUILD_LIST", "POP_TOP"}
_GIVEN = (variables.ConstantVariable, variables.TensorVariable)


def _delaying(call: Callable, self: Any, fn: VariableTracker, args: list, kwargs: dict) -> None:
    """A call at the end of the function that Dynamo does not look into: it is made after the graph.
    What it reads has been written by then, and nothing that it writes is read after it: only local
    variables are returned. So it may do what it likes."""
    if not kwargs and _is_opaque(fn) and _is_last(self):
        if all(isinstance(x.realize(), _GIVEN) for x in args):
            self.debug_locals.append((fn, args))
            self.push(variables.ConstantVariable.create(None))
            return
    call(self, fn, args, kwargs)


def _is_opaque(fn: Any) -> bool:
    """Whether this is `print`, or the step of a scheduler of PyTorch's."""
    if type(fn) is variables.UserMethodVariable:
        return fn.get_code().co_filename in trace_rules.FORCE_SKIP_FILES
    return getattr(fn, "fn", None) is print


def _is_last(frame: Any) -> bool:
    """Whether this call's result is dropped, and local variables are returned."""
    first, *rest = [i.opname for i in frame.instructions[frame.instruction_pointer :]]
    simple = all(name in _LAST or name.startswith("RETURN_") for name in rest)
    return simple and first == "POP_TOP" and not frame.block_stack


def _with_delayed(
    write: Callable, self: OutputGraph, tx: Any, values: list, cg: Any, *more: Any
) -> None:
    """Bytecode for what is left after a graph: the calls come last."""
    calls, tx.debug_locals = tx.debug_locals, []
    write(self, tx, values, cg, *more)
    tx.debug_locals = calls
    for fn, args in calls:
        cg.add_push_null(functools.partial(cg, fn))
        for x in args:
            cg(x)
        end = create_instruction("POP_TOP")
        cg.extend_output([*create_call_function(len(args), False), end])
