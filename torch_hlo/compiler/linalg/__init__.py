"""Factorizations and solves: Cholesky, LU, QR, triangular solves, and LAPACK for eigenvalues."""
