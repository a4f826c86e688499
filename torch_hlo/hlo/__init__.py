"""The language: shapes, instructions, programs, their text, their meaning and their shardings.
NumPy only; imports nothing of this package but `config`'s level."""
