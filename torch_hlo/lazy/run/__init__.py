"""From a recorded graph to a running program: `DeviceEngine` cuts, finds or compiles the program,
and launches it; the executor runs it in the background.

In: pending storages. Out: buffers. May import record/, lowering/, compiler/, device/.
"""
