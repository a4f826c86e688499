"""Collectives of a per-device program: fewer, smaller, earlier, asynchronous; and the steps that
run them.

In and out: a per-device Module; collective_step.py: steps in, calls of the host out. Imports hlo/,
schedule/, codegen/ and compiler/hlo_pass.py.
"""
