"""Judge a run against a baseline file and against budgets, and compare runs with each other.

Of a run's folder, the package weighin.gate reads only the records and the plan.
"""
