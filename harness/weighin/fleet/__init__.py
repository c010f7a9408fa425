"""Run the cells (measurements) of a plan: on this machine, or on the nodes of a Ray cluster."""
