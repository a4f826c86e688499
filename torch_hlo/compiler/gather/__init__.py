"""gather and scatter: the pass that fuses scatters, the CPU kernels, the GPU kernels.

In: gather and scatter instructions, and fusions around them. Out: their kernels. Imports hlo/,
fusion/, codegen/, loops/, sort/, matmul/, control/, gpu/, llvm/.
"""
