"""Tensor maps (CUtensorMap): what bulk tensor copies know of an array in global memory (PTX ISA,
section 5.5; driver API, cuTensorMapEncodeTiled).

    # 128 bytes, for a kernel's parameter or global memory
    blob = encode_tiled(FLOAT32, address, sizes, strides, box)

NVIDIA's own encoding is not documented; this one is read by this package only. The checks are those
that the driver's documentation lists.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from test.ptx.memory import Fault, swizzled

# CUtensorMapDataType -> bytes of an element
(
    UINT8,
    UINT16,
    UINT32,
    INT32,
    UINT64,
    INT64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT32_FTZ,
    TFLOAT32,
    TFLOAT32_FTZ,
) = range(13)
_BYTES = {
    UINT8: 1,
    UINT16: 2,
    UINT32: 4,
    INT32: 4,
    UINT64: 8,
    INT64: 8,
    FLOAT16: 2,
    FLOAT32: 4,
    FLOAT64: 8,
    BFLOAT16: 2,
    FLOAT32_FTZ: 4,
    TFLOAT32: 4,
    TFLOAT32_FTZ: 4,
}
SWIZZLE_UNITS = (
    1,
    2,
    4,
    8,
)  # CUtensorMapSwizzle (none, 32, 64, 128 bytes) -> units of 16 bytes
NBYTES, ALIGNMENT = 128, 64
_MAGIC, _FORMAT = b"tmap", "<4s4BQ5I4Q5H5B"


def encode_tiled(
    dtype: int,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] = (),
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    fill: int = 0,
) -> bytes:
    """The map of an array of 1 to 5 dimensions. `sizes`, `box`, `element_strides`: elements,
    innermost dimension first; `strides`: bytes between neighbours, of all dimensions but the
    innermost; `fill` 1: NaN outside of the array. Raises ValueError as the driver refuses."""
    rank, size = len(sizes), _BYTES.get(dtype)
    element_strides = tuple(element_strides) or (1,) * rank
    inner = box[0] * size if size and box else 0
    problems = {
        "an unknown element type": size is None,
        "1 to 5 dimensions": not 1 <= rank <= 5,
        "as many boxes and element strides as sizes": not len(box) == len(element_strides) == rank,
        "one stride less than sizes": len(strides) != rank - 1,
        "an address that is a multiple of 16": address % 16,
        "sizes from 1 to 2**32": any(not 1 <= s <= 1 << 32 for s in sizes),
        "strides that are multiples of 16 below 2**40": any(
            s % 16 or not 0 <= s < 1 << 40 for s in strides
        ),
        "boxes from 1 to 256": any(not 1 <= b <= 256 for b in box),
        "element strides from 1 to 8": any(not 1 <= s <= 8 for s in element_strides),
        "no interleaving": interleave,
        "a known swizzle": not 0 <= swizzle < 4,
        "an inner box of a multiple of 16 bytes": inner % 16,
        "an inner box no wider than the swizzle": (
            swizzle and inner > 16 * SWIZZLE_UNITS[swizzle & 3]
        ),
    }
    for wanted, wrong in problems.items():
        if wrong:
            raise ValueError(
                f"tensor map: {wanted}; sizes {tuple(sizes)}, strides {tuple(strides)}, box"
                f" {tuple(box)}, address {address:#x}"
            )
    pad = lambda values, n, by=0: (*values, *(by,) * (n - len(values)))
    blob = struct.pack(
        _FORMAT,
        _MAGIC,
        dtype,
        rank,
        swizzle,
        fill,
        address,
        *pad([s - 1 for s in sizes], 5),
        *pad(strides, 4),
        *pad(box, 5, 1),
        *pad(element_strides, 5, 1),
    )
    return blob.ljust(NBYTES, b"\0")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A decoded map; dimensions innermost first."""

    itemsize: int
    swizzle: int
    nan: bool
    address: int
    sizes: np.ndarray
    strides: np.ndarray
    box: tuple[int, ...]
    steps: np.ndarray

    @staticmethod
    def at(run, address: int) -> TensorMap:
        """Raises Fault when there is none at this generic address."""
        where = np.array([address])
        if address % ALIGNMENT:
            raise Fault(f"the tensor map at {address:#x} is not aligned to {ALIGNMENT} bytes")
        run.memory.check(where, NBYTES)
        raw = run.memory.load(None, address + np.arange(NBYTES), 1, 1)[0].tobytes()
        magic, dtype, rank, swizzle, fill, base, *rest = struct.unpack_from(_FORMAT, raw)
        if magic != _MAGIC:
            raise Fault(f"there is no tensor map at {address:#x}")
        sizes, strides, box, steps = (
            rest[:rank],
            rest[5 : 5 + rank - 1],
            rest[9 : 9 + rank],
            rest[14 : 14 + rank],
        )
        return TensorMap(
            _BYTES[dtype],
            swizzle,
            bool(fill),
            base,
            np.array(sizes) + 1,
            np.array([_BYTES[dtype], *strides]),
            tuple(box),
            np.array(steps),
        )

    def _elements(
        self, corner: np.ndarray, start: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(address, whether it is inside of the array, offset from the shared address `start`) of
        every element of a box, in order."""
        if len(corner) != len(self.sizes):
            raise Fault(
                f"{len(corner)} coordinates for a tensor map of {len(self.sizes)} dimensions"
            )
        if start % 128:
            raise Fault(f"the shared address {start:#x} of a tensor copy is not a multiple of 128")
        counts = [-(-b // int(s)) for b, s in zip(self.box, self.steps, strict=True)]
        # innermost first
        index = np.stack(
            np.unravel_index(np.arange(int(np.prod(counts))), counts[::-1])[::-1],
            axis=-1,
        )
        at = corner + index * self.steps
        inside = ((at >= 0) & (at < self.sizes)).all(axis=1)
        linear = start + np.arange(len(at)) * self.itemsize
        return (
            self.address + (at * self.strides).sum(axis=1),
            inside,
            swizzled(linear, SWIZZLE_UNITS[self.swizzle]) - start,
        )

    def _bytes(self, first: np.ndarray) -> np.ndarray:
        return (first[:, None] + np.arange(self.itemsize)).ravel()

    def load(self, run, corner: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """(bytes of the box whose first element is `corner`, their offsets from the shared address
        `start`); zeros or NaN outside of the array."""
        address, inside, offsets = self._elements(corner, start)
        data = np.full((len(address), self.itemsize), 0xFF if self.nan else 0, np.uint8)
        if inside.any():
            where = self._bytes(address[inside])
            run.memory.check(where, 1)
            data[inside] = run.memory.load(None, where, 1, 1)[0].reshape(-1, self.itemsize)
        return data.ravel(), self._bytes(offsets)

    def store(self, run, corner: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """(addresses, offsets from the shared address `start`) of the bytes of the box that are
        inside of the array."""
        address, inside, offsets = self._elements(corner, start)
        return self._bytes(address[inside]), self._bytes(offsets[inside])
