"""Programs as data: shapes, instructions, the table of opcodes, shape rules, builders, patterns.

In: Python calls. Out: interned instructions, computations, modules. Imports NumPy, and of
its neighbours only data and text: sharding/sharding.py, text/printer.py.
"""
