"""Functions of Python that are given values of a program once it has run: `torch_hlo.debug.print`.

The operator `torch_hlo::look(value, number)` hands a value to the function of that number. Programs
compute the value like any other result; whoever starts them calls the operator with it.

Values inside a loop or a branch are no results. There the program itself puts them on a list,
through the operator `torch_hlo::log`, which it calls on the host. All that follows in the function
depends on the token that this returns, so the list is in the order of the program. The last token
is a result of the loop, and says which list is its own: `Logged` hands on what is there."""

from __future__ import annotations

import builtins
import itertools
import pdb
from collections.abc import Callable, Hashable, Sequence

import torch

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Shape

Check = Callable[[torch.Tensor], None]
# Number of the list (negative: none yet), and the turns of the innermost loops, from 1 (0: no loop)
TOKEN = Shape("s64", (4,))


class Look:
    """A function that waits for its arguments, which come one by one; something comes also if it
    takes none. `ordered`: not before those that were recorded earlier have been called."""

    ordered = True

    def __init__(self, function: Callable[..., None], count: int) -> None:
        self.function = function
        self.count = count
        self._values: list[torch.Tensor] = []

    def __call__(self, value: torch.Tensor) -> None:
        self._values.append(value)
        if len(self._values) >= self.count:
            values = self._values
            self._values = []
            self.function(*values[: self.count])


@frozen
class At:
    """A check whose errors name its line."""

    check: Check
    line: str
    ordered: bool = True

    def __call__(self, value: torch.Tensor) -> None:
        try:
            self.check(value)
        except Exception as error:
            if self.line:
                error.args = (f"{error} at {self.line}",)
            raise


@frozen
class Printed:
    """Prints its values in a format; those without dimensions as numbers, but for PyTorch's print.
    `fixed`: places of values that are no tensors, and those."""

    form: str
    names: tuple[str, ...]
    fixed: tuple[tuple[int, object], ...] | None = None

    def __call__(self, *values: torch.Tensor) -> None:
        ours = self.fixed is None
        shown: list[object] = [v.item() if ours and v.dim() == 0 else v for v in values]
        for i, x in self.fixed or ():
            shown.insert(i, x)
        first = len(shown) - len(self.names)
        text = self.form.format(*shown[:first], **dict(zip(self.names, shown[first:])))
        builtins.print(text, flush=True)


@frozen
class Stopped:
    """Opens the debugger where its values are variables. Without names, in a graph of Dynamo's: all
    that there are."""

    names: tuple[str, ...]
    file: str = "<torch_hlo.debug.breakpoint>"
    line: int = 1

    def __call__(self, *values: torch.Tensor) -> None:
        code = compile("pass", self.file, "exec").replace(co_firstlineno=self.line)
        pdb.Pdb().run(code, {"torch": torch}, dict(zip(self.names, values)))


def printed(
    form: str, args: Sequence[object], kwargs: dict[str, object], kind: type
) -> tuple[Printed, list]:
    """What PyTorch's print does, and the values among its arguments, which are of this kind."""
    values = [*args, *kwargs.values()]
    fixed = tuple((i, x) for i, x in enumerate(values) if not isinstance(x, kind))
    return Printed(form, tuple(kwargs), fixed), [x for x in values if isinstance(x, kind)]


class Logged:
    """What becomes of the values on the list of a loop or a branch, `what`. Errors say the turn;
    of a function that raises in several, the first one counts."""

    ordered = True

    def __init__(self, what: str) -> None:
        self.what = what
        self.functions = list[Check]()

    def number(self, function: Check) -> int:
        if function not in self.functions:
            self.functions.append(function)
        return self.functions.index(function)

    def __call__(self, token: torch.Tensor) -> None:
        errors: dict[int, Exception] = {}
        for turns, index, value in _log.pop(int(token[0]), ()):
            try:
                self.functions[index](value)
            except Exception as error:
                where = "".join(f"turn {n} of " for n in turns) or "a branch of "
                error.args = (f"{error}, in {where}{self.what}",)
                errors.setdefault(index, error)
        raise_together([*errors.values()])


def raise_together(errors: Sequence[Exception]) -> None:
    """Raise the first error, if there is one, with notes of the others."""
    for other in errors[1:]:
        errors[0].add_note(f"and {type(other).__name__}: {other}")
        for note in getattr(other, "__notes__", ()):
            errors[0].add_note(note)
    if errors:
        raise errors[0]


_looks: list[Look] = []
_numbers: dict[Hashable, int] = {}
_log: dict[int, list[tuple[list[int], int, torch.Tensor]]] = {}
_lists = itertools.count(1)


def number(function: Callable[..., None], count: int) -> int:
    """The number of a function of `count` values; the same for functions that are equal."""
    known = _numbers.setdefault((function, count), len(_looks))
    if known == len(_looks):
        _looks.append(Look(function, count))
    return known


def numbered(at: int) -> Look:
    return _looks[at]


# The tag keeps PyTorch from calling it while it traces, and from leaving out the second of two.
_TAGS = (torch.Tag.nondeterministic_seeded,)


@torch.library.custom_op("torch_hlo::look", mutates_args=(), tags=_TAGS)
def _look(value: torch.Tensor, number: int) -> None:
    _looks[number](value.detach())


@_look.register_fake
def _(value: torch.Tensor, number: int) -> None:
    pass


@torch.library.custom_op("torch_hlo::log", mutates_args=())
def _logs(token: torch.Tensor, value: torch.Tensor, index: int) -> torch.Tensor:
    number, *turns = token.tolist()
    number = number if number > 0 else next(_lists)
    _log.setdefault(number, []).append(([n for n in turns if n], index, value.clone()))
    return torch.tensor([number, *turns])


look = torch.ops.torch_hlo.look.default
log = torch.ops.torch_hlo.log.default
