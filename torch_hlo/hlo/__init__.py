"""The language: shapes, instructions, programs, their text, their meaning and their shardings.

In: text, or instructions that others build. Out: Modules, text, values of the evaluator. Imports
NumPy, and of this package `config`'s level alone.
"""
