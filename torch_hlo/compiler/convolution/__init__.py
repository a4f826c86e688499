"""Convolutions and their gradients: layouts, direct, minimal-filtering (Winograd), depthwise and
AMX kernels, GPU kernels.

In: convolutions, with what is fused to them. Out: convolutions in the form of a kernel, and their
kernels. Imports hlo/, simplify/, codegen/, matmul/, loops/, gather/, gpu/, llvm/.
"""
