"""Conditions compiled into one function: what a replay compares before it starts, see capture.py.

    guard = Guard()
    guard.value(f"{guard.name(owner)}['lr']", 0.1, "the learning rate")
    guard.holds()
    guard.reason()  # "the learning rate has changed"

A condition is an expression of Python over objects that `name` has given a name; one function
evaluates them all, in the order in which they came. Values are compared by identity, which takes 25
ns; numbers and words that have become other objects with the same value are compared again as such,
and are known from then on.
"""

from __future__ import annotations

from collections.abc import Callable


class Guard:
    def __init__(self) -> None:
        self._terms: list[str] = []
        self._subjects: list[str] = []
        self._names: dict[str, object] = {}
        self._known: dict[int, str] = {}
        self._equal: list[tuple[str, str]] = []  # (expression, name of the value it had)
        self._again: list[Callable[[], bool]] = []
        self._compiled: Callable[[], bool] | None = None

    def name(self, x: object) -> str:
        """The name of an object in expressions; the guard keeps it alive."""
        name = self._known.get(id(x))
        if name is None:
            name = self._known[id(x)] = f"x{len(self._names)}"
            self._names[name] = x
        return name

    def term(self, expression: str, subject: str) -> None:
        """Must be true. LookupError, ValueError and AttributeError make it false. `subject`: what
        it is about, for the user."""
        self._terms.append(expression)
        self._subjects.append(subject)

    def value(self, expression: str, value: object, subject: str) -> None:
        """Must be this number, word or None, of this type."""
        name = f"v{len(self._names)}"
        self._names[name] = value
        self._equal.append((expression, name))
        self.term(f"{expression} is {name}", subject)

    def changing(self, expression: str, holds: Callable[[], bool], subject: str) -> None:
        """`expression` is what it was, or else `holds()`: a count of what happens anywhere in the
        process, and whether it happened here."""
        name = f"v{len(self._names)}"
        self._names[name] = eval(expression, self._names)

        def again() -> bool:
            now = eval(expression, self._names)
            if now != self._names[name]:
                if not holds():
                    return False
                self._names[name] = now
            return True

        self._again.append(again)
        self.term(f"{expression} == {name}", subject)

    def function(self, parameter: str, expression: str) -> Callable:
        """A function that returns the value of an expression."""
        return eval(f"lambda {parameter}: {expression}", self._names)

    def holds(self) -> bool:
        """Whether all terms are true."""
        if self._compiled is None:
            self._compiled = self.function("", "(" + ("\n and ".join(self._terms) or "True") + ")")
        try:
            if self._compiled():
                return True
        except (LookupError, ValueError, AttributeError):
            return False
        return self._refresh() and self._compiled()

    def reason(self) -> str:
        """What the first condition that does not hold is about; "" if all hold."""
        for expression, subject in zip(self._terms, self._subjects):
            try:
                if eval(expression, self._names):
                    continue
            except (LookupError, ValueError, AttributeError):
                pass
            return f"{subject} has changed"
        return ""

    def _refresh(self) -> bool:
        try:
            for expression, name in self._equal:
                now, known = eval(expression, self._names), self._names[name]
                if now is not known:
                    if type(now) is not type(known) or now != known:
                        return False
                    self._names[name] = now
        except (LookupError, ValueError, AttributeError):
            return False
        return all(again() for again in self._again)
