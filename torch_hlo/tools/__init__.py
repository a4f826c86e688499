"""Programs as text files: run, optimise, compare, shrink. The command line is `python -m torch_hlo`."""
