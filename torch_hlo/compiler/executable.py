"""A compiled program as plain data: machine code and what is needed to load and call it. No pickle,
so it is safe to read back.

    data = executable.to_bytes();  Executable.from_bytes(data) == executable
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import astuple
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import DTYPES, Ints, Shape, Size, parse_dim

from .codegen import HostCall
from .codegen.block import FIXED_WORDS, Packing
from .gpu.gpu_program import Kernel, TensorMap

MAGIC = b"torch_hlo executable\0"
VERSION = 10


@frozen
class Executable:
    """`entry(ptr block)`, block = [arena, constants, host callback, failed, symbols…, parameters…,
    outputs…, packings…] (64-bit words).

    `aliases`: (output, parameter) pairs that must be given the same memory. `symbols`: (name,
      parameter, dimension) in block order.
    `arena`: bytes, maybe symbolic. `target`: key of the machine that the code is for. `externals`:
      C symbols the code calls. For a GPU,
    `image` is the device's code (PTX) with the entry points `kernels`,
    which `entry` launches by number;
    `fetches`: it looks at values on the way.
    `exposed`: aliased parameters that may have been overwritten when a host call raises. `buffers`:
      lines about the largest arrays of the arena.
    `packings`: copies of parameters that a run may be given; 0 in the block where it is not.
    """

    name: str
    target: str
    entry: str
    objects: tuple[bytes, ...]
    constants: bytes
    arena: Size
    parameters: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    aliases: tuple[tuple[int, int], ...]
    symbols: tuple[tuple[str, int, int], ...]
    externals: tuple[str, ...]
    host_calls: tuple[HostCall, ...]
    image: bytes = b""
    kernels: tuple[Kernel, ...] = ()
    exposed: Ints = ()
    fetches: bool = False
    buffers: str = ""
    packings: tuple[Packing, ...] = ()

    @property
    def words(self) -> int:
        """Length of the argument block."""
        return (
            FIXED_WORDS
            + len(self.symbols)
            + len(self.parameters)
            + len(self.outputs)
            + len(self.packings)
        )

    def to_bytes(self) -> bytes:
        """magic, version, sha256 of the rest, header length, JSON header, objects, constants,
        image."""
        header = {
            "name": self.name,
            "target": self.target,
            "entry": self.entry,
            "objects": [len(o) for o in self.objects],
            "constants": len(self.constants),
            "arena": str(self.arena),
            "parameters": [_shape_data(s) for s in self.parameters],
            "outputs": [_shape_data(s) for s in self.outputs],
            "aliases": self.aliases,
            "symbols": self.symbols,
            "externals": self.externals,
            "host_calls": [
                [
                    c.name,
                    c.attrs,
                    [_shape_data(s) for s in c.outputs],
                    [_shape_data(s) for s in c.inputs],
                    c.rare,
                ]
                for c in self.host_calls
            ],
            "image": len(self.image),
            "kernels": [_kernel_data(k) for k in self.kernels],
            "exposed": self.exposed,
            "fetches": self.fetches,
            "buffers": self.buffers,
            "packings": [astuple(p) for p in self.packings],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        body = b"".join(
            [
                struct.pack("<Q", len(text)),
                text,
                *self.objects,
                self.constants,
                self.image,
            ]
        )
        return MAGIC + struct.pack("<I", VERSION) + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Executable:
        """Inverse of to_bytes. Raises ValueError on anything that to_bytes of this version did not
        write."""
        start = len(MAGIC) + 36
        if len(data) < start + 8 or not data.startswith(MAGIC):
            raise ValueError("not a compiled torch_hlo program")
        if (version := struct.unpack_from("<I", data, len(MAGIC))[0]) != VERSION:
            raise ValueError(
                f"compiled program has version {version}, this library reads {VERSION}"
            )
        if hashlib.sha256(memoryview(data)[start:]).digest() != data[start - 32 : start]:
            raise ValueError("compiled program is damaged (checksum)")
        try:
            return cls._parse(data, start)
        except (
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            struct.error,
        ) as error:
            raise ValueError(f"compiled program has a bad header: {error}") from None

    @classmethod
    def _parse(cls, data: bytes, start: int) -> Executable:
        (length,) = struct.unpack_from("<Q", data, start)
        at = start + 8
        h = json.loads(data[at : at + length])
        at += length
        sizes = [*h["objects"], h["constants"], h["image"]]
        if any(type(n) is not int or n < 0 for n in sizes) or at + sum(sizes) != len(data):
            raise ValueError("compiled program has a wrong length")
        parts = []
        for n in sizes:
            parts.append(data[at : at + n])
            at += n
        result = cls(
            name=str(h["name"]),
            target=str(h["target"]),
            entry=str(h["entry"]),
            objects=tuple(parts[:-2]),
            constants=parts[-2],
            arena=parse_dim(h["arena"]),
            parameters=tuple(map(_shape, h["parameters"])),
            outputs=tuple(map(_shape, h["outputs"])),
            aliases=tuple((int(o), int(p)) for o, p in h["aliases"]),
            symbols=tuple((str(n), int(p), int(d)) for n, p, d in h["symbols"]),
            externals=tuple(map(str, h["externals"])),
            host_calls=tuple(
                HostCall(str(n), str(a), tuple(map(_shape, o)), tuple(map(_shape, i)), bool(r))
                for n, a, o, i, r in h["host_calls"]
            ),
            image=parts[-1],
            kernels=tuple(map(_kernel, h["kernels"])),
            exposed=tuple(int(p) for p in h["exposed"]),
            fetches=bool(h["fetches"]),
            buffers=str(h["buffers"]),
            packings=tuple(
                Packing(int(p), int(size), str(layout)) for p, size, layout in h["packings"]
            ),
        )
        if any(
            not (0 <= o < len(result.outputs) and 0 <= p < len(result.parameters))
            for o, p in result.aliases
        ):
            raise ValueError("compiled program has aliases out of range")
        return result


def _kernel_data(k: Kernel) -> list[Any]:
    return [
        k.name,
        k.arguments,
        k.threads,
        k.label,
        k.shared,
        [[m.pointer, m.itemsize, m.sizes, m.strides, m.box] for m in k.maps],
    ]


def _kernel(data: list[Any]) -> Kernel:
    name, arguments, threads, label, shared, maps = data
    found = tuple(
        TensorMap(int(p), int(size), *(tuple(map(int, v)) for v in (sizes, strides, box)))
        for p, size, sizes, strides, box in maps
    )
    return Kernel(
        str(name),
        str(arguments),
        int(threads),
        str(label),
        int(shared),
        found,
    )


def _shape_data(shape: Shape) -> list[Any]:
    if shape.is_tuple:
        return ["tuple", [_shape_data(e) for e in shape.elements]]
    return [shape.dtype, [d if isinstance(d, int) else str(d) for d in shape.dims]]


def _shape(data: list[Any]) -> Shape:
    dtype, parts = data
    if dtype == "tuple":
        return Shape("tuple", elements=tuple(map(_shape, parts)))
    if dtype not in DTYPES:
        raise ValueError(f"compiled program names an unknown element type {dtype!r}")
    return Shape(dtype, tuple(d if isinstance(d, int) else parse_dim(d) for d in parts))
