"""Provide the pytest plugin, which measures loads, functions and tests' bodies in fresh workers."""
