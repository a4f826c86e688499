"""PTX without a GPU: a parser and a vectorised evaluator of NVIDIA's virtual instruction set, and
the device that runs programs with them.

    TORCH_HLO_DEVICE=test.ptx.driver python train.py              # or test.ptx.driver:sm_80
    Image(text).launch("kernel", groups, threads, words, memory)

The meaning of every instruction is written from the PTX ISA document, not from what the emitters
do; section numbers in this package are those of
https://docs.nvidia.com/cuda/parallel-thread-execution (ISA 9.0). What hardware leaves undefined is
an error here: see evaluate.py."""
