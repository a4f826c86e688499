"""Frozen classes do what frozen dataclasses do."""

import copy
import pickle
from dataclasses import KW_ONLY, FrozenInstanceError, field, fields, replace

import pytest

from torch_hlo.frozen import frozen


@frozen
class Base:
    a: int
    b: str = "b"


@frozen
class Derived(Base):
    made: list[int] = field(default_factory=list, compare=False)
    total: int = field(default=0, init=False, repr=False)
    last: float = 0.5
    _: KW_ONLY
    needed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.a + len(self.b))


@frozen
class Named:
    """A class with a hash of its own, and one without fields."""

    name: str

    def __hash__(self) -> int:
        return 7


@frozen
class Empty:
    pass


def test_values_are_given_by_position_or_name_or_default() -> None:
    x = Derived(1, "cd", last=2.0, needed=4)
    assert (x.a, x.b, x.made, x.total, x.last) == (1, "cd", [], 3, 2.0)
    assert Derived(1, needed=4).made is not Derived(1, needed=4).made
    assert replace(x, a=5) == Derived(5, "cd", last=2.0, needed=4) and replace(x, a=5).total == 7
    assert [f.name for f in fields(x)] == ["a", "b", "made", "total", "last", "needed"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        Base()
    with pytest.raises(TypeError, match="positional"):
        Derived(1, "b", [], 2.0, 4)


def test_they_are_compared_by_what_they_hold() -> None:
    assert Derived(1, made=[2], needed=4) == Derived(1, needed=4) != Derived(1, needed=5)
    assert Base(1) != Derived(1, needed=4) and Base(1) != (1, "b")
    assert len({Base(1), Base(1), Base(2), Empty(), Empty()}) == 3
    assert hash(Named("x")) == 7 and Named("x") != Named("y")
    assert (
        repr(Derived(1, needed=4)) == "Derived(a=1, b='b', made=[], last=0.5, needed=4)"
        and repr(Empty()) == "Empty()"
    )


def test_they_are_copied_and_pickled_and_never_changed() -> None:
    x = Derived(1, made=[3], needed=4)
    for y in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert y == x and y.made == [3] and y.total == 2
    for name in ("a", "other"):
        with pytest.raises(FrozenInstanceError):
            setattr(x, name, 2)
    with pytest.raises(FrozenInstanceError):
        del x.a
