"""Windows that slide: reduce-window, running folds, gradients of pooling. The pass, the CPU
kernels, the GPU kernels.

In: reduce-window and select-and-scatter instructions. Out: windows that a GPU can sum, and kernels.
Imports hlo/, simplify/, codegen/, loops/, gather/, matmul/, gpu/, llvm/.
"""
