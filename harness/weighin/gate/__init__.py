"""Judge a run against a file of accepted figures and against budgets, and compare several runs.

Of a run's folder, the package weighin.gate reads only the records and the plan.
"""
