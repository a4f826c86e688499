"""Races in global memory during one launch: nothing orders groups of threads, and within a group
barriers do (see races.py for the clocks).

Reads are remembered as one reader, one warp, one group or several; when several warps have read,
only a barrier of the whole group since then makes a write safe. Writing the value that is there
already is no harm. Atomic, volatile, relaxed, acquire and release accesses are synchronization, and
not looked at."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from test.ptx.memory import Fault
from test.ptx.races import NOBODY

MANY = -2
_FIELDS = (
    "write_group",
    "write_warp",
    "write_lane",
    "write_time",
    "read_group",
    "read_warp",
    "read_lane",
    "read_time",
    "read_epoch",
)


class Shadow:
    """What happened to the units (of `unit` bytes) of one array."""

    def __init__(self, nbytes: int, unit: int) -> None:
        self.unit = unit
        for name in _FIELDS:
            setattr(self, name, np.full(nbytes // unit + 1, NOBODY, np.int32))

    def split(self, unit: int) -> None:
        """Watch smaller units from now on."""
        for name in _FIELDS:
            setattr(self, name, np.repeat(getattr(self, name), self.unit // unit))
        self.unit = unit


class GlobalRaces:
    """Of one launch."""

    def __init__(self, memory) -> None:
        self.memory = memory
        self.shadows: dict[int, Shadow] = {}

    def _parts(self, address, nbytes: int, unit: int):
        """(shadow, which accesses, their units [access, unit]) for every array."""
        address = np.atleast_1d(address)
        starts, ends = self.memory.starts, self.memory.ends
        low = bisect_right(starts, int(address.min())) - 1
        if int(address.max()) < ends[low]:
            blocks = [(low, slice(None))]
        else:
            block = np.searchsorted(starts, address, "right") - 1
            blocks = [(int(b), np.flatnonzero(block == b)) for b in np.unique(block)]
        for b, which in blocks:
            shadow = self.shadows.get(starts[b])
            if shadow is None:
                shadow = self.shadows[starts[b]] = Shadow(ends[b] - starts[b], min(unit, 4))
            if shadow.unit > unit:
                shadow.split(unit)
            yield (
                shadow,
                which,
                ((address[which] - starts[b]) // shadow.unit)[:, None]
                + np.arange(nbytes // shadow.unit),
            )

    @staticmethod
    def _who(frame, which):
        group, warp = (
            frame.group[which],
            (frame.tid[which] >> np.uint32(5)).astype(np.int64),
        )
        return (
            group,
            frame.ctaid[which].astype(np.int64),
            warp,
            (frame.tid[which] & np.uint32(31)).astype(np.int64),
        )

    def _after_writes(self, known, s: Shadow, units, group, number, warp, lane) -> np.ndarray:
        """Whether the last write of every unit is known to the access."""
        writer = s.write_group[units]
        if (writer == NOBODY).all():
            return np.ones(units.shape, bool)
        w, time = s.write_warp[units], s.write_time[units]
        own = known[group, warp, warp][:, None]
        seen = known[group[:, None], warp[:, None], np.clip(w, 0, known.shape[1] - 1)] >= time
        inside = np.where(
            w == warp[:, None],
            (s.write_lane[units] == lane[:, None]) | (time < own),
            seen,
        )
        return (writer == NOBODY) | (writer == number[:, None]) & inside

    def read(self, frame, address, nbytes: int, unit: int) -> None:
        """Raises Fault."""
        if not np.ndim(address):  # all threads read one place: one of them stands for the others
            self._read(
                frame,
                np.array([address]),
                nbytes,
                unit,
                slice(0, 1),
                everybody=len(frame) > 1,
            )
        else:
            self._read(frame, address, nbytes, unit, None, False)

    def _read(self, frame, address, nbytes, unit, only, everybody) -> None:
        races = frame.run.races
        for s, which, units in self._parts(address, nbytes, unit):
            group, number, warp, lane = self._who(frame, which if only is None else only)
            ordered = self._after_writes(races.known, s, units, group, number, warp, lane)
            if not ordered.all():
                self._fault("reads", s, units, ordered, number)
            now = {"read_group": number, "read_warp": warp, "read_lane": lane}
            fresh = s.read_group[units] == NOBODY
            old = {name: getattr(s, name)[units] for name in now}
            for name, value in now.items():
                value = np.broadcast_to(value[:, None], units.shape)
                getattr(s, name)[units] = np.where(fresh | (old[name] == value), value, MANY)
            for (
                name,
                value,
            ) in now.items():  # threads of this instruction that read one place
                value = np.broadcast_to(value[:, None], units.shape)
                got = getattr(s, name)
                lost = (got[units] != value) & (got[units] != MANY)
                if lost.any():
                    got[units[lost]] = MANY
            s.read_time[units] = np.broadcast_to(
                races.known[group, warp, warp][:, None], units.shape
            )
            s.read_epoch[units] = np.broadcast_to(races.epoch[group][:, None], units.shape)
            if everybody:
                s.read_lane[units] = MANY
                if len(frame) > 32:
                    s.read_warp[units] = MANY
                if frame.group[0] != frame.group[-1]:
                    s.read_group[units] = MANY

    def write(self, frame, address, nbytes: int, unit: int, unchanged) -> None:
        """`unchanged()`: which accesses write what is there already. Raises Fault."""
        races = frame.run.races
        for s, which, units in self._parts(address, nbytes, unit):
            group, number, warp, lane = self._who(frame, which)
            ordered = self._after_writes(races.known, s, units, group, number, warp, lane)
            reader = s.read_group[units]
            if (reader != NOBODY).any():
                same_warp = s.read_warp[units] == warp[:, None]
                inside = np.where(
                    same_warp,
                    (s.read_lane[units] == lane[:, None])
                    | (s.read_time[units] < races.known[group, warp, warp][:, None]),
                    s.read_epoch[units] < races.epoch[group][:, None],
                )
                # one other warp: its clock says more than the count of barriers
                known = s.read_warp[units] >= 0
                theirs = (
                    races.known[
                        group[:, None],
                        warp[:, None],
                        np.clip(s.read_warp[units], 0, races.warps - 1),
                    ]
                    >= s.read_time[units] + 1
                )
                inside = inside | known & ~same_warp & theirs
                late = ~((reader == NOBODY) | (reader == number[:, None]) & inside)
                if late.any() and (bad := late.any(1) & ~unchanged()[which]).any():
                    first = units[bad][late[bad]][0]
                    who = (
                        f"group {s.read_group[first]}"
                        if s.read_group[first] >= 0
                        else "several groups"
                    )
                    raise Fault(
                        f"writes global memory that {who} {'have' if who[0] == 's' else 'has'} read"
                        " in this launch, with no barrier in between",
                        self._threads(which, bad),
                    )
            if not ordered.all() and (bad := ~ordered.all(1) & ~unchanged()[which]).any():
                self._fault(
                    "writes",
                    s,
                    units[bad],
                    ordered[bad],
                    number[bad],
                    self._threads(which, bad),
                )
            shape = units.shape
            for name, value in (
                ("write_group", number),
                ("write_warp", warp),
                ("write_lane", lane),
                ("write_time", races.known[group, warp, warp]),
            ):
                getattr(s, name)[units] = np.broadcast_to(value[:, None], shape)
            s.read_group[units] = NOBODY

    @staticmethod
    def _threads(which, bad) -> np.ndarray:
        return np.flatnonzero(bad) if isinstance(which, slice) else which[bad]

    @staticmethod
    def _fault(verb: str, s: Shadow, units, ordered, number, threads=None) -> None:
        access, unit = np.argwhere(~ordered)[0]
        at = units[access, unit]
        who = f"thread {32 * s.write_warp[at] + s.write_lane[at]}" + (
            "" if s.write_group[at] == number[access] else f" of group {s.write_group[at]}"
        )
        raise Fault(
            f"{verb} global memory that {who} has written in this launch, with no barrier in"
            " between",
            np.flatnonzero(~ordered.all(1)) if threads is None else threads,
        )
