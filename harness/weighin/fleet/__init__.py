"""Where the cells (measurements) of a plan run: ``engine`` chooses, ``driver`` hands out, ``node`` runs one."""
