"""Slow down a measurement's reads of its checkpoint to the rate and the latency of a slower disk."""
