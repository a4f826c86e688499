"""Control flow: conditional, while, call; and the passes for loops over time.

In: steps of these opcodes. Out: jumps and loops in the program's entry, calls of the host. Imports
hlo/, codegen/, llvm/, linalg/ and compiler/hlo_pass.py.
"""
