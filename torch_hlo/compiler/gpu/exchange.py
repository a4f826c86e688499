"""Values of other threads of a group: by shuffles inside a warp, through shared memory between
warps.

Shared slots belong to a thread each: it writes its own and reads another's, between two barriers.
"""

from collections.abc import Iterator, Sequence

from ..llvm import BITS, Emit
from .target import BARRIER, GpuTarget


class Exchange:
    """The shared memory of one kernel's exchanges, and the instructions. `threads`: of a group."""

    def __init__(self, target: GpuTarget, threads: int) -> None:
        self.target = target
        self.threads = threads
        self.slots: dict[tuple[int, str], str] = {}

    def declarations(self) -> str:
        """Definitions of the shared variables; @SELF becomes the kernel's name."""
        return "".join(
            f"{name} = internal addrspace(3) global [{self.threads} x {kind}] undef, align 16\n"
            for (_, kind), name in self.slots.items()
        )

    def others(
        self, e: Emit, kinds: Sequence[str], values: Sequence[str], distance: int
    ) -> Iterator[str]:
        """The values of the thread whose number differs by the power of two `distance`, each
        written when it is asked for: few registers are taken at a time."""
        if distance < self.target.warp:
            return (self._shuffled(e, k, v, distance) for k, v in zip(kinds, values, strict=True))
        return self._shared(e, kinds, values, e.op(f"xor i64 %kernel.t, {distance}"))

    def first(
        self, e: Emit, kinds: Sequence[str], values: Sequence[str], distance: int
    ) -> Iterator[str]:
        """The values of the first thread whose number differs by a multiple of the power of two
        `distance`."""
        thread = "0" if distance == 1 else e.op(f"and i64 %kernel.t, {distance - 1}")
        return self._shared(e, kinds, values, thread)

    def _shared(
        self, e: Emit, kinds: Sequence[str], values: Sequence[str], thread: str
    ) -> Iterator[str]:
        for number, (kind, value) in enumerate(zip(kinds, values, strict=True)):
            memory = "i8" if kind == "i1" else kind
            name = self.slots.setdefault((number, memory), f"@SELF.slots{number}{memory}")
            own, theirs = (
                e.op(f"getelementptr {memory}, ptr {name}, i64 {t}") for t in ("%kernel.t", thread)
            )
            stored = e.cast("zext", value, "i1", "i8") if kind == "i1" else value
            e.do(f"store {memory} {stored}, ptr {own}")
            e.do(BARRIER)
            result = e.op(f"load {memory}, ptr {theirs}")
            e.do(BARRIER)
            yield e.cast("trunc", result, "i8", "i1") if kind == "i1" else result

    def _shuffled(self, e: Emit, kind: str, value: str, distance: int) -> str:
        bits = BITS[kind]
        raw = value if kind[0] == "i" else e.cast("bitcast", value, kind, f"i{bits}")
        if bits < 32:
            word = self._word(e, e.cast("zext", raw, f"i{bits}", "i32"), distance)
            got = e.cast("trunc", word, "i32", f"i{bits}")
        elif bits == 32:
            got = self._word(e, raw, distance)
        else:
            low = self._word(e, e.cast("trunc", raw, "i64", "i32"), distance)
            upper = e.op(f"lshr i64 {raw}, 32")
            high = self._word(e, e.cast("trunc", upper, "i64", "i32"), distance)
            high = e.op(f"shl i64 {e.cast('zext', high, 'i32', 'i64')}, 32")
            got = e.op(f"or i64 {high}, {e.cast('zext', low, 'i32', 'i64')}")
        return got if kind[0] == "i" else e.cast("bitcast", got, f"i{bits}", kind)

    def _word(self, e: Emit, value: str, distance: int) -> str:
        """The i32 of the lane whose number is the own one xor `distance`."""
        return e.op(
            f"call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 {value}, i32 {distance}, i32 31)"
        )
