"""Judge a run against a committed baseline file and budgets, and compare runs with each other.

This package reads only records.
"""
