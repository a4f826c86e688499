"""TensorFlow's functions on this compiler.

    @torch_hlo.tf.function
    def step(x, y): ...        # as under tf.function: tensors, variables, a GradientTape, Keras

tf.function traces the function for each signature, and TensorFlow translates the trace to
StableHLO: values of variables are parameters of the program, and their new values results. Arrays
are not copied. Other packages call nothing here; `torch_hlo.tf` imports it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from torch_hlo.device import dlpack, runtime
from torch_hlo.device.memory import Buffer
from torch_hlo.hlo.ir import outputs
from torch_hlo.hlo.read import parse_text

_UPDATE = re.compile(r"parameter_number = (\d+) : i64\}, output_index = array<i64(?:: (\d+))?>")
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), tf.DType, np.dtype)
_MANY = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def function(f: Callable[..., Any]) -> Function:
    """Decorator: `f` is compiled for each signature of its arguments. Tensors and arrays become
    parameters; other values belong to the signature: numbers by value, objects by identity."""
    return Function(f)


class Function:
    def __init__(self, f: Callable[..., Any]) -> None:
        functools.update_wrapper(self, f)
        self.function = f
        self.traces: dict[Any, Trace] = {}

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            if not _is_ours(tf.compat.v1.get_default_graph()):
                raise RuntimeError(
                    f"{self.function} is called while TensorFlow traces another function: compile"
                    " that one with torch_hlo.tf.function"
                )
            return self.function(*args, **kwargs)
        given = args, kwargs
        leaves = tf.nest.flatten(given)
        key = _structure(given), tuple(map(_key, leaves))
        found = self.traces.get(key)
        arrays = [tf.convert_to_tensor(v) for v in leaves if _is_array(v)]
        if found is None:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in arrays]
            found = self.traces[key] = Trace(_flat(self.function, given), specs)
        return found(arrays)


def _is_array(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, np.ndarray, np.generic))


def _structure(value: Any) -> Any:
    """What two values must share to be traced once, beside their leaves."""
    if isinstance(value, dict):
        return type(value), tuple((k, _structure(value[k])) for k in sorted(value))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_structure, value))
    return None if _is_array(value) else type(value)


def _key(leaf: Any) -> Any:
    """Objects are told apart by where they are: a trace keeps its own."""
    if _is_array(leaf):
        return tf.as_dtype(leaf.dtype), tuple(leaf.shape)
    if isinstance(leaf, _MANY):
        raise TypeError(f"a {type(leaf).__name__} is several arrays: pass these as arguments")
    return repr(leaf) if isinstance(leaf, _NUMBERS) else id(leaf)


_NAME = "torch_hlo_trace"


def _is_ours(graph: Any) -> bool:
    """Whether TensorFlow traces for us: control flow has graphs inside."""
    while graph is not None and getattr(graph, "name", "") != _NAME:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def _flat(f: Callable[..., Any], given: Any) -> Callable[..., Any]:
    """`f` of its arrays alone. What else was `given` stays."""
    whole = tf.nest.map_structure(lambda v: None if _is_array(v) else v, given)
    places = [i for i, v in enumerate(tf.nest.flatten(given)) if _is_array(v)]

    @tf.autograph.experimental.do_not_convert
    def arguments(arrays: Sequence[tf.Tensor]) -> Any:
        leaves = tf.nest.flatten(whole)
        for i, x in zip(places, arrays, strict=True):
            leaves[i] = x
        return tf.nest.pack_sequence_as(whole, leaves)

    def torch_hlo_trace(*arrays: tf.Tensor) -> Any:
        args, kwargs = arguments(arrays)
        return f(*args, **kwargs)

    return torch_hlo_trace


class Trace:
    """The program of one signature. `captured`: variables and tensors that it reads from outside,
    parameters behind those of `specs`; `updated`: variables whose new values are the last
    results."""

    def __init__(self, flat: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> None:
        if not runtime.backend().on_host:
            raise RuntimeError("torch_hlo.tf computes in the host's memory: TORCH_HLO_DEVICE=cpu")
        self.flat = flat
        self.specs = specs
        traced = tf.function(flat, jit_compile=True)
        self.concrete = traced.get_concrete_function(*specs)
        variables = {id(v.handle): v for v in self.concrete.graph.variables}
        self.captured = [variables.get(id(t), t) for t in self.concrete.captured_inputs]
        text = _stablehlo(traced, specs)
        module = replace(parse_text(text), aliases=())
        self.shapes = [x.shape for x in outputs(module)]
        places = {int(o or 0): int(p) - len(specs) for p, o in _UPDATE.findall(text)}
        count = len(self.concrete.outputs)
        if len(module.entry.params) != len(specs) + len(self.captured) or places.keys() != set(
            range(count, len(self.shapes))
        ):
            raise RuntimeError(
                f"TensorFlow translates {flat} to {len(module.entry.params)} parameters and"
                f" {len(self.shapes)} results, where {len(specs)} arguments, {len(self.captured)}"
                f" captured values and {count} results are expected. Variables must be initialized"
                " and keep their shapes; only variables and tensors can be captured"
            )
        self.updated = [self.captured[places[o]] for o in sorted(places)]
        self.program = runtime.compile_program(module)
        self.apply = tf.custom_gradient(self._apply)
        # all at once: an operation of TensorFlow takes as long as a small program
        read = tf.function(lambda: [*map(_value, self.captured)], autograph=False)
        self.read = read.get_concrete_function()
        write = tf.function(self._write, autograph=False)
        self.write = write.get_concrete_function(
            *(tf.TensorSpec(v.shape, v.dtype) for v in self.updated)
        )

    def __call__(self, arrays: Sequence[tf.Tensor]) -> Any:
        count = len(self.concrete.outputs)
        if record.could_possibly_record():
            results = self.apply(*arrays, *map(_value, self.captured)) if self.shapes else []
            self._write(*results[count:])
        else:
            results = self._run([*arrays, *self.read()])
            self.write(*results[count:])
        structure = self.concrete.structured_outputs
        found = iter(results)
        leaves = [
            None if leaf is None else next(found)
            for leaf in tf.nest.flatten(structure, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)

    def _write(self, *values: tf.Tensor) -> None:
        for variable, value in zip(self.updated, values, strict=True):
            variable.assign(value, read_value=False)

    def _apply(self, *inputs: tf.Tensor) -> Any:
        """Results, and the function of their gradients, for tf.custom_gradient."""
        return self._run(inputs), lambda *g: self._gradients(inputs, g)

    def _run(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        results = [runtime.allocate(s) for s in self.shapes]
        self.program.run([_buffer(t) for t in inputs], results)
        return [_tensor(b) for b in results]

    def _gradients(self, inputs: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> Any:
        """Of all inputs, at the values that variables had."""
        count = len(self.specs)
        known = {id(c): v for c, v in zip(self.captured, inputs[count:], strict=True)}
        back = self.pullback
        values = [known[id(c)] if id(c) in known else _value(c) for c in back.captured]
        given = [upstream[i] for i in _floats(self.concrete.outputs)]
        found = iter(back.apply(*inputs[:count], *given, *values))
        return [next(found) if i in _floats(inputs) else None for i in range(len(inputs))]

    @functools.cached_property
    def pullback(self) -> Trace:
        """(arguments, gradients of results) -> gradients of arguments and of what is captured. It
        computes the function again."""
        flat = self.flat
        count = len(self.specs)
        captured = self.captured
        targets = _floats(self.concrete.outputs)

        def torch_hlo_trace(*given: tf.Tensor) -> Any:
            capture = tf.compat.v1.get_default_graph().capture
            outside = [c if isinstance(c, tf.Variable) else capture(c) for c in captured]
            everything = [*given[:count], *outside]
            sources = [everything[i] for i in _floats(everything)]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                results = flat(*given[:count])
            leaves = tf.nest.flatten(results, expand_composites=True)
            leaves = [tf.convert_to_tensor(x) for x in leaves if x is not None]
            zero = tf.UnconnectedGradients.ZERO
            wanted = [leaves[i] for i in targets]
            found = tape.gradient(wanted, sources, list(given[count:]), zero)
            return [tf.convert_to_tensor(g) for g in found]

        specs = [
            tf.TensorSpec(self.shapes[i].sizes, self.concrete.outputs[i].dtype) for i in targets
        ]
        return Trace(torch_hlo_trace, [*self.specs, *specs])


def _floats(values: Sequence[Any]) -> list[int]:
    """Which have gradients."""
    return [i for i, v in enumerate(values) if v.dtype.is_floating or v.dtype.is_complex]


def _stablehlo(traced: Any, specs: Sequence[tf.TensorSpec]) -> str:
    try:
        return traced.experimental_get_compiler_ir(*specs)(stage="stablehlo", platform_name="CPU")
    except ValueError as error:
        if "compile-time constant" in str(error):
            error.add_note(
                "a number that decides a shape must be a Python number where the function is"
                " called, not a tensor"
            )
        raise


def _value(captured: Any) -> tf.Tensor:
    return captured.value() if isinstance(captured, tf.Variable) else captured


def _buffer(tensor: tf.Tensor) -> Buffer:
    """The array where it is."""
    if tensor.dtype in (tf.string, tf.variant, tf.resource):  # to_dlpack ends the process
        raise TypeError(
            f"{tensor.dtype.name}{tensor.shape} is no argument of a compiled function: numbers are"
        )
    found, owner = dlpack.take(tf.experimental.dlpack.to_dlpack(tensor))
    return runtime.adopt(found.shape, found.address, owner)


def _tensor(buffer: Buffer) -> tf.Tensor:
    held = [buffer.memory]
    found = dlpack.Array(buffer.address, buffer.shape, (dlpack.CPU, 0))
    return tf.experimental.dlpack.from_dlpack(dlpack.export(found, held.clear))
