"""The room of private API: its table of shortcuts. What it does for tensors is tested in test/lazy."""
