"""What has been recorded since the last cut, as a list of numbers: steps with equal tapes compute the same, so a step that comes back
is recognized without looking at its graph.

Every `graph.Node` writes `place, form, operand, …` when it is made. Its form numbers the op together with its static arguments and the
positions of its operands; an operand is the place of the node or input that it comes from. Places count from the start of the tape. An input
is put on the tape when it is used first, with the number of its shape. A value from before the tape's start has no place: then, and
for arguments that have no form, the tape is not `exact`, and the graph itself has to be looked at.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from weakref import ref

import torch

INDEX_BITS = 20  # of a place: which result of the node
FORMS_KEPT = 1 << 18  # integers that change from step to step would fill any table

SERIALS = itertools.count()
_forms = itertools.count()
_FORMS: dict[object, int] = {}
_ALIVE: dict[int, object] = {}  # ops whose id is in a form

# Static arguments as hashable values that differ where the arguments do (0.0 and -0.0, 1 and 1.0 and True are equal in Python).
STATIC: dict[type, Callable] = {
    int: lambda x: ("int", x),
    bool: lambda x: ("bool", x),
    float: lambda x: ("float", x.hex()),
    complex: lambda x: ("complex", x.real.hex(), x.imag.hex()),
    torch.Size: lambda x: ("ints", *x) if x else ("list",),
    **{kind: lambda x: x for kind in (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis))},
}


def new_form() -> int:
    """A number for a form that the caller keeps: equal numbers mean equal op, static arguments, kinds of operands and result types."""
    return next(_forms)


def form_of(key) -> int:
    """The number of a form."""
    form = _FORMS.get(key)
    if form is None:
        if len(_FORMS) >= FORMS_KEPT:
            _FORMS.clear()
        form = _FORMS[key] = next(_forms)
    return form


class Tape:
    """`words` as above, `inputs[place]`: a weak reference to a Leaf or Lift."""

    __slots__ = ("base", "words", "inputs", "exact")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The graph has been cut."""
        self.base = next(SERIALS) << INDEX_BITS
        self.words: list[int] = []
        self.inputs: dict[int, object] = {}
        self.exact = True

    def place(self, x) -> int:
        """Place of an Out, Leaf or Lift."""
        return self.places((x,))[0]

    def places(self, values: Sequence) -> list[int]:
        """`place` of each; a loop without calls, for the hundreds of arrays that an optimizer reads for the first time in a step."""
        base, inputs, words = self.base, self.inputs, self.words
        found = []
        for x in values:
            if x.is_result and x.array is None:
                place = (x.node.serial << INDEX_BITS | x.index) - base
                if place < 0:
                    self.exact = False
            else:
                if x.is_result:
                    x = x.array
                place = x.place - base
                if place < 0:
                    x.place = next(SERIALS) << INDEX_BITS
                    place = x.place - base
                    if x.form < 0:
                        x.form = form_of(x.shape)
                    inputs[place] = ref(x)
                    words.append(place)
                    words.append(x.form)
            found.append(place)
        return found

    def form_of_view(self, op, args: tuple, out) -> int:
        """Form of `op(base, *args)` where no argument is an operand."""
        key: list = []
        self._argument(args, key, [])
        _ALIVE[id(op)] = op
        return form_of((id(op), "view", *key, out.dtype))

    def describe(self, node) -> list[int]:
        """Words of any node, its own place left open; where no form can be given the tape is no longer exact."""
        target = node.target
        _ALIVE[id(target)] = target
        key: list = [id(target), len(node.args)]
        words = [0, -1]
        try:
            for x in node.args:
                self._argument(x, key, words)
            for name, x in node.kwargs.items():
                key.append(name)
                self._argument(x, key, words)
        except KeyError:
            self.exact = False
            return words
        key += [out and out.dtype for out in node.outs]  # may depend on global state (the default dtype)
        words[1] = form_of(tuple(key))
        return words

    def _argument(self, x, key: list, words: list[int]) -> None:
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
