"""Take one measurement (cell) inside the measured process, which imports little more than torch and
the strategy.

tests/instrument/test_imports.py checks the memory and the modules that a worker imports.
"""
