"""A strategy that reads its checkpoint directly, with which weighin tests a slow disk.

Options: bytes to read in the phase "rate", bytes to read before it, threads that read at once, and the
number of small reads in the phase "latency".
"""

import os
import threading
from mmap import PAGESIZE, mmap
from pathlib import Path

import torch

from weighin.strategy import Load, files

FORMATS = ("pt",)
DEVICES = ("cpu",)
OPTIONS = ("bytes", "before", "threads", "requests")

_BLOCK_BYTES = 128 * 1024


def load(job: Load) -> torch.nn.Module:
    options = job.options
    path = max(files(job.checkpoint), key=lambda each: each.stat().st_size)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with job.phase("latency"):
        _read(descriptor, path, PAGESIZE, options["requests"] * PAGESIZE, 1)
    _read(descriptor, path, _BLOCK_BYTES, options["before"], options["threads"])
    with job.phase("rate"):
        _read(descriptor, path, _BLOCK_BYTES, options["bytes"], options["threads"])
    os.close(descriptor)
    return torch.nn.Module()


def _read(descriptor: int, path: Path, block_bytes: int, wanted_bytes: int, threads: int) -> None:
    """Read as many bytes as wanted, from the file's start again at its end, with several threads."""
    last_block = max(1, path.stat().st_size // block_bytes)
    blocks = iter(range(-(-wanted_bytes // block_bytes)))
    lock = threading.Lock()

    def work() -> None:
        area = mmap(-1, block_bytes)
        while True:
            with lock:
                if (number := next(blocks, None)) is None:
                    return
            os.preadv(descriptor, [area], number % last_block * block_bytes)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
