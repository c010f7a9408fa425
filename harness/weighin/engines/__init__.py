"""Run the cells (measurements) of a plan on this machine or on the nodes of a Ray cluster.

An engine takes a planned ``Run``, and returns the results of its cells. The engine ``local`` uses
this machine, and the engine ``ray`` uses a Ray cluster. If several cells run at once, ``scheduler``
chooses a node for each cell, ``node`` runs the cell, and only ``driver`` writes the run's folder.
"""
