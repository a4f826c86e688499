"""What the GPU back ends share: what a driver does, memory, programs of kernel launches; OpenCL.

In: Executables with an image for a device. Out: GpuProgram, GpuBackend, and the back end `opencl`.
Loads a program's plan with device/cpu.
"""
