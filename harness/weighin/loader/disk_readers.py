"""Measure the first reads from a disk, and choose the number of threads and the size of their reads.

A local disk answers a small read within 0.2 ms, and is fastest with few, large reads. Storage
behind a network answers after some milliseconds. A FUSE mount divides a large read into requests of
128 KiB, and makes these one after the other. One thread therefore receives only 128 KiB in each
round trip, so that up to 64 threads must read at the same time. The reads from a disk with a high
latency are small, because the load ends only when the last read ends.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from weighin.loader.direct_io import DISK_THREADS, PIECE_BYTES, PieceReader
from weighin.loader.vectored import ALIGNMENT, down

MOST_THREADS: Final = 64
"""The largest number of threads that read from a disk."""

LATE_NS: Final = 500_000
"""The time in nanoseconds from which a small read, and its disk, count as late. A local disk takes
50,000 to 200,000 ns for a small read."""

_WANTED_BYTES_PER_S: Final = 10**9  # the wanted rate of all threads together
# The buffers of all threads: half as large as for a local disk, because each thread takes memory too.
_BUFFER_BYTES: Final = 8 * 1024**2
_SMALL_BYTES: Final = 4096
_SAMPLE_BYTES: Final = 128 * 1024  # one request of FUSE


@dataclass(frozen=True, slots=True)
class Readers:
    """The number of threads that read from a disk, and the size of their reads.

    Attributes:
        piece_bytes: the size of each thread's buffer.
        late: whether a small read takes 0.5 ms or more. If so, no read is larger than ``piece_bytes``.
    """

    threads: int
    piece_bytes: int = PIECE_BYTES
    late: bool = False


class TimedRead(NamedTuple):
    """The size and the duration of a read that ran alone."""

    nbytes: int
    ns: int


def choose(reads: Sequence[TimedRead]) -> Readers:
    """Return the number of threads and the size of reads for a disk, from the times of the first reads.

    The disk's latency is the time of the quickest read, because any one read may be late by chance.
    The rate of the largest read is the rate that one thread can reach.
    """
    if min(read.ns for read in reads) < LATE_NS:
        return Readers(DISK_THREADS)
    nbytes, ns = max(reads)
    threads = DISK_THREADS
    while threads < MOST_THREADS and threads * nbytes * 1e9 < _WANTED_BYTES_PER_S * ns:
        threads *= 2
    return Readers(threads, _BUFFER_BYTES // threads - 2 * ALIGNMENT, late=True)


class DiskReaders:
    """The number of threads and the size of reads of one load, from its first reads of a disk.

    Args:
        threads: the number of threads; None chooses it from the disk's latency. With one thread, the
            latency is not measured, and the reads are those for a local disk.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self._readers: Readers | None = None

    def of(self, reader: PieceReader, file: Path, offset: int, size: int) -> Readers:
        """Return the number of threads and the size of their reads.

        The first call with at least 128 KiB measures the disk's latency, unless ``threads`` is 1.
        """
        if self._readers is None:
            if self.threads == 1 or size < _SAMPLE_BYTES:
                return Readers(self.threads or DISK_THREADS)
            middle = down(offset + (size - _SAMPLE_BYTES) // 2, ALIGNMENT)
            chosen = choose(list(first_reads(reader, file, middle)))
            self._readers = replace(chosen, threads=self.threads or chosen.threads)
        return self._readers


def first_reads(reader: PieceReader, file: Path, offset: int) -> Iterator[TimedRead]:
    """Time a read of 4 KiB and, if this read takes 0.5 ms or more, a read of 128 KiB."""
    reader.opened(file)  # before the clock starts
    for size in (_SMALL_BYTES, _SAMPLE_BYTES):
        start = time.monotonic_ns()
        reader.piece(file, offset, size)
        elapsed_ns = time.monotonic_ns() - start
        yield TimedRead(size, elapsed_ns)
        if elapsed_ns < LATE_NS:
            return
