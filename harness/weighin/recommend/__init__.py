"""Which way of loading to use: ``weighin recommend``. Measured where it was, else predicted."""
