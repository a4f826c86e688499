"""Programs as text files: run, optimise, compare, shrink. The command line is `python -m
torch_hlo`."""


class UsageError(ValueError):
    """What the user asked for makes no sense; the message says what does."""
