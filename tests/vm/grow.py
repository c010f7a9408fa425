"""Take 400 MiB in a phase, in a function whose line is known: the limit is less."""

import weighin


def grow() -> int:
    held: list[bytes] = []
    while len(held) < 400:
        held.append(b"".join([b"1" * 1024] * 1024))  # TAKEN
    return len(held)


with weighin.phase("grow"):
    grow()
