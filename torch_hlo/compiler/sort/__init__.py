"""sort and the first few of a sort (top-k, median): the pass, the CPU kernels, the GPU kernels."""
