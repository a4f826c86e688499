"""Fourier transforms: the pass that leaves those with kernels, the plans, the kernels."""
