"""Take 400 MiB in a phase, in a function whose line is known: the limit is less."""

from itertools import repeat

import weighin


def grow() -> int:
    held = list(map(b"".join, repeat([b"1" * 1024] * 1024, 400)))  # TAKEN
    return len(held)


with weighin.phase("grow"):
    grow()
