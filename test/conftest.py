"""Makes `test.support` importable from every folder of tests."""
