"""Two ranks: the first gathers all results, and the second waits for it at a barrier."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.synchronize import Barrier


def gather(rank: int) -> int:
    results: list[list[float]] = []
    for step in range(120):
        result = [float(step + number) for number in range(100_000)]  # TAKEN
        results.append(result)  # TAKEN
    return len(results)


def main_of_rank(rank: int, barrier: Barrier) -> None:
    if rank == 0:
        gather(rank)  # CALLED
    barrier.wait()  # WAITS


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    ranks = [context.Process(target=main_of_rank, args=(rank, barrier)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join()  # CALLED
    if ranks[0].exitcode:
        ranks[1].terminate()
    ranks[1].join()
    sys.exit(ranks[0].exitcode)
