"""Recommend a strategy (``weighin recommend``) from earlier measurements or from predictions."""
