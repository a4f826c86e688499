"""Control flow: conditional, while, call; and the passes for loops over time."""
