"""sort and the first few of a sort (top-k, median): the pass, the CPU kernels, the GPU kernels.

In: sort instructions. Out: fusions of sorts of which a few elements are read, and kernels. Imports
hlo/, codegen/, gather/, gpu/, llvm/.
"""
