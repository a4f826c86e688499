"""The CPU: loading machine code, the workers of parallel loops, the stream of programs, packed
weights.

In: Executables. Out: NativeProgram, and the back end `cpu`. Imports compiler/, hlo/ and the files
of device/ itself.
"""
