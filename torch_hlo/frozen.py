"""Classes of values: what is known of something, compared by what it holds, and never changed."""

from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """The dataclass, frozen and with slots: no attribute can be set or added afterwards. What is
    called often is compiled for each class, all at once, and the rest is shared:
    `dataclass(frozen=True)` compiles six methods one by one, a third of the time of importing the
    compiler."""
    own = vars(cls)
    cls.__doc__ = cls.__doc__ or cls.__name__  # else dataclass writes a signature
    made = dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    for name, method in {**_SHARED, **_compiled(made)}.items():
        if own.get(name) is None:
            setattr(made, name, method)
    return made


def _compiled(cls: Any) -> dict[str, Any]:
    """`__init__` puts what is given, or the defaults, into the slots."""
    names: dict[str, Any] = {"MISSING": MISSING}
    given, lines, compared, shown = ["self"], ["pass"], "", []
    for f in fields(cls):
        name, default = f.name, f"__default_{f.name}"
        names[default], names[f"__made_{name}"] = f.default, f.default_factory
        names[f"__set_{name}"] = getattr(cls, name).__set__
        value = name if f.init else default
        if f.default_factory is not MISSING:
            value = f"__made_{name}() if {value} is MISSING else {value}"
        if f.kw_only and "*" not in given:
            given.append("*")
        if f.init:
            given.append(name if value == name and f.default is MISSING else f"{name}={default}")
        lines.append(f"__set_{name}(self, {value})")
        compared += f"self.{name}, " * f.compare
        shown += [f"{name}={{self.{name}!r}}"] * f.repr
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    code = f"""
def __init__({", ".join(given)}): {"; ".join(lines)}
def __repr__(self): return f"{{self.__class__.__qualname__}}({", ".join(shown)})"
def __eq__(self, other):
    if other.__class__ is not self.__class__: return NotImplemented
    return ({compared}) == ({compared.replace("self.", "other.")})
def __hash__(self): return hash(({compared}))
"""
    methods: dict[str, Any] = {}
    exec(code, names, methods)
    return methods


def _refuse(self: object, name: str, *value: object) -> None:
    raise FrozenInstanceError(f"cannot change field {name!r}")


def _set_state(self: object, state: tuple[None, dict[str, object]]) -> None:
    for name, value in state[1].items():
        object.__setattr__(self, name, value)


_SHARED = {
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__setstate__": _set_state,
}
