"""What runs compiled programs: memory, devices, streams; one folder per kind of device.

In: Modules and Executables. Out: loaded programs (interfaces.Program) and buffers (memory.Buffer).
Imports compiler/ and hlo/. The folders offer back ends (interfaces.Backend); nothing here imports
them: runtime.py loads the one that TORCH_HLO_DEVICE names.
"""
