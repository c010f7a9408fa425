"""Choose how many threads read from a disk, and how much each reads at a time, by its first reads.

A local disk answers a small read within some tenths of a millisecond, and is fastest with few, large
reads. Storage behind a network answers after some milliseconds, and a large read may be a chain of
requests: FUSE makes requests of 128 KiB, one after the other. One thread then gets the size of a
request per latency, so many threads must read at once. Their reads are small: the last large read
would be one chain, for which the whole load waits. All buffers together are smaller.
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
"""The time of a small read from which a disk answers late, in nanoseconds. Local disks take 50,000 to
200,000 ns."""

_WANTED_BYTES_PER_S: Final = 10**9  # of all threads together, if the disk's rate allows it
# Of all threads: half as large as for a local disk, because more threads take more memory.
_BUFFER_BYTES: Final = 8 * 1024**2
_SMALL_BYTES: Final = 4096
_SAMPLE_BYTES: Final = 128 * 1024  # one request of FUSE


@dataclass(frozen=True, slots=True)
class Readers:
    """The threads that read from a disk.

    Attributes:
        piece_bytes: the size of each thread's buffer.
        late: whether the disk answers late, so that no read may be larger than ``piece_bytes``.
    """

    threads: int
    piece_bytes: int = PIECE_BYTES
    late: bool = False


class TimedRead(NamedTuple):
    """The size of a read that one thread made while no other read was under way, and its time."""

    nbytes: int
    ns: int


def choose(reads: Sequence[TimedRead]) -> Readers:
    """Return the readers for a disk, by the first reads of it.

    The quickest read counts as the disk's latency: a single read may be late by chance. The largest
    read shows what one thread gets per second.
    """
    if min(read.ns for read in reads) < LATE_NS:
        return Readers(DISK_THREADS)
    nbytes, ns = max(reads)
    threads = DISK_THREADS
    while threads < MOST_THREADS and threads * nbytes * 1e9 < _WANTED_BYTES_PER_S * ns:
        threads *= 2
    return Readers(threads, _BUFFER_BYTES // threads - 2 * ALIGNMENT, late=True)


class DiskReaders:
    """The readers of one load, which the first read of at least 128 KiB decides.

    Args:
        threads: the number of threads that the caller wants; None leaves it to the disk. One thread
            reads as from a local disk, without a look.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self._readers: Readers | None = None

    def of(self, reader: PieceReader, file: Path, offset: int, size: int) -> Readers:
        """Return the readers, after a look at how soon the disk answers in this range of a file."""
        if self._readers is None:
            if self.threads == 1 or size < _SAMPLE_BYTES:
                return Readers(self.threads or DISK_THREADS)
            middle = down(offset + (size - _SAMPLE_BYTES) // 2, ALIGNMENT)
            chosen = choose(list(first_reads(reader, file, middle)))
            self._readers = replace(chosen, threads=self.threads or chosen.threads)
        return self._readers


def first_reads(reader: PieceReader, file: Path, offset: int) -> Iterator[TimedRead]:
    """Make a small read and, if it was late, one of 128 KiB; yield the time of each."""
    reader.is_cached(file, offset, _SMALL_BYTES)  # opens the file before the clock
    for size in (_SMALL_BYTES, _SAMPLE_BYTES):
        start = time.monotonic_ns()
        reader.piece(file, offset, size)
        elapsed_ns = time.monotonic_ns() - start
        yield TimedRead(size, elapsed_ns)
        if elapsed_ns < LATE_NS:
            return
