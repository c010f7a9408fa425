"""Plan a run: turn settings into cells (measurements), write plan.json, and restore a stopped run."""
