"""Judges a run: against a committed baseline, against budgets, and against other runs.

Reads records only, without pandas: a gate must answer at once.
"""
