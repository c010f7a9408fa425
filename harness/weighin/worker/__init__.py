"""What runs inside the measured process. Imports the vocabulary, torch and one strategy file.

Others import ``protocol`` alone from here; tests/instrument/test_imports.py holds them to it.
"""
