"""Define the models that weighin includes, and build models without allocating their weights."""
