"""Read and write a run's records, and derive verdicts, floors and series from records."""
