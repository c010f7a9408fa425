"""Run the cells of a plan where the user wants them: one by one on this machine, or on a fleet of nodes.

An engine takes a planned ``Run`` and returns its results. ``local`` runs the cells one by one.
``ray`` hands the cells to the nodes of a Ray cluster: ``scheduler`` chooses a node for each cell,
``node`` runs one cell on a node, and the driver alone writes the run's folder.
"""
