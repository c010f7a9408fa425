"""Read a file directly, and print how long that took: with it, weighin tests a slow disk.

    python probe.py FILE OPTIONS

OPTIONS is JSON: the number of small reads that are timed one by one (``requests``), and the bytes that
are timed (``bytes``) after others that are not (``before``), with several ``threads`` at once. The file
is read from its start again at its end. The program uses the standard library alone, so that it also
runs in a container.
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
    """Read at least as many bytes as wanted, with several threads; return how many were read."""
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
