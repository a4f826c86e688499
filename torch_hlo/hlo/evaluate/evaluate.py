"""The NumPy meaning of every opcode: the reference that compiled programs and passes are checked
against.

    evaluate(module, [x, y]) -> [array, …]        # flat outputs of the root

`MEANINGS[op](x, *operands)` is the meaning of one opcode, see interpreter.py. Symbolic sizes are
read from the inputs and replaced in the whole program before it runs. Sums, products and
transcendental functions are computed in double precision and rounded once to the result's type.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir import (
    DTYPES,
    IDENTITIES,
    Computation,
    Dim,
    Instruction,
    Ints,
    Module,
    Shape,
    Size,
    WindowDim,
    called,
    interned,
    numpy_dtype,
    substitute,
    symbols,
)
from ..ir.numeric import round_to
from . import communication, elementwise, indexing, lapack, linear_algebra, random_bits, windows
from .interpreter import MEANINGS, Array, EvaluateError, Value, apply, meaning, run, step

# Their imports fill MEANINGS.
FAMILIES = (
    elementwise,
    indexing,
    linear_algebra,
    communication,
    random_bits,
    windows,
)

CUSTOM_CALLS: dict[str, Callable[..., Value]] = {}
"""Custom-call targets: `fn(x, *operands) -> array or tuple`."""


def evaluate(program: Module | Computation, inputs: Sequence[Any]) -> list[Array]:
    """Run a program on arrays (or Python numbers), one per entry parameter; returns its outputs,
    nested tuples flattened.

    bf16 and f8 inputs are float32 arrays (they are rounded) and so are such outputs.
    Raises EvaluateError when the inputs do not fit the parameters or an instruction has no value.
    """
    computation = program.entry if isinstance(program, Module) else program
    params = computation.params
    if len(inputs) != len(params):
        raise EvaluateError(
            f"{computation.name or 'the program'} takes {len(params)} inputs, got {len(inputs)}"
        )
    values = [_input(i, v, p.shape) for i, (v, p) in enumerate(zip(inputs, params, strict=True))]
    sizes = bind_symbols(computation, [None if isinstance(v, tuple) else v.shape for v in values])
    if sizes:
        computation = specialize(computation, sizes)
    return list(leaves(run(computation, values)))


def evaluate_instruction(x: Instruction, *operands: Value) -> Value:
    """The value of one instruction on static sizes; for constant folding."""
    with np.errstate(all="ignore"):
        return step(x, [np.asarray(o) if not isinstance(o, tuple) else o for o in operands])


def bind_symbols(computation: Computation, dims: Sequence[Ints | None]) -> dict[str, int]:
    """The value of each symbol from the sizes of the parameters; raises EvaluateError when the
    sizes contradict each other."""
    pairs = [
        (p, i, d, n)
        for i, (p, ns) in enumerate(zip(computation.params, dims))
        for d, n in zip(p.dims, ns or ())
    ]
    bound: dict[str, int] = {}
    for _, _, d, n in pairs:
        if isinstance(d, Dim) and len(names := symbols(d)) == 1 and str(d) in names:
            bound.setdefault(str(d), n)
    for p, i, d, n in pairs:
        want = substitute(d, bound)
        if isinstance(want, Dim):
            raise EvaluateError(
                f"parameter {i} {p.shape}: the inputs' sizes do not determine {want}"
            )
        if want != n:
            where = f" = {want} for {bound}" if isinstance(d, Dim) else ""
            raise EvaluateError(
                f"parameter {i} is {p.shape}, got an array of sizes {list(dims[i] or ())};"
                f" {d}{where} is not {n}"
            )
    return bound


def specialize(computation: Computation, sizes: Mapping[str, Size]) -> Computation:
    """The computation with symbols replaced by sizes, in shapes and attributes, called computations
    included."""
    done: dict[int, Instruction] = {}
    for x in computation.instructions():
        attrs = tuple((k, _concrete(v, sizes)) for k, v in x.attrs)
        done[id(x)] = interned(
            x.op,
            tuple(done[id(o)] for o in x.operands),
            attrs,
            _concrete(x.shape, sizes),
        )
    return Computation(
        computation.name,
        tuple(done[id(p)] for p in computation.params),
        done[id(computation.root)],
    )


def _concrete(value: Any, sizes: Mapping[str, Size]) -> Any:
    if isinstance(value, Dim):
        return substitute(value, sizes)
    if isinstance(value, Computation):
        return specialize(value, sizes)
    if isinstance(value, Shape):
        return Shape(
            value.dtype,
            _concrete(value.dims, sizes),
            value.layout,
            _concrete(value.elements, sizes),
        )
    if isinstance(value, WindowDim):
        return WindowDim(*(_concrete(getattr(value, f), sizes) for f in WindowDim.__match_args__))
    return tuple(_concrete(v, sizes) for v in value) if type(value) is tuple else value


def _input(i: int, value: Array, shape: Shape) -> Value:
    if shape.is_tuple:
        if not isinstance(value, (tuple, list)) or len(value) != len(shape.elements):
            raise EvaluateError(f"parameter {i} is {shape}, got {type(value).__name__}")
        return tuple(_input(i, v, s) for v, s in zip(value, shape.elements, strict=True))
    if shape.kind == "t":
        return ()
    return round_to(fitting(i, value, shape), shape.dtype)


def fitting(i: int, value: Any, shape: Shape) -> Array:
    """The array (or Python number) for parameter `i`; raises EvaluateError when it is of another
    type or rank."""
    array = np.asarray(value)
    want = numpy_dtype(shape.dtype)
    text = DTYPES[shape.dtype].numpy
    if isinstance(value, (bool, int, float, complex)):
        array = array.astype(want)
    elif array.dtype != want and array.dtype.name != text:
        raise EvaluateError(
            f"parameter {i} is {shape}, got an array of {array.dtype}; convert it to {want}"
        )
    if array.ndim != shape.rank:
        raise EvaluateError(f"parameter {i} is {shape}, got an array of sizes {list(array.shape)}")
    return array


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples."""
    if isinstance(value, tuple):
        for v in value:
            yield from leaves(v)
    else:
        yield value


# Structure and control flow.


MEANINGS["tuple"] = lambda x, *values: values
MEANINGS["get-tuple-element"] = lambda x, value: value[x["index"]]
MEANINGS["after-all"] = lambda x, *tokens: ()
MEANINGS["map"] = lambda x, *operands: apply(x["to_apply"], operands)[0]
meaning("call", "fusion")(lambda x, *operands: run(called(x)[0], operands))


@meaning("while")
def _while(x: Instruction, state: Array) -> Value:
    while run(x["condition"], [state]):
        state = run(x["body"], [state])
    return state


@meaning("conditional")
def _conditional(x: Instruction, selector: Array, *operands: Array) -> Value:
    branches = x.get("branch_computations") or (
        x["true_computation"],
        x["false_computation"],
    )
    if selector.dtype == bool:
        chosen = 0 if selector else 1
    else:  # out of range selects the last branch
        chosen = int(selector) if 0 <= int(selector) < len(branches) else len(branches) - 1
    return run(branches[chosen], [operands[chosen]])


@meaning("custom-call")
def _custom_call(x: Instruction, *operands: Array) -> Value:
    target = x["custom_call_target"]
    if lapack.routine(target) in lapack.ROUTINES:
        results = lapack.call(target, x.get("backend_config"), operands)
        if not x.is_tuple:
            return results[0]
        shapes = x.elements
        return tuple(np.broadcast_to(v, s.sizes) for v, s in zip(results, shapes, strict=True))
    fn = CUSTOM_CALLS.get(target)
    if fn is None:
        raise EvaluateError(
            f"custom-call target {target!r} is not registered; add it to"
            " torch_hlo.hlo.evaluate.evaluate.CUSTOM_CALLS"
        )
    return fn(x, *operands)


CUSTOM_CALLS.update(dict.fromkeys(IDENTITIES, lambda x, v: v))
CUSTOM_CALLS["AllocateBuffer"] = lambda x: np.zeros(x.dims, numpy_dtype(x.dtype))
CUSTOM_CALLS["TopK"] = lambda x, v: MEANINGS["topk"](x, v)


# Asynchronous pairs: the start computes, the done unwraps (communication.py has that of "async").


MEANINGS["copy-start"] = lambda x, v: (v, v, np.uint32(0))
MEANINGS["copy-done"] = lambda x, state: state[0]


@meaning("async-start")
def _async_start(x: Instruction, *operands: Array) -> Value:
    value = run(x["calls"], operands)
    return (
        operands,
        value,
        *(np.zeros(s.sizes, numpy_dtype(s.dtype)) for s in x.elements[2:]),
    )


@meaning("infeed", "outfeed", "send", "send-done", "recv", "recv-done")
def _transfer(x: Instruction, *operands: Array) -> Value:
    raise EvaluateError(f"{x.op} -> {x.shape}: the evaluator has no host to exchange data with")
