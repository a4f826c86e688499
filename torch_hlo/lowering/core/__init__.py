"""What every lowering is made of: recorded graphs and the tape, the table of lowerings, expressions
with PyTorch's promotion, moving elements, loops, calls of operators that run on the CPU.

In: `Node`s of aten ops. Out: an HLO module (`graph.lower`). Imports hlo/, metrics and the registry
of host calls of compiler/; no other room of lowering/."""
