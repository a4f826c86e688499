"""What the sharded programs of this process send: a table of collectives."""

from torch_hlo.compiler.cost import KINDS, Cost
from torch_hlo.device.sharded import PartitionedProgram
from torch_hlo.lazy.record import session


def programs() -> list[PartitionedProgram]:
    """The sharded programs compiled so far that are still in use; `.runs` and `.cost` tell how
    often each ran and what one run costs a device."""
    return sorted(session.current().partitioned, key=lambda p: p.number)


def total() -> Cost:
    """What one device has done in all runs of all sharded programs so far."""
    sum_ = Cost()
    for program in programs():
        sum_.add(program.cost, program.runs)
    return sum_


def report() -> str:
    """A line per program and kind of collective: runs, collectives and bytes that one device sends
    in a run."""
    lines = [
        f"{'program':12}{'runs':>6}  {'collective':22}{'number':>8}{'bytes sent per device':>24}"
    ]
    for program in programs():
        name = f"{program.name:12}{program.runs:6}"
        for kind in KINDS:
            if program.cost.collectives[kind]:
                number = program.cost.collectives[kind]
                sent = program.cost.sent[kind]
                lines.append(f"{name}  {kind:22}{number:8,.0f}{sent:24,.0f}")
                name = " " * 18
        if name.strip():
            lines.append(f"{name}  none")
    return "\n".join(lines)
