"""Run the cells (measurements) of a plan: on this machine, or on the nodes of a Ray cluster.

``engine`` chooses where. If several cells run at once, ``driver`` hands them to threads and alone writes
the run's folder. A thread runs a cell in a process of ``node``: on this machine (``Jobs``), or as
a Ray task (``cluster``).
"""
