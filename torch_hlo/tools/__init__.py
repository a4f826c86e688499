"""Programs as text files: run, optimise, compare, shrink. The command line is `python -m
torch_hlo`.

In: HLO and StableHLO text, files, arguments of the command line. Out: text and tables. Imports
hlo/, compiler/, device/ and aot/.
"""


class UsageError(ValueError):
    """What the user asked for makes no sense; the message says what does."""
