"""Steps that run in Python on NumPy arrays: some fft and custom calls. The interpreter lock is
taken for their duration.

See `host_call` in registry.py."""

from collections.abc import Callable, Iterator

import numpy as np

from torch_hlo.hlo.evaluate import lapack
from torch_hlo.hlo.ir import IDENTITIES, Instruction, Shape

from ..codegen import CodegenError, Place, Program
from ..codegen.block import Places
from ..codegen.registry import HOST_CALLS
from ..linalg import lapack as native
from .control_flow import copy_places
from .loop_fill import is_unwritten

_FFT: dict[str, Callable[..., np.ndarray]] = {
    "FFT": np.fft.fftn,
    "IFFT": np.fft.ifftn,
    "RFFT": np.fft.rfftn,
    "IRFFT": np.fft.irfftn,
}


def fft(program: Program, x: Instruction) -> None:
    """A transform that compiler/fourier/fft.py does not take."""
    if x.size == 0:
        return
    operand = x.operand
    lengths = [n if isinstance(n, int) else None for n in x["fft_length"]]
    if None in lengths and x["fft_type"] == "IRFFT":
        raise CodegenError(
            f"fft({operand.shape}) of type IRFFT and symbolic length {x['fft_length']}: give a"
            " static length"
        )
    program.host_call(
        "fft",
        [(program.place(x), x.shape)],
        [(program.place(operand), operand.shape)],
        kind=x["fft_type"],
        lengths=lengths,
    )


def fft_on_host(
    outputs: list[np.ndarray],
    inputs: list[np.ndarray],
    kind: str,
    lengths: list[int | None],
) -> None:
    (value,) = inputs
    axes = tuple(range(value.ndim - len(lengths), value.ndim))
    sizes = [value.shape[a] if n is None else n for a, n in zip(axes, lengths, strict=True)]
    outputs[0][...] = _FFT[kind](value, sizes, axes)


def custom_call(program: Program, x: Instruction) -> None:
    """A target registered with @host_call gets its attributes as keywords: `opaque` when there is
    one."""
    target = x["custom_call_target"]
    if is_unwritten(x):
        return
    if target in IDENTITIES:
        return copy_places(program, program.places(x), program.places(x.operand))
    library = lapack.routine(target) in lapack.ROUTINES
    if target not in HOST_CALLS and not library:
        raise CodegenError(
            f"custom-call target {target!r} ({x.operand_shapes}) ->"
            f" {x.shape} is not registered: register it with"
            " torch_hlo.compiler.codegen.registry.host_call"
        )
    outputs = list(_flat(program.places(x), x.shape))
    inputs = [pair for o in x.operands for pair in _flat(program.places(o), o.shape)]
    if library:
        return program.host_call(
            "lapack", outputs, inputs, target=target, config=x.get("backend_config")
        )
    attrs = {} if x.get("opaque") is None else {"opaque": x["opaque"]}
    if not native.call(
        program,
        x,
        lambda: program.host_call(target, outputs, inputs, rare=True, **attrs),
    ):
        program.host_call(target, outputs, inputs, **attrs)


def lapack_on_host(
    outputs: list[np.ndarray],
    inputs: list[np.ndarray],
    target: str,
    config: str | None,
) -> None:
    for out, value in zip(outputs, lapack.call(target, config, inputs), strict=True):
        out[...] = value


def _flat(places: Places, shape: Shape) -> Iterator[tuple[Place, Shape]]:
    """(place, shape) of the arrays of a value; tokens are left out."""
    if isinstance(places, Place):
        if shape.kind != "t":
            yield places, shape
    else:
        for p, s in zip(places, shape.elements, strict=True):
            yield from _flat(p, s)
