"""Read samples from a list of strings in the workers of a data loader, which copy it page by page."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.queues import SimpleQueue


class Captions:
    def __init__(self, count: int) -> None:
        self.captions = [
            f"a photo of {number:012d}" for number in range(count)
        ]  # TAKEN: growth or none

    def __getitem__(self, number: int) -> int:  # TAKEN
        caption = self.captions[number]  # TAKEN
        return len(caption)  # TAKEN

    def __len__(self) -> int:
        return len(self.captions)


def work(dataset: Captions, done: SimpleQueue[int]) -> None:
    total = 0
    for number in range(len(dataset)):  # TAKEN
        total += dataset[number]  # TAKEN
    done.put(total)


def main() -> None:
    context = multiprocessing.get_context("fork")
    dataset = Captions(1_500_000)  # CALLED
    done: SimpleQueue[int] = context.SimpleQueue()
    workers = [context.Process(target=work, args=(dataset, done)) for _ in range(3)]
    for worker in workers:
        worker.start()  # CALLED
    for worker in workers:
        worker.join()  # CALLED
    if any(worker.exitcode for worker in workers):
        sys.exit("a worker died")
    print(sum(done.get() for _ in workers))


main()
