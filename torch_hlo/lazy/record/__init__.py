"""Recording: tensors, storages and views; an op as a node of the graph; the interface of the engine
that evaluates it; the session, which is the state of all this.

In: an overload and its arguments. Out: nodes (lowering/core/graph.py), the tape, pending storages.
May import pytorch/, lowering/, device/. Order within: engine, meta < session < storage < tensor <
handlers < what makes handlers (recording, decompose, fallback).
"""

from .engine import Engine, Watcher
from .handlers import TABLE, Handler, call, handles, nested
from .meta import Meta, aten, meta_tensor
from .storage import (
    Array,
    Binding,
    Effect,
    Number,
    Storage,
    must_run,
    pending,
    pending_storages,
    read,
    write,
)
from .tensor import HloTensor, adopt, blank, fresh, from_cpu, in_inference_mode, make, to_cpu
from .tracing import after_traces
from .views import View
