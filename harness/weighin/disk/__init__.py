"""Limit the rate, and add a latency, for reads of a cell's checkpoint, as on a slower disk."""
