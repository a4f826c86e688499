"""Factorizations and solves: Cholesky, LU, QR, triangular solves, and LAPACK for eigenvalues.

In: calls that say which factorization they are, cholesky and triangular-solve. Out: fusions, and
their kernels. Imports hlo/, codegen/, matmul/, gather/, control/, llvm/.
"""
