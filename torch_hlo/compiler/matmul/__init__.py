"""Matrix products: canonical dots, kernels for vectors, AMX and GPUs, and what is computed on
finished tiles (epilogues).

In: dot instructions, with what is fused to them. Out: dots in one form, and their kernels. Imports
hlo/, simplify/, codegen/, loops/, gpu/, llvm/.
"""
