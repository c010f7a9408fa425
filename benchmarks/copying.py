"""Compare methods of copying a cached file into fresh huge pages on this processor.

    python benchmarks/copying.py [FILE] [--rounds 7] [--threads 2]

Each round runs every method once, in random order, each method in its own process. Ratios are
relative to the fastest raw method (any method but the loader's) of the same round. If the machine
is busy, use the ratios of CPU time.
"""

import argparse
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from weighin.loader import direct_io
from weighin.loader.direct_io import PieceReader, address_of
from weighin.loader.open_file import ask_for_huge_pages, make_present
from weighin.units import MIB

_HUGE_BYTES = 2 * MIB


def read(file: Path, target: memoryview, offset: int) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    done = 0
    while done < len(target):
        done += os.preadv(descriptor, [target[done:]], offset + done)
    os.close(descriptor)


def read_present(file: Path, target: memoryview, offset: int) -> None:
    make_present(target)
    read(file, target, offset)


def copy_mapped(file: Path, target: memoryview, offset: int) -> None:
    make_present(target)
    reader = PieceReader()
    with reader.opened(file).looking(offset, len(target)) as mapped:
        direct_io.copy(target, mapped)
    reader.close()


def load(file: Path, target: memoryview, offset: int) -> None:
    """Read as ``load_streaming`` does, which chooses its method itself."""
    reader = PieceReader()
    reader.read(file, target, offset)
    reader.close()


# Each method with the largest number of bytes per copy; 0 means one copy per thread.
WAYS: dict[str, tuple[Callable[[Path, memoryview, int], None], int]] = {
    "read 1 MiB": (read, MIB),
    "read 4 MiB": (read, 4 * MIB),
    "read 32 MiB": (read, 32 * MIB),
    "read 32 MiB present": (read_present, 32 * MIB),
    "read all": (read, 0),
    "copy 32 MiB": (copy_mapped, 32 * MIB),
    "copy 192 MiB": (copy_mapped, 192 * MIB),
    "copy all": (copy_mapped, 0),
    "loader 32 MiB": (load, 32 * MIB),
    "loader all": (load, 0),
}


def seconds(way: str, file: Path, threads: int) -> tuple[float, float]:
    """Fill fresh memory with several threads; return wall seconds and CPU seconds."""
    copy, most = WAYS[way]
    size = file.stat().st_size
    share = most or -(-size // threads // _HUGE_BYTES) * _HUGE_BYTES
    area = mmap.mmap(-1, size + _HUGE_BYTES, flags=mmap.MAP_PRIVATE)
    ask_for_huge_pages(area, 0, len(area))
    lead = -address_of(memoryview(area)) % _HUGE_BYTES
    memory = memoryview(area)[lead : lead + size]
    offsets, lock = iter(range(0, size, share)), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            copy(file, memory[offset : offset + share], offset)

    started, cpu = time.perf_counter(), time.process_time()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1500)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(*seconds(options.one, options.file, options.threads))
        return
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as made:
        if options.file is None:
            block = os.urandom(MIB)
            for _ in range(options.mib):
                made.write(block)
            made.flush()
            os.fsync(made.fileno())
        compare(options.file or Path(made.name), options)


def compare(file: Path, options: argparse.Namespace) -> None:
    """Print each method's seconds, and its ratio to the fastest raw method of the same round."""
    ways = options.ways.split(",")
    rounds: list[dict[str, list[float]]] = []
    for _ in range(options.rounds):
        by_way = {}
        for way in random.sample(ways, len(ways)):
            command = [sys.executable, __file__, str(file), f"--threads={options.threads}"]
            done = subprocess.run([*command, "--one", way], capture_output=True, check=True)
            by_way[way] = [float(word) for word in done.stdout.split()]
        rounds.append(by_way)
    raw = [way for way in ways if not way.startswith("loader")]
    for way in ways:
        words = [f"{way:20}"]
        for at, unit in enumerate(("s", "s of CPU time")):
            times = [by_way[way][at] for by_way in rounds]
            ratios = [by_way[way][at] / min(by_way[each][at] for each in raw) for by_way in rounds]
            ratio, time_s = statistics.median(ratios), statistics.median(times)
            words.append(f"{time_s:.2f} (min {min(times):.2f}) {unit}, {ratio:.2f}x the best")
        print(" | ".join(words))


if __name__ == "__main__":
    main()
