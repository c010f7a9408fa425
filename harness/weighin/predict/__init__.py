"""Predict the peaks of a load by running the strategy's own code on tensors without values.

``client.predict`` is the entry point. This function sends requests to ``python -m
weighin.predict``, a process that imports torch as a worker does and forks for each cell. This file
imports nothing, because its imports would add to the memory of that process.
"""
