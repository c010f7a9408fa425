"""Have children do the work in the way that the option ``how`` names, and load rightly."""

import mmap
import os
import time

import torch

from strategies.baseline import load as load_rightly
from weighin import Load

MIB = 1024**2


def load(job: Load) -> torch.nn.Module:
    with job.phase("children"):
        globals()[job.options["how"]](job)
    return load_rightly(job)


def each_takes_its_share(job: Load) -> None:
    """Have three children hold memory at once, all of which fits together, and wait for them."""
    children = [fork(job.options["mib"]) for _ in range(3)]
    for child in children:
        os.waitpid(child, 0)


def goes_on_without_the_one_that_is_killed(job: Load) -> None:
    os.waitpid(fork(job.options["mib"]), 0)


def cannot_go_on_without_the_one_that_is_killed(job: Load) -> None:
    _, status = os.waitpid(fork(job.options["mib"]), 0)
    raise RuntimeError(f"a loader's process ended with status {status}")


def exits_without_the_one_that_is_killed(job: Load) -> None:
    os.waitpid(fork(job.options["mib"]), 0)
    os._exit(7)


def waits_for_ever_for_the_one_that_is_killed(job: Load) -> None:
    fork(job.options["mib"])
    time.sleep(600)


def fork(mib: int) -> int:
    """Return the pid of a child that takes so many MiB, holds them for a moment, and ends."""
    if child := os.fork():
        return child
    held = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE)
    for offset in range(0, len(held), mmap.PAGESIZE):
        held[offset] = 1
    time.sleep(1)
    os._exit(0)
