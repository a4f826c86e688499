"""The meaning of programs, in NumPy: the reference that passes and compiled code are checked
against.

In: a Module and arrays. Out: arrays. Imports hlo/ir and hlo/sharding.
"""
