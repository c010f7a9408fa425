"""Where the cells (measurements) of a plan run: ``driver`` hands out, ``node`` runs one, ``ray_cluster`` is Ray."""
