"""Running compiled WebAssembly modules under wasmtime, with the structures that abi.py describes
laid out for 32-bit pointers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import wasmtime

from torch_hlo.aot.loaded import _CODE, _TORCH


class WasmModel:
    """A module with a model called `name`. Memory is taken from __heap_base on and never given
    back."""

    def __init__(self, path, name: str) -> None:
        engine = wasmtime.Engine()
        self.store = wasmtime.Store(engine)
        module = wasmtime.Module.from_file(engine, str(path))
        assert not module.imports, [i.name for i in module.imports]
        self.exports = wasmtime.Instance(self.store, module, []).exports(self.store)
        self.memory, self.name = self.exports["memory"], name
        self.top = self.exports["__heap_base"].value(self.store)

    def allocate(self, nbytes: int, data: bytes = b"") -> int:
        at = (self.top + 63) & ~63
        self.top = at + nbytes
        missing = self.top - self.memory.data_len(self.store)
        if missing > 0:
            self.memory.grow(self.store, -(-missing // 65536))
        self.memory.write(self.store, data, at)
        return at

    def read(self, at: int, nbytes: int) -> bytearray:
        return self.memory.read(self.store, at, at + nbytes)

    def tensors(self, rows: Sequence[tuple[int, int, int, int, int]]) -> int:
        """An array of torch_hlo_tensor: (data, nbytes, sizes, dtype, rank)."""
        return self.allocate(
            32 * len(rows), b"".join(struct.pack("<I4xQIii4x", *row) for row in rows)
        )

    def output_info(self, i: int) -> tuple[int, int]:
        """dtype and rank, from the model's table of outputs."""
        model = self.exports[f"{self.name}_model"].value(self.store)
        table = struct.unpack("<I", self.read(model + 24, 4))[0]
        return struct.unpack("<ii", self.read(table + 28 * i + 12, 8))

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        error, need = self.allocate(256), self.allocate(8)
        rows = []
        for t in args:
            data = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())
            rows.append(
                (
                    self.allocate(len(data), data),
                    len(data),
                    self.allocate(8 * t.dim(), struct.pack(f"<{t.dim()}q", *t.shape)),
                    _CODE[t.dtype],
                    t.dim(),
                )
            )
        inputs = self.tensors(rows)
        count = struct.unpack(
            "<i", self.read(self.exports[f"{self.name}_model"].value(self.store) + 8, 4)
        )[0]
        infos = [self.output_info(i) for i in range(count)]
        outputs = self.tensors([(0, 0, self.allocate(8 * rank), 0, 0) for _, rank in infos])
        self.check(
            self.exports[f"{self.name}_plan"](
                self.store, inputs, len(args), outputs, count, need, error
            ),
            error,
        )
        results = []
        for i, (dtype, rank) in enumerate(infos):
            _, nbytes, sizes, _, _ = struct.unpack("<I4xQIii4x", self.read(outputs + 32 * i, 32))
            shape = struct.unpack(f"<{rank}q", self.read(sizes, 8 * rank))
            at = self.allocate(nbytes)
            self.memory.write(self.store, struct.pack("<I", at), outputs + 32 * i)
            results.append((at, nbytes, shape, _TORCH[dtype]))
        workspace = struct.unpack("<Q", self.read(need, 8))[0]
        run = self.exports[f"{self.name}_run"]
        self.check(
            run(
                self.store,
                inputs,
                len(args),
                outputs,
                count,
                self.allocate(workspace),
                workspace,
                0,
                0,
                error,
            ),
            error,
        )
        return [
            (
                torch.frombuffer(bytearray(self.read(at, n)), dtype=d).reshape(s)
                if n
                else torch.empty(s, dtype=d)
            )
            for at, n, s, d in results
        ]

    def check(self, code: int, error: int) -> None:
        if code:
            raise RuntimeError(self.read(error + 4, 252).split(b"\0")[0].decode())
