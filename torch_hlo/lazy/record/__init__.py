"""Recording: tensors, storages and views; an op as a node of the graph; the interface of the engine
that evaluates it; the session, which is the state of all this.

In: an overload and its arguments. Out: nodes (lowering/core/graph.py), the tape, pending storages.
May import pytorch/, lowering/, device/. Order within: engine, meta < session < storage < tensor <
handlers < what makes handlers (recording, decompose, fallback).
"""
