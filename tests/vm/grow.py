"""Take 200 MiB in a phase, in a function whose line is known: the limit is less."""

import time

import weighin


def grow() -> int:
    held = []
    for _ in range(200):
        held.append(bytes([1]) * 1024**2)  # TAKEN
        time.sleep(0.05)
    return len(held)


with weighin.phase("grow"):
    grow()
