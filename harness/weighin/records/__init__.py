"""Read and write a run's records, and compute verdicts, RAM floors and series from records."""
