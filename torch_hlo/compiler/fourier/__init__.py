"""Fourier transforms: the pass that leaves those with kernels, the plans, the kernels.

In: fft instructions. Out: those of one dimension whose length has a plan, and their kernels.
Imports hlo/, codegen/, matmul/, control/, llvm/.
"""
