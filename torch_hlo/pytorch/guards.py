"""What Dynamo's guards leave out: that two names mean one object (one of them global, or of an
optimizer), functions of classes that are replaced, the sign of a zero, the order of an OrderedDict,
the length of a deque, generators of random numbers that somebody holds. And what it copies by half.
The same in 2.11 to 2.13, but where said."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

from torch._dynamo import assume_constant_result, graph_break, trace_rules
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, Source, TypeSource, is_from_optimizer_source
from torch._dynamo.variables import ConstantVariable, VariableTracker, builder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

# classes whose objects are more than their attributes
_CONTENTS = (dict, list, set, frozenset, tuple, deque, str, bytes, int, float)
# classes whose functions nobody replaces
_FIXED = ("torch.", "builtins", "collections", "typing", "enum")


@functools.cache
def complete() -> None:
    """Add the guards, for graphs that are made from here on."""
    kind = UserDefinedObjectVariable
    kind.var_getattr = _guarding_functions(kind.var_getattr)
    kind.call_method = _guarding_functions(kind.call_method)
    builder.make_dupe_guard = _one_object(builder.make_dupe_guard)
    GuardBuilder.DUPLICATE_INPUT = _each_pair(GuardBuilder.DUPLICATE_INPUT)
    GuardBuilder.EQUALS_MATCH = _with_signs(GuardBuilder.EQUALS_MATCH)
    GuardBuilder.TYPE_MATCH = _with_order(GuardBuilder.TYPE_MATCH)
    for numpy in (True, False):
        wrappers = VariableBuilder._type_dispatch_impl(numpy)
        wrappers[deque] = _with_length(wrappers[deque])
    _copies_whole()
    # Dynamo takes the numbers that such an object gives while it traces for constants.
    RandomVariable.is_supported_random_obj = staticmethod(lambda value: False)


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

    trace_rules.get_mod_inlinelist().add(Path(__file__).as_posix())
    known.__torch_dynamo_polyfill__ = reduce_ex


@assume_constant_result
def _only_attributes(kind: type) -> bool:
    """Whether `object.__reduce_ex__` gives the attributes of such an object, and nothing else."""
    more = {"__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__", "__slots__"}
    return not issubclass(kind, _CONTENTS) and not any(
        more & vars(k).keys() for k in kind.__mro__ if k is not object
    )


def _one_object(make: Callable) -> Callable:
    """The guard that two names mean one object, as they do while Dynamo traces: it knows the object
    by the first. Dynamo makes none where one of the two is global and the other is not."""

    @functools.wraps(make)
    def making(name: Source, other: Source | None) -> Callable | None:
        found = make(name, other)
        if found is None and other is not None and other != name:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
        return found

    return making


def _each_pair(match: Callable) -> Callable:
    """The same guard for what was found in an optimizer, where Dynamo leaves it out: the optimizer
    may have a parameter that the module has no more."""

    @functools.wraps(match)
    def matching(self: GuardBuilder, guard: Any, source_b: Source) -> None:
        match(self, guard, source_b)
        sources = source_b, guard.originating_source
        pair = self.arg_ref(source_b.name), self.arg_ref(guard)
        known = self._cached_duplicate_input_guards
        if any(map(is_from_optimizer_source, sources)) and pair not in known:
            known |= {pair, pair[::-1]}
            code = " is ".join(pair)
            self.object_aliasing_guard_codes.append((code, code))

    return matching


def _guarding_functions(method: Callable) -> Callable:
    """`var_getattr` or `call_method` of an object, with a guard on the function of its class that
    is found."""

    @functools.wraps(method)
    def guarding(self: UserDefinedObjectVariable, tx: Any, name: str, *args: Any) -> Any:
        kind = type(self.value)
        if self.source is not None and not kind.__module__.startswith(_FIXED):
            function = inspect.getattr_static(kind, name, None)
            source = AttrSource(TypeSource(self.source), name)
            if isinstance(function, classmethod):
                source = AttrSource(source, "__func__")
            if isinstance(function, (types.FunctionType, staticmethod, classmethod)):
                install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))
        return method(self, tx, name, *args)

    return guarding


def _with_signs(match: Callable) -> Callable:
    """The guard that a value is equal to what it was, which 0.0 is to -0.0."""

    @functools.wraps(match)
    def matching(self: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
        match(self, guard, *args, **kwargs)
        value = self.get(guard)
        if type(value) is float and value == 0:
            sign = math.copysign(1.0, value)
            self.get_guard_manager(guard).add_lambda_guard(
                lambda x: math.copysign(1.0, x) == sign, [f"{guard.name} is {value}"], None
            )

    return matching


def _with_length(wrap: Callable) -> Callable:
    """The variable of a deque, which keeps no more than the deque does."""

    @functools.wraps(wrap)
    def wrapped(self: VariableBuilder, value: deque) -> VariableTracker:
        found = wrap(self, value)
        found.maxlen = ConstantVariable.create(value.maxlen)
        return found

    return wrapped


def _with_order(match: Callable) -> Callable:
    """The guard that a value has the type that it had. Dynamo's guards on the order of keys do not
    see `OrderedDict.move_to_end`."""

    @functools.wraps(match)
    def matching(self: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
        match(self, guard, *args, **kwargs)
        value = self.get(guard)
        if type(value) is OrderedDict and len(value) > 1:
            order, known = list(value), ref(value)
            self.guard_manager.root.add_lambda_guard(
                lambda scope: (d := known()) is None or list(d) == order,
                [f"the order of {guard.name}"],
                None,
            )

    return matching
