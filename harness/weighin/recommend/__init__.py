"""Choose a strategy: ``weighin recommend``. Uses earlier measurements, and predictions for the rest."""
