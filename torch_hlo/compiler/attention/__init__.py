"""Attention, forward and backward: what marks or recognizes it, and the kernels that never store
the scores.

In: calls marked as attention, or products around a softmax. Out: fusions that say they are
attention, and their kernels. Imports hlo/, fusion/, codegen/, matmul/, gpu/, llvm/.
"""
