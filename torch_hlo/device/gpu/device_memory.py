"""Memory of a GPU: arrays that are on the device, on the host, or on both, and the blocks that
programs work in.

Everything of one device runs on one stream in order, so a block that is freed may be handed out
again at once."""

from __future__ import annotations

from typing import Self

import numpy as np

from ..memory import EXIT, Memory, Pool
from .driver import Driver


class DevicePool(Pool):
    """Free blocks of one device by size class, and the arena that its programs work in one after
    the other."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.driver = driver
        self._arena: Block | None = None

    def arena(self, nbytes: int) -> Block:
        """Working memory of at least `nbytes`, to be held while a program is started: everybody
        gets the same block until it is too small."""
        with self.lock:
            arena = self._arena
            if arena is None or arena.size < nbytes:
                self._arena = None  # what it is replaced by may need the room
                del arena
                arena = self._arena = Block(self, nbytes)
            return arena

    def trim(self) -> None:
        self._arena = None
        super().trim()

    def _allocate(self, size: int) -> tuple[None, int]:
        return None, self.driver.allocate(size)

    def _release(self, block: tuple[object, int]) -> None:
        # Not a finalizer of the block: the collector would call it for blocks that their owner's
        # finalizer has just given back.
        if not EXIT.begun:
            self.driver.free(block[1])


class Block:
    """A block of a pool, given back with this object."""

    __slots__ = ("pool", "size", "block")

    def __init__(self, pool: DevicePool, nbytes: int) -> None:
        self.pool = pool
        self.size = 0
        self.size, self.block = pool.take(nbytes)

    @property
    def address(self) -> int:
        return self.block[1]

    def __del__(self) -> None:
        if self.size:
            self.pool.give(self.size, self.block)


class DeviceMemory(Memory):
    """Contents that are on the device, on the host, or on both (the pool's lock guards which).
    Looking at `array` or `address` brings them to the host, and counts as writing there unless
    `readers` says that somebody only reads. `ready`: the address on the device while they are
    there and nowhere else, else 0: most arrays of most steps need no call."""

    __slots__ = ("nbytes", "ready", "_pool", "_block", "_host", "_current", "_lock")

    def __init__(self, nbytes: int, pool: DevicePool) -> None:
        self.readers = 0
        self.size = 0
        self.owner = None
        self.nbytes = nbytes
        self.ready = 0
        self._host: Memory | None = None
        self._current = "none"  # where the contents are: none, host, device, both
        self._pool = pool
        self._lock = pool.lock  # the CPU's pool may be entered under it, and the driver
        self.size, self._block = pool.take(nbytes)

    @classmethod
    def adopted(cls, address: int, nbytes: int, owner: object, pool: DevicePool) -> Self:
        """See Backend.adopt."""
        self = cls.__new__(cls)
        self.readers = 1
        self.size = 0
        self.nbytes = nbytes
        self.owner = owner
        self._host = None
        self._current = "device"
        self.ready = address
        self._pool = pool
        self._block = (None, address)
        self._lock = pool.lock
        return self

    def __del__(self) -> None:
        if self.size:
            self._pool.give(self.size, self._block)
        elif self.owner is not None and not EXIT.begun:
            # a program may be reading what its owner is about to use again
            self._pool.driver.synchronize()

    @property
    def device_address(self) -> int:
        """Where a program reads the contents."""
        if self._current != "host":
            return self._block[1]
        with self._lock:
            if self._current == "host":
                self._upload()
                self._current = "both" if self.readers else "device"
                if not self.readers:
                    self._host = None
                    self.ready = self._block[1]
            return self._block[1]

    def written(self) -> int:
        """Where a program writes; what was here before is gone."""
        if not self.ready:
            with self._lock:
                self._current = "device"
                self._host = None
                self.ready = self._block[1]
        return self.ready

    def _to_host(self) -> Memory:
        with self._lock:
            if self._host is None:
                self.ready = 0
                self._host = self._host_memory()
            if self._current == "device":
                self._pool.driver.download(self._host.address, self._block[1], self.nbytes)
                self._current = "both"
            if not self.readers:
                if self._current == "both":
                    self._pool.driver.synchronize()  # it may be on its way to the device
                self._current = "host"
            return self._host

    def _host_memory(self) -> Memory:
        return Memory(self.nbytes)

    def _upload(self) -> None:
        """Bring the host's contents to the device."""
        self._pool.driver.upload(self._block[1], self._host.address, self.nbytes)

    def copy(self, nbytes: int) -> Self:
        other = type(self)(nbytes, self._pool)
        source = self.device_address
        other._pool.driver.copy(other.written(), source, nbytes)
        return other

    @property
    def array(self) -> np.ndarray:
        return self._to_host().array

    @property
    def address(self) -> int:
        return self._to_host().address
