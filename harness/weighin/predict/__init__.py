"""Peaks of a load without running it: the strategy's own code, run on tensors without values.

``predicting.predict`` is what others call. It asks ``python -m weighin.predict``, a process that
imports torch as a worker does and forks for each cell: nothing but that may be imported here.
"""
