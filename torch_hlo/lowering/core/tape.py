"""What has been recorded since the last cut, as a list of numbers: steps with equal tapes compute
the same, so a step that comes back is recognized without looking at its graph.

Every `graph.Node` of a recorded op writes `form, operand, …` when it is made (and zeros for several
results). Its form numbers the op together with its static arguments and the positions of its
operands, so the numbers can be read one way only; an operand is the place of the result or input
that it comes from. The place of a node is where its words begin, and that of its first result;
other results have the places that follow. An input is put on the tape when it is used first: the
number of its shape. Values remember places counted over all tapes, `base` is where the present one
begins. A value from before has none on it: then, and for arguments that have no form, the tape is
not `exact`, and the graph itself has to be looked at."""

import itertools
import threading
from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

import torch

from torch_hlo.hlo.ir import Shape

# one op is recorded, or one step cut, at a time; no thread that runs programs or compiles takes it
RECORDING = threading.RLock()
FORMS_KEPT = 1 << 18  # integers that change from step to step would fill any table

SERIALS = itertools.count()

# Static arguments as hashable values that differ where the arguments do (0.0 and -0.0, 1 and 1.0
# and True are equal in Python).
STATIC: dict[type, Callable[[Any], Hashable]] = {
    int: lambda x: ("int", x),
    bool: lambda x: ("bool", x),
    float: lambda x: ("float", x.hex()),
    complex: lambda x: ("complex", x.real.hex(), x.imag.hex()),
    torch.Size: lambda x: ("ints", *x) if x else ("list",),
    **{
        kind: lambda x: x
        for kind in (
            str,
            type(None),
            torch.dtype,
            torch.device,
            torch.layout,
            torch.memory_format,
            type(Ellipsis),
        )
    },
}


class _Forms:
    """Numbers of forms. `alive`: the ops whose id is in one."""

    __slots__ = ("numbers", "alive", "_count")

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.alive: dict[int, object] = {}
        self._count = itertools.count()

    def new(self) -> int:
        """A number for a form that the caller keeps: equal numbers mean equal op, static arguments,
        kinds of operands and result types."""
        return next(self._count)

    def of(self, key: Hashable) -> int:
        """The number of a form."""
        form = self.numbers.get(key)
        if form is None:
            if len(self.numbers) >= FORMS_KEPT:
                self.numbers.clear()
            form = self.numbers[key] = next(self._count)
        return form


_FORMS = _Forms()
new_form = _FORMS.new
form_of = _FORMS.of


class Tape:
    """`words` as above, `inputs[place]`: a weak reference to a Leaf or Lift. Who writes on it holds
    RECORDING. `nodes`: those recorded since its reader took them; None if nobody reads
    (lazy/run/journal.py)."""

    __slots__ = ("base", "words", "inputs", "exact", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Any] | None = None
        self.base = 0
        self.words: list[int] = []
        self.restart()

    def restart(self) -> None:
        """The graph has been cut."""
        self.base = self.here()
        self.words = []
        self.inputs: dict[int, object] = {}
        self.exact = True

    def here(self) -> int:
        """The place of what is written next, counted over all tapes."""
        return self.base + len(self.words)

    def place(self, x: Any) -> int:
        """Place of an Out, Leaf or Lift on the tape; what is not on it yet is put there."""
        place = x.place - self.base
        return place if place >= 0 else self.put(x)

    def put(self, x: Any) -> int:
        """`place` of what is not on the tape."""
        if x.is_result:
            if x.array is None:  # recorded before the tape begins
                self.exact = False
                return x.place - self.base
            x = x.array
            if x.place >= self.base:
                return x.place - self.base
        place = len(self.words)
        x.place = self.base + place
        if x.form < 0:
            x.form = form_of(x.shape)
        self.inputs[place] = ref(x)
        self.words.append(x.form)
        return place

    def form_of_view(self, op: Hashable, args: tuple[Any, ...], out: Shape) -> int:
        """Form of `op(base, *args)` where no argument is an operand."""
        key: list[Hashable] = []
        self._argument(args, key, [])
        _FORMS.alive[id(op)] = op
        return form_of((id(op), "view", *key, out.dtype))

    def describe(self, node: Any) -> list[int]:
        """Words of any node; where no form can be given the tape is no longer exact."""
        target = node.target
        _FORMS.alive[id(target)] = target
        key: list[Hashable] = [id(target), len(node.args)]
        words = [-1]
        try:
            for x in node.args:
                self._argument(x, key, words)
            for name, x in node.kwargs.items():
                key.append(name)
                self._argument(x, key, words)
        except KeyError:
            self.exact = False
            return words
        # may depend on global state (the default dtype)
        key += [out and out.dtype for out in node.outs]
        words[0] = form_of(tuple(key))
        return words

    def _argument(self, x: Any, key: list[Hashable], words: list[int]) -> None:
        kind = type(x)
        static = STATIC.get(kind)
        if static is not None:
            key.append(static(x))
        elif kind is list or kind is tuple:
            key.append(len(x))
            for v in x:
                self._argument(v, key, words)
        elif hasattr(x, "is_result"):
            key.append("operand")
            words.append(self.place(x))
        else:
            raise KeyError(kind)


TAPE = Tape()
LIFTS = {dtype: form_of(dtype) for dtype in ("f64", "s64", "c128")}  # forms of numbers
