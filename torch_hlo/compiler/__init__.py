"""From programs to machine code: HLO -> optimized HLO -> LLVM IR -> object code.

In: a Module and a target. Out: an Executable. Imports hlo/ and llvmlite, never torch.

A folder per family of operations holds its passes, its CPU kernels and its GPU kernels
(`gpu_*.py`). What may import what, lowest first:

    hlo_pass.py, conv_forms.py, cost.py               what a pass is; what passes ask of HLO
    cache.py                                          what is kept between processes
    simplify/, fusion/, schedule/                     passes for all operations
    llvm/, codegen/, gpu/                             what all kernels are written with
    attention/, convolution/, …, collectives/         the families
    pipeline.py, spmd/                                the list of passes; partitioned programs
    compile.py, executable.py, aot/                   everything together
"""
