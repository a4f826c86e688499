"""Who has written and read shared memory, and what the others may know of it: data races, unwritten
values and copies in flight are errors.

Every warp counts its time; a synchronization tells the time of some warps to others (vector clocks,
as in FastTrack, Flanagan and Freund 2009). An access is in order when the warp knows a time of the
other's access at or after it happened. Within a warp, lanes are ordered by bar.warp.sync and group
barriers only (PTX ISA, section 9.7.13.3), not by running together."""

from __future__ import annotations

import numpy as np

from test.ptx.memory import Fault

IN_FLIGHT = (1 << 25) - 1  # the time of a copy that nobody has waited for
# lanes: never written; several, or the whole warp; an asynchronous copy
NOBODY, MANY, COPY = -1, 63, -3


class Races:
    """Of the groups of a run. `first access sizes`: memory is watched in units of `unit` bytes, the
    smallest access of the kernel."""

    def __init__(self, groups: int, warps: int, nbytes: int, unit: int) -> None:
        self.groups, self.warps, self.unit = groups, warps, unit
        n = nbytes // unit + 1
        self.write_warp = np.full(n, NOBODY, np.int16)
        self.write_lane = np.full(n, NOBODY, np.int16)
        self.write_time = np.zeros(n, np.int32)
        # of writes that a barrier of the whole group may order
        self.write_epoch = np.full(n, IN_FLIGHT, np.int32)
        self.reads = np.zeros(n * warps, np.int32)  # of every unit by every warp: 64 * time + lane
        # known[g, w, v]: the time of v that w knows
        self.known = np.zeros((groups, warps, warps), np.int32)
        self.known[:, range(warps), range(warps)] = 1
        self.epoch = np.zeros(groups, np.int32)  # barriers of the whole group so far
        # what fence.proxy.async has shown to asynchronous copies and wgmma
        self.fenced = np.zeros((groups, warps), np.int32)

    # -- accesses
    # -------------------------------------------------------------------------------------------------
    def _units(self, place, nbytes: int) -> np.ndarray:
        """[access, unit]"""
        return (np.asarray(place) // self.unit)[:, None] + np.arange(max(nbytes // self.unit, 1))

    @staticmethod
    def _who(frame, lanes):
        group = frame.group
        warp = (frame.tid >> np.uint32(5)).astype(np.int64)
        return (
            group,
            warp,
            (
                (frame.tid & np.uint32(31)).astype(np.int64)
                if lanes is None
                else np.full(len(group), lanes)
            ),
        )

    def _written_before(self, units, group, warp, lane):
        """Whether the last write is known to the warp."""
        writer, time = self.write_warp[units], self.write_time[units]
        own = self.known[group, warp, warp][:, None]
        seen = self.known[group[:, None], warp[:, None], np.maximum(writer, 0)] >= time
        same = writer == warp[:, None]
        return np.where(
            same,
            (self.write_lane[units] == lane[:, None]) & (lane[:, None] != MANY) | (time < own),
            seen,
        ) | (writer == NOBODY)

    def read(self, frame, place, nbytes: int, lanes: int | None = None) -> None:
        """`lanes`: MANY when the warp reads as a whole. Raises Fault."""
        units = self._units(place, nbytes)
        group, warp, lane = self._who(frame, lanes)
        # else the group has met since all of these writes
        if not (self.write_epoch[units] < self.epoch[group][:, None]).all():
            self._check_read(frame, units, group, warp, lane)
        column = units * self.warps + warp[:, None]
        mine = (64 * self.known[group, warp, warp].astype(np.int32) + lane.astype(np.int32))[
            :, None
        ]
        old = self.reads[column]
        if (old >> 6 == mine >> 6).any():
            mine = np.where((old >> 6 == mine >> 6) & (old != mine), mine | MANY, mine)
        self.reads[column] = mine
        lost = self.reads[column] != mine  # threads of this instruction that read one place
        if lost.any():
            self.reads[column[lost]] |= MANY

    def _check_read(self, frame, units, group, warp, lane) -> None:
        missing = (self.write_warp[units] == NOBODY).any(1)
        if missing.any():
            raise Fault("reads shared memory that nobody has written", np.flatnonzero(missing))
        ordered = self._written_before(units, group, warp, lane)
        if not ordered.all():
            self._race("reads", units, ordered)

    def write(self, frame, place, nbytes: int, lanes: int | None = None) -> None:
        """Raises Fault."""
        units = self._units(place, nbytes)
        group, warp, lane = self._who(frame, lanes)
        self._check_write(frame, units, group, warp, lane)
        self._set(units, warp, lane, self.known[group, warp, warp], self.epoch[group])

    def _check_write(self, frame, units, group, warp, lane) -> None:
        ordered = self._written_before(units, group, warp, lane)
        if not ordered.all():
            self._race("writes", units, ordered)
        reads = self.reads.reshape(-1, self.warps)[units]  # [access, unit, warp]
        if not reads.any():
            return
        times = reads >> 6
        known = self.known[group, warp].copy()
        at = np.arange(len(group))
        own = known[at, warp].copy()
        known[at, warp] = IN_FLIGHT  # its own reads are looked at below
        late = times > known[:, None, :]
        mine = reads[at[:, None], np.arange(units.shape[1]), warp[:, None]]
        late_mine = (mine >> 6 >= own[:, None]) & (
            (mine & MANY != lane[:, None]) | (lane[:, None] == MANY)
        )
        wrong = late.any(2) | late_mine
        if wrong.any():
            first = np.argwhere(wrong)[0]
            reader = (
                int(np.argmax(late[tuple(first)]))
                if late[tuple(first)].any()
                else int(warp[first[0]])
            )
            flight = (times[tuple(first)] == IN_FLIGHT).any()
            raise Fault(
                f"writes shared memory that warp {reader} "
                + (
                    "is still reading asynchronously"
                    if flight
                    else "has read, with no barrier in between"
                ),
                np.flatnonzero(wrong.any(1)),
            )

    def _set(self, units, warp, lane, time, epoch=None) -> None:
        shape = units.shape
        self.write_warp[units] = np.broadcast_to(warp[:, None], shape)
        self.write_lane[units] = np.broadcast_to(lane[:, None], shape)
        self.write_time[units] = np.broadcast_to(np.asarray(time)[:, None], shape)
        self.write_epoch[units] = (
            IN_FLIGHT if epoch is None else np.broadcast_to(epoch[:, None], shape)
        )
        self.reads.reshape(-1, self.warps)[units] = 0

    def _race(self, what: str, units, ordered) -> None:
        access, unit = np.argwhere(~ordered)[0]
        at = units[access, unit]
        threads = np.flatnonzero(~ordered.all(1))
        if self.write_time[at] == IN_FLIGHT:
            raise Fault(
                f"{what} shared memory that an asynchronous copy is still writing: nobody has"
                " waited for it",
                threads,
            )
        lane = int(self.write_lane[at])
        who = (
            f"thread {32 * int(self.write_warp[at]) + lane}"
            if lane >= 0
            else f"warp {int(self.write_warp[at])}"
        )
        raise Fault(
            f"{what} shared memory that {who} has written, with no barrier in between",
            threads,
        )

    # -- asynchronous copies
    # --------------------------------------------------------------------------------------
    def start_write(self, frame, place, nbytes: int) -> None:
        """A copy begins to write; until `finish_write` nobody may touch the memory."""
        units = self._units(place, nbytes)
        group, warp, lane = self._who(frame, None)
        self._check_write(frame, units, group, warp, lane)
        self._set(units, warp, np.full(len(warp), COPY), np.full(len(warp), IN_FLIGHT))

    def finish_write(self, frame, place, nbytes: int) -> None:
        """The threads of the frame have waited: it is as if they had written."""
        group, warp, lane = self._who(frame, None)
        self._set(
            self._units(place, nbytes),
            warp,
            lane,
            self.known[group, warp, warp],
            self.epoch[group],
        )

    def start_read(self, frame, units: np.ndarray) -> None:
        """Each thread of the frame begins an asynchronous read of its units [thread, unit]: what it
        sees must be known to the thread, and fenced. Raises Fault."""
        group, warp, lane = self._who(frame, None)
        self._check_read(frame, units, group, warp, lane)
        fenced = (self.write_time[units] <= self.fenced[group[:, None], self.write_warp[units]]) | (
            self.write_lane[units] == COPY
        )
        if not fenced.all():
            raise Fault(
                "reads asynchronously what was written without a fence.proxy.async since",
                np.flatnonzero(~fenced.all(1)),
            )
        self.reads[units * self.warps + warp[:, None]] = 64 * IN_FLIGHT + MANY

    def finish_read(self, group: int, warp: int, units: np.ndarray) -> None:
        column = units * self.warps + warp
        mine = column[self.reads[column] >> 6 == IN_FLIGHT]
        self.reads[mine] = 64 * self.known[group, warp, warp] + MANY

    # -- synchronization
    # ------------------------------------------------------------------------------------------
    def barrier(self, group: np.ndarray, warp: np.ndarray) -> None:
        """These warps (pairs of numbers, each once) of every group have met."""
        if len(group) == self.groups * self.warps:
            self.known[:] = self.known.max(axis=1, keepdims=True)
            self.known[:, range(self.warps), range(self.warps)] += 1
            self.epoch += 1
            return
        for g in np.unique(group):
            w = warp[group == g]
            self.known[g, w] = self.known[g, w].max(axis=0)
            self.known[g, w, w] += 1
            self.epoch[g] += len(w) == self.warps

    def tick(self, group: np.ndarray, warp: np.ndarray) -> None:
        """The lanes of these warps have met."""
        self.known[group, warp, warp] += 1

    def fence(self, group: np.ndarray, warp: np.ndarray) -> None:
        """fence.proxy.async by threads of these warps: what they know of is visible to asynchronous
        accesses."""
        np.maximum.at(self.fenced, group, self.known[group, warp])
        self.tick(group, warp)
