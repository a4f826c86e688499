"""NVIDIA GPUs through libcuda by ctypes: driver, memory, launches, graphs, NCCL.

In: Executables with PTX. Out: CudaProgram, and the back end `cuda`. Imports device/gpu, loads a
program's plan with device/cpu.
"""
