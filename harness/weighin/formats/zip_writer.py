"""Writing ``torch.save``'s own zip files in bounded memory.

``torch.save`` writes the archive's structure around holes (``torch.serialization.skip_data``),
so that the layout is its own to the byte; the tensors are then written into the holes piece by
piece, by several threads, and their CRC-32s into the zip's records. Nothing is ever held whole.
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

from weighin.atomic import drop_written
from weighin.formats.base import Pieces, Progress, TensorPlan

WRITERS: Final = 2  # one generates while another waits for the disk; more only add memory

_SYNC_EVERY_BYTES: Final = 128 * 1024 * 1024
_DESCRIPTOR: Final = b"PK\x07\x08"  # the data descriptor behind a record, and
_ENTRY: Final = b"PK\x01\x02"  # its entry in the central directory


_holes = False  # whether values are left out: see leaving_holes


@contextmanager
def leaving_holes() -> Iterator[None]:
    """Write files inside with their whole structure, but holes in place of the values.

    They take almost no room on the disk. For whoever needs no values; their CRC-32s are wrong.
    """
    global _holes  # noqa: PLW0603 (each layout would have to hand it down to the one place that asks)
    _holes = True
    try:
        yield
    finally:
        _holes = False


def leaves_holes() -> bool:
    """Tell whether values are left out."""
    return _holes


def finish(descriptor: int) -> None:
    """Put a written file on the disk and out of the page cache, unless nothing worth it is in it."""
    if not _holes:
        drop_written(descriptor)


def placeholder(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor whose memory is never touched, and so costs nothing."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def placeholders(tensors: Sequence[TensorPlan]) -> dict[str, torch.Tensor]:
    """Return a placeholder for each tensor; tied ones have the same."""
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
    """Write a state dict as ``torch.save`` does, the values of each name from ``pieces``.

    Names whose placeholder is the same tensor share one storage in the file; ``pieces`` is
    called for the first of them. The file is synced and dropped from the page cache.

    Raises:
        ValueError: the pieces of a tensor are not as long as its placeholder.
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
    """Write one tensor's file as ``torch.save(tensor, path)`` does; the rest as ``write_pt``."""
    with torch.serialization.skip_data():
        torch.save(tensor, path)
    fill_holes(path, [""], lambda _: pieces, progress)


def fill_holes(path: Path, names: list[str], pieces: Pieces, progress: Progress | None) -> None:
    """Write into record ``data/i`` what ``pieces(names[i])`` gives, and set all CRC-32s."""
    with path.open("r+b") as file:
        records = data_records(path, file.fileno())
        assert len(records) == len(names)
        flusher = _Flusher(file.fileno(), progress)
        jobs = [
            partial(fill, file.fileno(), record, partial(pieces, name), flusher)
            for record, name in zip(records, names, strict=True)
        ]
        run_parallel(jobs)
        finish(file.fileno())


def run_parallel(jobs: Iterable[Callable[[], None]]) -> None:
    """Run all jobs on ``WRITERS`` threads; the first error stops those not yet started."""
    with ThreadPoolExecutor(WRITERS) as pool:
        futures = [pool.submit(job) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()


class WrittenRecord:
    """One ``data/N`` of the archive: where its bytes lie and where its CRC-32 stands, twice."""

    def __init__(self, start: int, size: int, entry: int) -> None:
        self.start, self.size = start, size
        self.crc_places = [entry + 16] if not size else [start + size + 4, entry + 16]

    def move(self, distance: int) -> None:
        """Count from a place ``distance`` bytes before the archive's start."""
        self.start += distance
        self.crc_places = [place + distance for place in self.crc_places]


def data_records(path: Path, descriptor: int) -> list[WrittenRecord]:
    """Return the tensor records in the order of their numbers."""
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
    """Write at ``at`` what ``torch.save(tensor, scratch)`` writes, around a hole for its values.

    Returns the record to fill, and the length of it all in bytes. ``scratch`` is written over.
    """
    with torch.serialization.skip_data():
        torch.save(tensor, scratch)
    with scratch.open("rb") as file:
        (record,) = data_records(scratch, file.fileno())
        length = os.fstat(file.fileno()).st_size
        end = record.start + record.size
        _write_all(descriptor, memoryview(os.pread(file.fileno(), record.start, 0)), at)
        _write_all(descriptor, memoryview(os.pread(file.fileno(), length - end, end)), at + end)
    record.move(at)
    return record, length


def fill(
    descriptor: int,
    record: WrittenRecord,
    pieces: Callable[[], Iterable[torch.Tensor]],
    flusher: "_Flusher",
) -> None:
    """Write the values that ``pieces`` gives into a record, and their CRC-32 where it belongs.

    Raises:
        ValueError: they are not as long as the record.
    """
    if leaves_holes():
        return
    at, crc = record.start, 0
    for piece in pieces():
        data = memoryview(piece.reshape(-1).view(torch.uint8).numpy().data)
        if at + len(data) > record.start + record.size:
            raise ValueError(f"more than {record.size} bytes for a tensor of that size")
        crc = zlib.crc32(data, crc)
        _write_all(descriptor, data, at)
        at += len(data)
        flusher.wrote(len(data))
    if at != record.start + record.size:
        raise ValueError(f"{at - record.start} bytes for a tensor of {record.size}")
    for place in record.crc_places:
        os.pwrite(descriptor, struct.pack("<I", crc), place)


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


class _Flusher:
    """Counts written bytes, and now and then puts them on the disk and out of the page cache."""

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
