"""Layers: convolution, pooling, attention, norms, losses, recurrent networks, optimizers.

In: Instructions, in place of the op's tensors. Out: Instructions. Imports every room of lowering/
but fx/ and spmd/."""
