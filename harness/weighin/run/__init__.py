"""Run a plan: its cells in order, each in a supervised worker."""
