"""Judge a run against a committed baseline and budgets, and compare it with other runs.

Reads records only, and without pandas, whose import would delay the answer.
"""
