"""FX graphs of torch.compile and torch.export -> recorded graphs -> HLO.

In: a `torch.fx.GraphModule`, an `ExportedProgram`. Out: `FxGraph` (fx_graph.py): nodes, inputs and
outputs for `core.graph.lower`. The top room of lowering: it may import every other one, none of
them imports it. Importing it fills `core.registry.HIGHER_ORDER`."""

from . import higher_order  # noqa: F401
