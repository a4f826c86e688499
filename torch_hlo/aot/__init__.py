"""Ahead-of-time compilation: a model as a shared library, object file or WebAssembly module with a
small C interface.

    # digits.so and digits.h
    files = torch_hlo.aot.compile(model, (x,), output="digits.so")
    files = torch_hlo.aot.compile(exported_program, target="wasm32", output="digits.wasm")
    model = torch_hlo.aot.load("digits.so");  y = model(x)

The library needs nothing of Python, torch, libc or a compiler. docs/guide/ahead_of_time.md
describes the interface.

In: a module, an exported program or HLO. Out: files, and `Loaded` models. Imports compiler/,
device/library.py, hlo/ and export.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_hlo import export
from torch_hlo.compiler.aot import abi
from torch_hlo.compiler.aot.library import (
    Array,
    Condition,
    Library,
    compile_library,
    describe,
)
from torch_hlo.compiler.llvm import PLATFORMS, platform_target
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Module

from . import link
from .link import LinkError
from .loaded import LibraryError, Loaded, load

_SUFFIXES = {".so": "elf", ".wasm": "wasm", ".o": ""}


@frozen
class Files:
    """What was written. `weights` is None when they are in the library."""

    library: Path
    header: Path
    weights: Path | None


def compile(  # torch_hlo.aot.compile
    program: torch.export.ExportedProgram | torch.nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: str = "host",
    cpu: str | None = None,
    output: str | os.PathLike[str] | None = None,
    name: str | None = None,
    weights: str = "embed",
) -> Files:
    """Compile an exported program, or a module exported with these example arguments, for use
    without Python.

    `target`: "host" (this machine), "x86_64-linux-gnu", "aarch64-linux-gnu" or "wasm32"; `cpu`: the
      processor that is the least to run on
    (default: all of this machine for "host", else the platform's baseline). `output`: the file to
    write, MODEL.so, MODEL.o or MODEL.wasm; default NAME.so or NAME.wasm. NAME.h is written beside
    it and, with `weights="beside"`, NAME.weights. `name`: prefix of the C names; default the
    file's.

    Raises LoweringError or CodegenError naming the operator that cannot be compiled without a host,
    LinkError when there is no linker, ValueError for unknown targets and names.
    """
    if isinstance(program, torch.nn.Module):
        if args is None:
            raise ValueError(
                "aot.compile of a module needs example arguments: aot.compile(model, (x,))"
            )
        program = torch.export.export(
            program, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
        )
    elif args is not None or kwargs is not None or dynamic_shapes is not None:
        raise ValueError(
            "an exported program has its arguments and dynamic shapes: leave args, kwargs and"
            " dynamic_shapes out"
        )
    machine = platform_target(target, cpu)
    output, name = _named(output, name, machine.triple)
    with torch.no_grad():
        found = export.exported(program, "fixed")
    for text in found.unchecked:
        warnings.warn(
            f"{name}: torch.export assumes {text}, which the library does not check",
            stacklevel=2,
        )
    inputs, results = _arrays(found, _result_names(program.call_spec.out_spec))
    built = compile_library(
        found.module,
        name,
        inputs,
        results,
        machine,
        weights=weights,
        conditions=[Condition(*c) for c in found.conditions],
        metadata=_metadata(program, found),
    )
    return write(built, machine.triple, output)


def compile_hlo(
    module: Module,
    *,
    target: str = "host",
    cpu: str | None = None,
    output: str | os.PathLike[str] | None = None,
    name: str | None = None,
    weights: str = "embed",
) -> Files:
    """The same for an HLO module: inputs are called in0, in1, …, outputs out0, out1, …"""
    machine = platform_target(target, cpu)
    output, name = _named(
        output,
        name or (None if output else abi.identifier(module.name)),
        machine.triple,
    )
    return write(
        compile_library(module, name, *describe(module), machine, weights=weights),
        machine.triple,
        output,
    )


def write(built: Library, triple: str, output: Path) -> Files:
    """Link and write a library's files."""
    if output.suffix == ".o":
        output.write_bytes(built.object)
    else:
        names = [
            f"{built.name}_model",
            "torch_hlo_library",
            f"{built.name}_plan",
            f"{built.name}_run",
        ]
        link.library(
            built.object,
            triple,
            output,
            names + [f"{built.name}_check_weights"] * bool(built.weights),
        )
    header = output.with_suffix(".h")
    weights = output.with_suffix(".weights")
    header.write_text(built.header)
    if built.weights:
        weights.write_bytes(built.weights)
    return Files(output, header, weights if built.weights else None)


def _named(
    output: str | os.PathLike[str] | None, name: str | None, triple: str
) -> tuple[Path, str]:
    """The file to write and the C name."""
    kind = "wasm" if triple.startswith("wasm") else "elf"
    if output is None:
        output = f"{name or 'model'}.{'wasm' if kind == 'wasm' else 'so'}"
    output = Path(output)
    if _SUFFIXES.get(output.suffix, "?") not in ("", kind):
        raise ValueError(
            f"output {output.name!r}: for {triple} it must end in"
            f" {'.wasm' if kind == 'wasm' else '.so'} or .o (.wasm is for target wasm32, .so for"
            " the others)"
        )
    name = name if name is not None else abi.identifier(output.stem)
    if name != abi.identifier(name):
        raise ValueError(f"name={name!r} is no C identifier")
    return output, name


def _result_names(spec: pytree.TreeSpec) -> list[str]:
    """A name for each flat result, by where it is: `logits` in a dictionary, `out0` in a tuple."""
    names = []
    for path, _ in pytree.tree_leaves_with_path(
        pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    ):
        parts = [str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in path]
        text = "_".join(parts)
        names.append(f"out{text}" if not text or text[0].isdigit() else text)
    return names


def _arrays(found: export.Exported, names: Sequence[str]) -> tuple[list[Array], list[Array]]:
    """Inputs and outputs of the C interface. Buffers that the program changes are pairs of both,
    with a first value."""
    called = {
        position: name for position, name in zip(found.results, names) if isinstance(position, int)
    }
    inputs = []
    results = []
    given = {v.target: i for i, v in enumerate(found.inputs) if v.kind == "state"}
    given |= {v.name: i for i, v in enumerate(found.inputs) if v.kind == "user"}
    new = {v.target: i for i, v in enumerate(found.outputs) if v.kind in ("state", "mutated")}
    for v, p in zip(found.inputs, found.module.entry.params, strict=True):
        initial = export.data_of(v.value) if v.kind == "state" else None
        kind = {"user": "USER", "state": "STATE", "seed": "SEED"}.get(v.kind)
        if kind is None:
            raise ValueError(f"input {v.name} of kind {v.kind} should have been embedded")
        inputs.append(
            Array(
                v.name,
                p.shape,
                kind,
                new.get(v.target if v.kind == "state" else v.name, -1),
                initial,
            )
        )
    for i, (v, x) in enumerate(zip(found.outputs, found.module.entry.root.operands, strict=True)):
        pair = given[v.target] if v.kind in ("state", "mutated") else -1
        name = called.get(i, v.name) if v.kind == "user" else f"{v.target}.new"
        results.append(Array(name, x.shape, "STATE" if v.kind == "state" else "USER", pair))
    return inputs, results


def _metadata(program: torch.export.ExportedProgram, found: export.Exported) -> dict[str, Any]:
    """What the Python loader needs: how arguments and results are nested, and which are no
    arrays."""

    def flat(values: Sequence[int | tuple[Any]]) -> list[dict[str, Any]]:
        return [{"array": v} if isinstance(v, int) else {"value": _plain(v[0])} for v in values]

    spec = program.call_spec
    return {
        "arguments": flat(found.arguments),
        "results": flat(found.results),
        "in_tree": _tree(spec.in_spec),
        "out_tree": _tree(spec.out_spec),
        "numbers": [i for i, v in enumerate(found.outputs) if v.value is not None],
    }


def _plain(value: object) -> object:
    """A value for JSON; what has no form there is described, and only checked to be present."""
    return (
        value
        if value is None or isinstance(value, (bool, int, float, str))
        else {"text": str(value)}
    )


def _tree(spec: pytree.TreeSpec) -> str | None:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError:
        # a container that its library did not make serialisable: the loader then takes and gives a
        # flat list
        return None


__all__ = [
    "PLATFORMS",
    "Files",
    "LibraryError",
    "LinkError",
    "Loaded",
    "compile",
    "compile_hlo",
    "load",
    "write",
]
