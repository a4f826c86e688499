"""gather and scatter: the pass that fuses scatters, the CPU kernels, the GPU kernels."""
