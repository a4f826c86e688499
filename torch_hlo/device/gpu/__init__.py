"""What the GPU back ends share: what a driver does, memory, programs of kernel launches.

In: Executables with an image for a device. Out: GpuProgram, GpuBackend.
Imports compiler/ and device/cpu, which loads a program's plan.
"""
