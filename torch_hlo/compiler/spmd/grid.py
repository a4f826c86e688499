"""The devices of a mesh as a grid of prime-sized axes.

    grid = Grid.of(Mesh((("x", 2), ("y", 4))))        # atoms 0: x, 1: y:(1)2, 2: y:(2)2
    grid.layout(sharding)                             # ((0,), (1, 2)): per dimension the atoms that
                                                      # split it, major first

Every axis and sub-axis of a sharding is a run of atoms, so that moving part of an axis from one
dimension to another (an all-to-all in groups of two among eight devices, say) needs no concept of
its own.
"""

import math
from collections.abc import Iterable
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np

from torch_hlo.hlo.ir import Instruction, Ints, build as h, ceildiv, instr
from torch_hlo.hlo.sharding.sharding import (
    Axis,
    DimSharding,
    Mesh,
    Sharding,
    ShardingError,
    simplify,
)

# of an instruction, nested as its shape is
ShardingTree: TypeAlias = "Sharding | tuple[ShardingTree, ...] | None"
Atoms = Ints
Layout = tuple[Atoms, ...]  # per dimension the atoms that split it, major first


class Grid:
    """`sizes[a]`: number of devices along atom `a`. Partition ids are device ids."""

    def __init__(self, mesh: Mesh, cuts: Iterable[Axis] = ()) -> None:
        """`cuts`: sub-axes that must be expressible. Raises ShardingError when two of them cut an
        axis across each other."""
        self.mesh = mesh
        self.sizes: list[int] = []
        # (axis name, size of what is major to it) -> atom
        self._first: dict[tuple[str, int], int] = {}
        cuts = tuple(cuts)
        for name, size in mesh.axes:
            marks = sorted(
                {1, size} | {m for c in cuts if c.name == name for m in (c.pre, c.pre * c.size)}
            )
            for a, b in zip(marks, marks[1:]):
                if b % a:
                    raise ShardingError(
                        f"sub-axes of {name} (size {size}) cut it after {a} and after {b} devices,"
                        " which do not nest"
                    )
                for prime in _primes(b // a):
                    self._first[name, a] = len(self.sizes)
                    self.sizes.append(prime)
                    a *= prime
        order = np.array(mesh.devices or range(mesh.size)).reshape(self.sizes)
        self._coordinates = np.empty((mesh.size, len(self.sizes)), np.int64)
        for at in np.ndindex(*self.sizes):
            self._coordinates[order[at]] = at
        # what is asked again and again
        self.layout = cache(self._layout)
        self.indices = cache(self._indices)
        self.groups = cache(self._groups)

    @cached_property
    def atoms(self) -> frozenset[int]:
        return frozenset(range(len(self.sizes)))

    @property
    def devices(self) -> int:
        return self.mesh.size

    def atoms_of(self, axes: Iterable[Axis]) -> Atoms:
        found: list[int] = []
        for axis in axes:
            done = 1
            pre = axis.pre
            while done < axis.size:
                atom = self._first[axis.name, pre]
                found.append(atom)
                done = done * self.sizes[atom]
                pre = pre * self.sizes[atom]
        return tuple(found)

    def _layout(self, sharding: Sharding) -> Layout:
        return tuple(self.atoms_of(d.axes) for d in sharding.dims)

    @cached_property
    def _axes(self) -> list[Axis]:
        """Of each atom."""
        ordered = sorted(self._first.items(), key=lambda e: e[1])
        return [Axis(name, pre, self.sizes[a]) for (name, pre), a in ordered]

    def sharding(self, layout: Layout, partial: Atoms = ()) -> Sharding:
        """The layout in terms of the mesh's axes; unreduced along `partial`."""
        return Sharding(
            self.mesh,
            tuple(DimSharding(simplify(self._axes[a] for a in atoms)) for atoms in layout),
            unreduced=simplify(self._axes[a] for a in partial),
        )

    def parts(self, atoms: Iterable[int]) -> int:
        """Number of blocks of a dimension split over `atoms`."""
        return math.prod([self.sizes[a] for a in atoms])

    def block(self, dims: Ints, layout: Layout) -> Ints:
        """Extents of one device's block; uneven dimensions are padded at their end."""
        return tuple(
            ceildiv(n, self.parts(atoms)) if atoms else n
            for n, atoms in zip(dims, layout, strict=True)
        )

    def _indices(self, atoms: Atoms) -> Ints:
        """For every device the index of its block of a dimension split over `atoms`."""
        total = np.zeros(self.devices, np.int64)
        for a in atoms:
            total = total * self.sizes[a] + self._coordinates[:, a]
        return tuple(total.tolist())

    def _groups(self, atoms: Atoms) -> tuple[Ints, ...]:
        """Devices that differ only along `atoms`, in order of their index along them: the
        replica_groups of a collective."""
        rest = self.indices(tuple(a for a in range(len(self.sizes)) if a not in atoms))
        members: dict[int, list[tuple[int, int]]] = {}
        for device, (place, group) in enumerate(zip(self.indices(atoms), rest)):
            members.setdefault(group, []).append((place, device))
        return tuple(tuple(d for _, d in sorted(m)) for _, m in sorted(members.items()))

    def table(self, values: Iterable[int]) -> Instruction:
        """s32[]: the value of the device that runs the program; `values` has one entry per
        device."""
        values = tuple(values)
        if len(set(values)) == 1:
            return h.constant(values[0], "s32")
        row = h.dynamic_slice(
            h.constant(np.array(values, np.int32), "s32"),
            [instr("partition-id")],
            (1,),
        )
        return h.reshape(row, ())


def _primes(n: int) -> list[int]:
    found = []
    p = 2
    while n > 1:
        if n % p:
            p += 1
        else:
            found.append(p)
            n //= p
    return found
