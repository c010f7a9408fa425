"""Read a file with O_DIRECT and print the times, so that weighin can test a slow disk.

    python probe.py FILE OPTIONS

OPTIONS is a JSON object. ``requests`` is the number of one-page reads, which are timed one by one.
After the timed requests, ``threads`` threads read ``before`` bytes without timing, and ``bytes``
bytes with timing. When the reads reach the end of the file, they continue at its start. The program
imports only the standard library, so that it runs in any container with Python.
"""

import json
import os
import statistics
import sys
import threading
import time
from mmap import PAGESIZE, mmap

_BLOCK_BYTES = 128 * 1024


def main() -> None:
    path, text = sys.argv[1:]
    options = json.loads(text)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(descriptor).st_size
    area = mmap(-1, PAGESIZE)
    times_ns = []
    for number in range(options["requests"]):
        start_ns = time.monotonic_ns()
        os.preadv(descriptor, [area], number * PAGESIZE % max(PAGESIZE, size - PAGESIZE))
        times_ns.append(time.monotonic_ns() - start_ns)
    blocks = max(1, size // _BLOCK_BYTES)
    _read(descriptor, blocks, options["before"], options["threads"])
    start_ns = time.monotonic_ns()
    read_bytes = _read(descriptor, blocks, options["bytes"], options["threads"])
    spent_ns = time.monotonic_ns() - start_ns
    latency_ns = statistics.median(times_ns) if times_ns else None
    print(json.dumps({"latency_ns": latency_ns, "bytes": read_bytes, "spent_ns": spent_ns}))


def _read(descriptor: int, blocks: int, wanted_bytes: int, threads: int) -> int:
    """Read at least ``wanted_bytes`` with several threads; return the number of bytes that were read."""
    numbers = iter(range(-(-wanted_bytes // _BLOCK_BYTES)))
    lock = threading.Lock()
    counts: list[int] = []

    def work() -> None:
        area = mmap(-1, _BLOCK_BYTES)
        while True:
            with lock:
                if (number := next(numbers, None)) is None:
                    return
            counts.append(os.preadv(descriptor, [area], number % blocks * _BLOCK_BYTES))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts)


if __name__ == "__main__":
    main()
