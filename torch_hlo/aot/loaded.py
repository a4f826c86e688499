"""Compiled libraries as Python functions of tensors."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hlo.compiler.aot.abi import DTYPE_CODES
from torch_hlo.device.buffer import ARENAS
from torch_hlo.device.library import Array, Library, LibraryError
from torch_hlo.hlo.ir import DTYPES, Ints

_TORCH = {
    DTYPE_CODES[d.name]: getattr(torch, d.torch)
    for d in DTYPES.values()
    if d.torch and d.name in DTYPE_CODES
}
_PLANS = 1000  # sizes whose plans are remembered
_CODE = {dtype: code for code, dtype in _TORCH.items()}


def load(path: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None) -> Loaded:
    """The library in `path`; `weights`: its weights file, if it has one (default: beside it).
    Raises OSError, LibraryError."""
    return Loaded(Library(path, weights))


class Loaded:
    """A model: call it as the module that was compiled. `state`: its buffers that calls change, by
    name; they can be read and assigned.

    Calls from several threads are fine as long as the model has no state.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.name = library.name
        meta = library.metadata
        self._arguments = meta.get("arguments")
        self._results = meta.get("results")
        self._in_tree, self._out_tree = (
            pytree.treespec_loads(meta[k]) if meta.get(k) else None for k in ("in_tree", "out_tree")
        )
        self._plans: dict[tuple[object, ...], tuple[list[Ints], int]] = {}
        self.state: dict[str, Tensor] = {
            a.name: _initial(a) for a in library.inputs if a.kind == "state"
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Results as the module returns them; new tensors. Raises TypeError and LibraryError for
        arguments that do not fit."""
        given = self._given(args, kwargs)
        tensors = [self._input(i, a, given) for i, a in enumerate(self.library.inputs)]
        dtypes = [_CODE[t.dtype] for t in tensors]
        shapes = [t.shape for t in tensors]
        key = (*dtypes, *shapes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[key] = self.library.plan(shapes, dtypes)
        sizes, workspace_bytes = plan
        outputs = [
            torch.empty(s, dtype=_TORCH[a.dtype])
            for s, a in zip(sizes, self.library.outputs, strict=True)
        ]
        workspace = ARENAS.borrow(workspace_bytes)
        try:
            self.library.run(
                [_memory(t) for t in tensors],
                [_memory(t) for t in outputs],
                (workspace.address, workspace.nbytes),
                dtypes,
            )
        finally:
            ARENAS.give_back(workspace)
        return self._returned(given, outputs)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
        """Tensors by the number of their input."""
        if self._arguments is None:
            return dict(enumerate(pytree.tree_leaves((args, kwargs))))
        flat, tree = pytree.tree_flatten((args, kwargs))
        if self._in_tree is not None and tree != self._in_tree:
            names = (
                list(self._in_tree.child(1).context or [])
                if self._in_tree.num_children == 2
                else []
            )
            if kwargs.keys() == set(names):  # the order in which keywords are given does not matter
                flat, tree = pytree.tree_flatten((args, {k: kwargs[k] for k in names}))
            if tree != self._in_tree:
                raise TypeError(
                    f"{self.name} takes arguments nested as {self._in_tree}, got {tree}"
                )
        if len(flat) != len(self._arguments):
            raise TypeError(f"{self.name} takes {len(self._arguments)} values, got {len(flat)}")
        found = {}
        for position, (value, argument) in enumerate(zip(flat, self._arguments, strict=True)):
            if "array" in argument:
                found[argument["array"]] = value
            elif not isinstance(argument["value"], dict) and value != argument["value"]:
                raise TypeError(
                    f"{self.name} was compiled for the value {argument['value']!r} of argument"
                    f" {position}, got {value!r}"
                )
        return found

    def _input(self, i: int, a: Array, given: dict[int, Tensor]) -> Tensor:
        if a.kind == "state":
            return self.state[a.name].contiguous()
        if a.kind == "seed" and i not in given:
            return torch.randint(-(2**63), 2**63 - 1, ())
        if i not in given:
            raise TypeError(f"{self.name}: input {i} ({a.name}) is missing")
        value = given[i]
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=_TORCH[a.dtype])
        if value.dtype not in _CODE:
            raise TypeError(
                f"{self.name}: input {i} ({a.name}) is {value.dtype}, it must be {_TORCH[a.dtype]}"
            )
        if value.is_contiguous() and value.is_cpu and not value.is_conj() and not value.is_neg():
            return value
        return value.detach().cpu().resolve_conj().resolve_neg().contiguous()

    def _returned(self, given: dict[int, Tensor], outputs: list[Tensor]) -> Any:
        for a, value in zip(self.library.outputs, outputs, strict=True):
            if a.pair >= 0:
                source = self.library.inputs[a.pair]
                if source.kind == "state":
                    self.state[source.name] = value
                else:
                    given[a.pair].detach().copy_(value)
        if self._results is None:
            return outputs
        numbers = set(self.library.metadata.get("numbers", ()))
        flat = [
            (
                r["value"]
                if "value" in r
                else outputs[r["array"]].item()
                if r["array"] in numbers
                else outputs[r["array"]]
            )
            for r in self._results
        ]
        return pytree.tree_unflatten(flat, self._out_tree) if self._out_tree is not None else flat


def _initial(a: Array) -> Tensor:
    """The first value of a state."""
    result = torch.empty(a.sizes, dtype=_TORCH[a.dtype])
    return (
        torch.frombuffer(a.first_value(result.nbytes), dtype=result.dtype).reshape(result.shape)
        if result.numel()
        else result
    )


def _memory(t: Tensor) -> tuple[int, int, torch.Size]:
    return t.data_ptr(), t.nbytes, t.shape


__all__ = ["Library", "LibraryError", "Loaded", "load"]
