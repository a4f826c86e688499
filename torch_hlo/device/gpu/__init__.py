"""What the GPU back ends share: what a driver does, memory, programs of kernel launches; OpenCL.

In: Executables with an image for a device. Out: GpuProgram, GpuBackend, and the back end `opencl`.
Imports compiler/ and device/cpu, which loads a program's plan.
"""
