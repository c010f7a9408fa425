"""Recommend a strategy (``weighin recommend``) from earlier measurements, else from predictions."""
