"""Judge a run by accepted figures and budgets, and compare runs, from records and plans alone."""
