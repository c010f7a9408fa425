"""Predict the peak memory of a load by running the strategy's code on tensors that only reserve address space.

``client.predict`` is the entry point. ``client`` sends requests to ``python -m weighin.predict``, a
process that imports torch as a measured process does, and forks for each load. This file imports
nothing, because an import would add to the memory of the predicting process.
"""
