"""Any XLA plugin as a device, through the PJRT C API.

In: Modules, handed over as StableHLO. Out: PjrtProgram, and the back end `pjrt`. Imports hlo/ and
the pass of compiler/ that rewrites what plugins do not take.
"""
