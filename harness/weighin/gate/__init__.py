"""Judge a run against a committed baseline file and budgets, and compare runs with each other.

This package reads only records, and does so without pandas, whose import would delay the answer.
"""
