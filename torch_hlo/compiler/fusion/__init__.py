"""Which instructions share a kernel, decided by the bytes that need not move.

In: simplified HLO. Out: HLO whose top-level instructions are steps. Imports hlo/ and
compiler/conv_forms.py.
"""
