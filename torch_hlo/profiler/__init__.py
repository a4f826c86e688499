"""Where the time of a run goes.

    with torch_hlo.profiler.record() as r:    # what happened when: recorded.py, timeline.py
        train()
    r.save("profile.html")                    # a page; r.trace("trace.json") for Perfetto
    print("\n".join(str(a) for a in r.advice()))

    with torch_hlo.profiler.profile() as p:   # a line per step of compiled programs: steps.py
        train_step(); torch_hlo.mark_step()
    print(p.table(20))

`python -m torch_hlo profile train.py -o profile.html` records a script. In: what the engine is
asked for, counters in compiled code. Out: tables, pages, traces. Imports device/, lazy/ and pages/.
"""

from .recorded import Recording, record
from .steps import (
    Limits,
    Line,
    Report,
    collect,
    measured_limits,
    profile,
    report_at_exit as report_at_exit,
)

__all__ = [
    "Limits",
    "Line",
    "Recording",
    "Report",
    "collect",
    "measured_limits",
    "profile",
    "record",
]
