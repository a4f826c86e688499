"""Elementwise operators, and special functions from expansions.

In: Expr of one dtype and equal dims (`core.elementwise.pointwise` sees to that). Out: Expr.
Imports core/ alone."""
