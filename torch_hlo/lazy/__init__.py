"""The "hlo" tensor: operations are recorded, cut into steps, compiled, run. Rooms in the order of a
step: record, ops, run, capture; install.py puts the device together."""
