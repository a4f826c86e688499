"""Programs as files: object code with a C interface for other machines.

In: a Module. Out: a library's objects, header and data. Imports all of compiler/, and hlo/.
"""
