"""Judge a run against a baseline file and against budgets, and compare runs with each other.

The package weighin.gate reads nothing of a run but its records and its plan.
"""
