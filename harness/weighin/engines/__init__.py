"""Run the cells of a plan one by one, several at once on this machine, or on the nodes of a Ray cluster.

An engine takes a planned ``Run`` and returns its results. ``local`` runs the cells on this machine.
``ray`` gives the cells to the nodes of a Ray cluster: ``scheduler`` chooses a node for each cell,
``node`` runs one cell on a node, and only the driver writes the run's folder.
"""
