"""Values of other threads of a group: by shuffles inside a warp, through shared memory between
warps.

Shared slots belong to a thread each: it writes its own and reads another's, between two barriers.
"""

from ..llvm import BITS, Emit
from .target import GpuTarget


class Exchange:
    """The shared memory of one kernel's exchanges, and the instructions. `threads`: of a group."""

    def __init__(self, target: GpuTarget, threads: int) -> None:
        self.target, self.threads = target, threads
        self.slots: dict[tuple[int, str], str] = {}

    def declarations(self) -> str:
        """Definitions of the shared variables; @SELF becomes the kernel's name."""
        return "".join(
            f"{name} = internal addrspace(3) global [{self.threads} x {kind}] undef, align 16\n"
            for (_, kind), name in self.slots.items()
        )

    def other(
        self,
        e: Emit,
        number: int,
        kind: str,
        value: str,
        distance: int,
    ) -> str:
        """The value (accumulator `number`) of the thread whose number differs by the power of two
        `distance`."""
        if distance < self.target.warp:
            return self._shuffled(e, kind, value, distance)
        return self._shared(e, number, kind, value, e.op(f"xor i64 %kernel.t, {distance}"))

    def first(
        self,
        e: Emit,
        number: int,
        kind: str,
        value: str,
        distance: int,
    ) -> str:
        """The value of the first thread whose number differs by a multiple of the power of two
        `distance`."""
        return self._shared(
            e,
            number,
            kind,
            value,
            "0" if distance == 1 else e.op(f"and i64 %kernel.t, {distance - 1}"),
        )

    def _shared(
        self,
        e: Emit,
        number: int,
        kind: str,
        value: str,
        thread: str,
    ) -> str:
        memory = "i8" if kind == "i1" else kind
        name = self.slots.setdefault((number, memory), f"@SELF.slots{number}{memory}")
        barrier = f"  {self.target.family.barrier}"
        own, theirs = (
            e.op(f"getelementptr {memory}, ptr {name}, i64 {t}") for t in ("%kernel.t", thread)
        )
        e.do(
            f"store {memory} {e.cast('zext', value, 'i1', 'i8') if kind == 'i1' else value}, ptr"
            f" {own}"
        )
        e.lines.append(barrier)
        result = e.op(f"load {memory}, ptr {theirs}")
        e.lines.append(barrier)
        return e.cast("trunc", result, "i8", "i1") if kind == "i1" else result

    def _shuffled(self, e: Emit, kind: str, value: str, distance: int) -> str:
        bits = BITS[kind]
        raw = value if kind[0] == "i" else e.cast("bitcast", value, kind, f"i{bits}")
        if bits < 32:
            got = e.cast(
                "trunc",
                self._word(e, e.cast("zext", raw, f"i{bits}", "i32"), distance),
                "i32",
                f"i{bits}",
            )
        elif bits == 32:
            got = self._word(e, raw, distance)
        else:
            low = self._word(e, e.cast("trunc", raw, "i64", "i32"), distance)
            high = self._word(
                e,
                e.cast("trunc", e.op(f"lshr i64 {raw}, 32"), "i64", "i32"),
                distance,
            )
            high = e.op(f"shl i64 {e.cast('zext', high, 'i32', 'i64')}, 32")
            got = e.op(f"or i64 {high}, {e.cast('zext', low, 'i32', 'i64')}")
        return got if kind[0] == "i" else e.cast("bitcast", got, f"i{bits}", kind)

    def _word(self, e: Emit, value: str, distance: int) -> str:
        """The i32 of another lane of the warp."""
        return e.op(self.target.family.shuffle.format(v=value, m=distance))
