"""Define the models that weighin brings, and build models without allocating their weights."""
