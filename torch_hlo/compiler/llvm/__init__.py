"""LLVM IR as text: functions, vectors, elementary functions, threads; and LLVM itself, which makes
machine code of it.

In: opcodes and register names. Out: IR text, object code. Imports hlo/ir for types only.
"""
