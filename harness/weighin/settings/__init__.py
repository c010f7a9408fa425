"""Define every setting once: what a suite, ``plan.json`` and a cell (measurement) share."""
