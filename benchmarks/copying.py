"""Which way of copying a cached file into fresh huge pages is fastest on this processor?

    python benchmarks/copying.py [FILE] [--rounds 7] [--threads 2]

Each round tries every way once, in a random order, each in a process of its own. Ratios are
to the best raw way of the same round; where others use the machine, trust those of processor time.
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
from weighin.loader.direct_io import PieceReader
from weighin.loader.mapped_copy import ask_for_huge_pages, make_present
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
    with reader.looking(file, offset, len(target)) as found:
        direct_io.copy(target, found)
    reader.close()


def load(file: Path, target: memoryview, offset: int) -> None:
    """As the loader chooses."""
    reader = PieceReader()
    reader.read(file, target, offset)
    reader.close()


# The most bytes of a share: 0 stands for all that there is for a thread.
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
    """Fill fresh memory, by several threads that take the next share each; seconds, and of processors."""
    copy, most = WAYS[way]
    size = file.stat().st_size
    share = most or -(-size // threads // _HUGE_BYTES) * _HUGE_BYTES
    area = mmap.mmap(-1, size + _HUGE_BYTES, flags=mmap.MAP_PRIVATE)
    ask_for_huge_pages(area, 0, len(area))
    lead = -direct_io.address_of(memoryview(area)) % _HUGE_BYTES
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
    """Print each way's seconds, and its ratio to the fastest raw way of the same round."""
    ways = options.ways.split(",")
    rounds: list[dict[str, list[float]]] = []
    for _ in range(options.rounds):
        found = {}
        for way in random.sample(ways, len(ways)):
            command = [sys.executable, __file__, str(file), f"--threads={options.threads}"]
            done = subprocess.run([*command, "--one", way], capture_output=True, check=True)
            found[way] = [float(word) for word in done.stdout.split()]
        rounds.append(found)
    raw = [way for way in ways if not way.startswith("loader")]
    for way in ways:
        words = [f"{way:20}"]
        for at, what in enumerate(("s", "s of processors")):
            times = [found[way][at] for found in rounds]
            ratios = [found[way][at] / min(found[one][at] for one in raw) for found in rounds]
            ratio, time_s = statistics.median(ratios), statistics.median(times)
            words.append(f"{time_s:.2f} (least {min(times):.2f}) {what}, {ratio:.2f}x the best")
        print(" | ".join(words))


if __name__ == "__main__":
    main()
