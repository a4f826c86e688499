"""A fuzzer: random programs give on the device what they give in eager PyTorch on the CPU.

    python -m test.sweeps.fuzz --seed 0 --programs 1000 --processes 2

Comes in: a seed. Goes out: programs that disagree, as small as possible. `generate` makes programs
of the templates in `statements`, `run` runs them in each mode, `compare` judges, `shrink` makes
them smaller. Imports the package's public interface, and the interpreter of test/lazy."""
