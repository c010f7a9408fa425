"""Write the same zip files as ``torch.save``, in bounded memory.

``torch.save`` itself writes the archive with holes in place of the tensors
(``torch.serialization.skip_data``), so that the file has exactly torch's structure. Threads then write
the tensors piece by piece into the holes, and the tensors' CRC-32s into the zip's records. No tensor is
ever in memory as a whole.
"""

import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import torch

from weighin.files import drop_written
from weighin.formats.base import Pieces, Plans, Progress, TensorPlan

WRITERS: Final = 2  # threads: one computes while the other waits for the disk

_SYNC_EVERY_BYTES: Final = 128 * 1024 * 1024
_DESCRIPTOR: Final = b"PK\x07\x08"  # the magic number of the data descriptor after a record
_ENTRY: Final = b"PK\x01\x02"  # the magic number of an entry in the central directory


_holes = False  # whether writers leave out the tensors' values: see leaving_holes


@contextmanager
def leaving_holes() -> Iterator[None]:
    """Make all writes within the context leave holes in place of the tensors' values.

    A file with holes has its whole structure, but almost no blocks on the disk. Its tensors read as
    zeros and its CRC-32s are wrong, so that it serves only callers that read no values.
    """
    global _holes  # noqa: PLW0603 (else every format would have to pass the flag on)
    _holes = True
    try:
        yield
    finally:
        _holes = False


def leaves_holes() -> bool:
    return _holes


def finish(descriptor: int) -> None:
    """Sync a written file and drop the file's pages from the page cache, unless the file has holes."""
    if not _holes:
        drop_written(descriptor)


def placeholder(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor, whose memory takes no RAM until something touches it."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def placeholders(tensors: Plans) -> dict[str, torch.Tensor]:
    """Return a placeholder for each tensor; tied tensors share a placeholder."""
    blank: dict[str, torch.Tensor] = {}
    for plan in tensors:
        first = plan.shared_with
        blank[plan.name] = blank[first] if first else placeholder(plan.shape, plan.dtype)
    return blank


def write_pt(
    path: Path,
    blanks: Mapping[str, torch.Tensor],
    pieces: Pieces,
    progress: Progress | None = None,
) -> None:
    """Write a state dict as ``torch.save`` does, with each tensor's values from ``pieces``.

    Names with the same tensor in ``blanks`` share one storage in the file; ``pieces`` is called for
    the first of these names. The written file is synced and dropped from the page cache.

    Raises:
        ValueError: the pieces of a tensor together have another size than the tensor's placeholder.
    """
    with torch.serialization.skip_data():
        torch.save(dict(blanks), path)
    first_names: dict[int, str] = {}
    for name, tensor in blanks.items():
        first_names.setdefault(tensor.untyped_storage()._cdata, name)
    fill_holes(path, list(first_names.values()), pieces, progress)


def write_tensor(
    path: Path, tensor: torch.Tensor, pieces: Iterable[torch.Tensor], progress: Progress | None
) -> None:
    """Write the file of ``torch.save(tensor, path)``, with values from ``pieces``."""
    with torch.serialization.skip_data():
        torch.save(tensor, path)
    fill_holes(path, [""], lambda _: pieces, progress)


def fill_holes(path: Path, names: list[str], pieces: Pieces, progress: Progress | None) -> None:
    """Write the values from ``pieces(names[i])`` into record ``data/i``, and set all CRC-32s."""
    with path.open("r+b") as file:
        records = data_records(path, file.fileno())
        assert len(records) == len(names)
        flusher = Flusher(file.fileno(), progress)
        jobs = [
            partial(fill, file.fileno(), record, partial(pieces, name), flusher)
            for record, name in zip(records, names, strict=True)
        ]
        run_parallel(jobs)
        finish(file.fileno())


def run_parallel(jobs: Iterable[Callable[[], None]]) -> None:
    """Run all jobs on ``WRITERS`` threads; the first error cancels all unstarted jobs."""
    with ThreadPoolExecutor(WRITERS) as pool:
        futures = [pool.submit(job) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()


class WrittenRecord:
    """One record ``data/N`` of the archive: where its bytes are, and where its CRC-32 is stored."""

    def __init__(self, start: int, size: int, entry: int) -> None:
        self.start, self.size = start, size
        self.crc_places = [entry + 16] if not size else [start + size + 4, entry + 16]

    def move(self, distance: int) -> None:
        """Add ``distance`` to all offsets, for an archive that starts at ``distance`` in a file."""
        self.start += distance
        self.crc_places = [place + distance for place in self.crc_places]


def data_records(path: Path, descriptor: int) -> list[WrittenRecord]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        entry_at = archive.start_dir
    records: dict[int, WrittenRecord] = {}
    for info in entries:
        fixed = os.pread(descriptor, 46, entry_at)
        assert fixed[:4] == _ENTRY
        folder, _, number = info.filename.rpartition("/")
        if folder.endswith("/data") and number.isdigit():
            local = os.pread(descriptor, 30, info.header_offset)
            start = info.header_offset + 30 + sum(struct.unpack("<2H", local[26:30]))
            record = WrittenRecord(start, info.file_size, entry_at)
            behind = os.pread(descriptor, 4, start + info.file_size)
            assert not info.file_size or behind == _DESCRIPTOR
            records[int(number)] = record
        entry_at += 46 + sum(struct.unpack("<3H", fixed[28:34]))
    return [records[number] for number in sorted(records)]


def embed(
    tensor: torch.Tensor, scratch: Path, descriptor: int, at: int
) -> tuple[WrittenRecord, int]:
    """Write the archive of ``torch.save(tensor, scratch)`` at byte ``at``, with a hole for values.

    Return the record to fill, and the archive's length in bytes. ``embed`` overwrites ``scratch``.
    """
    with torch.serialization.skip_data():
        torch.save(tensor, scratch)
    with scratch.open("rb") as file:
        (record,) = data_records(scratch, file.fileno())
        length = os.fstat(file.fileno()).st_size
        end = record.start + record.size
        write_all(descriptor, memoryview(os.pread(file.fileno(), record.start, 0)), at)
        write_all(descriptor, memoryview(os.pread(file.fileno(), length - end, end)), at + end)
    record.move(at)
    return record, length


def fill(
    descriptor: int,
    record: WrittenRecord,
    pieces: Callable[[], Iterable[torch.Tensor]],
    flusher: "Flusher",
) -> None:
    """Write the values of ``pieces`` into a record, and their CRC-32 at the ``crc_places``.

    Raises:
        ValueError: all pieces together have another size than the record.
    """
    if leaves_holes():
        return
    crc = 0
    for data in written(descriptor, record.start, record.size, pieces(), flusher):
        crc = zlib.crc32(data, crc)
    for place in record.crc_places:
        os.pwrite(descriptor, struct.pack("<I", crc), place)


def written(
    descriptor: int, start: int, size: int, pieces: Iterable[torch.Tensor], flusher: "Flusher"
) -> Iterator[memoryview]:
    """Write the bytes of ``pieces`` to a file from ``start`` on, and yield each piece's bytes.

    Raises:
        ValueError: the pieces have another total size than ``size``.
    """
    at = 0
    for piece in pieces:
        data = memoryview(piece.detach().reshape(-1).view(torch.uint8).numpy().data)
        if at + len(data) > size:
            raise ValueError(
                f"more than {size} bytes were given for a tensor whose size in bytes is {size}"
            )
        write_all(descriptor, data, start + at)
        at += len(data)
        flusher.wrote(len(data))
        yield data
    if at != size:
        raise ValueError(f"{at} bytes were given for a tensor whose size in bytes is {size}")


def write_raw(
    path: Path,
    fixed: Mapping[int, bytes],
    places: Sequence[tuple[TensorPlan, int]],
    pieces: Pieces,
    progress: Progress | None,
) -> None:
    """Write a new file that is no zip: the bytes in ``fixed`` at their offsets, and each tensor at its
    offset in ``places``.

    The written file is synced and dropped from the page cache.

    Raises:
        ValueError: the pieces of a tensor together have another size than the tensor.
    """

    def write_one(plan: TensorPlan, start: int) -> None:
        for _ in written(descriptor, start, plan.nbytes, pieces(plan.name), flusher):
            pass

    with path.open("xb") as file:
        descriptor = file.fileno()
        ends = [at + plan.nbytes for plan, at in places]
        os.ftruncate(descriptor, max([*ends, *(at + len(text) for at, text in fixed.items())]))
        for at, text in fixed.items():
            write_all(descriptor, memoryview(text), at)
        flusher = Flusher(descriptor, progress)
        if not leaves_holes():
            run_parallel(partial(write_one, plan, at) for plan, at in places)
        finish(descriptor)
        os.fsync(descriptor)


def write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


class Flusher:
    """Counts written bytes. After every 128 MiB, syncs the file and drops its page cache."""

    def __init__(self, descriptor: int, progress: Progress | None) -> None:
        self._descriptor, self._progress = descriptor, progress
        self._lock = threading.Lock()
        self._pending = 0

    def wrote(self, size: int) -> None:
        with self._lock:
            self._pending += size
            due = self._pending >= _SYNC_EVERY_BYTES
            if due:
                self._pending = 0
        if self._progress is not None:
            self._progress(size)
        if due:
            drop_written(self._descriptor)
