"""The pytest plugin, which measures loads, functions and test functions in new processes."""
