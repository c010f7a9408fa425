"""Read and write the folders of ``torch.distributed.checkpoint``: ``.metadata`` and ``*.distcp``.

weighin writes each tensor as a separate ``torch.save`` archive into ``__0_0.distcp``. The metadata
contain the offset of each archive. Tied keys refer to the same archive. torch's own writer needs
whole tensors in memory; this module writes the same files piece by piece.
"""

import io
import os
import pickle
import stat
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weighin.errors import CheckpointError
from weighin.files import write_bytes
from weighin.formats import dcp_metadata, foreign
from weighin.formats.base import Part, Pieces, Plans, Progress, Slices, TensorSlice, row_major
from weighin.formats.dcp_metadata import AGAIN, FILE_NAME, DcpBlock, DcpTensor
from weighin.formats.foreign import unreadable
from weighin.stream.pickles import Opaque
from weighin.stream.torch_files import read_one
from weighin.text import plain, shown

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

NAME = "dcp"
SUFFIX = ""

DATA_NAME: Final = "__0_0.distcp"
_ALIGNMENT: Final = 64
_BYTES: Final = "pickled object"  # a value other than a tensor; its pickle is not read


def matches(path: Path) -> bool:
    return (path / FILE_NAME).is_file()


def files(path: Path) -> list[Path]:
    return [path / FILE_NAME, *sorted(path.glob("*.distcp"))]


def read(path: Path, key: str = "") -> Slices:
    """Return the places (files and offsets) of all tensors, or only of those under ``key``.

    torch flattens nested dicts into dotted names: "model.weight", "optimizer.state.weight.step". A
    tensor is under ``key`` if its name begins with ``key`` and a dot.

    Raises:
        CheckpointError: the metadata or an archive is damaged, or a tensor's blocks overlap or leave a
            gap.
    """
    archives: dict[tuple[str, int], TensorSlice] = {}
    tensors, values = dcp_metadata.read(path, key)
    slices = Slices(_slice(path, stored, archives) for stored in tensors)
    slices.values = {name: Opaque(_BYTES) for name in values}
    return slices


def _slice(
    path: Path, stored: DcpTensor, archives: dict[tuple[str, int], TensorSlice]
) -> TensorSlice:
    parts = []
    for block in stored.blocks:
        place = block.file, block.offset
        if place not in archives:
            archives[place] = _read_archive(path, stored.key, block)
        where = replace(archives[place], name=stored.key)
        if (where.shape, where.dtype_name) != (block.shape, stored.dtype):
            raise CheckpointError(
                f"{where.file}: {shown(stored.key)} has the shape {where.shape} and the dtype"
                f" torch.{where.dtype_name} here, but {block.shape} and torch.{stored.dtype} in"
                f" {FILE_NAME}",
                AGAIN,
            )
        parts.append(Part(block.start, where))
    if len(parts) == 1:
        return parts[0].where
    whole, stride = stored.shape, row_major(stored.shape)
    return replace(parts[0].where, shape=whole, stride=stride, parts=tuple(parts))


def _read_archive(folder: Path, key: str, stored: DcpBlock) -> TensorSlice:

    path = folder / stored.file
    if Path(stored.file).name != stored.file or "\0" in stored.file:
        raise CheckpointError(
            f"{folder / FILE_NAME}: the file that holds {shown(key)} lies outside the folder:"
            f" {shown(stored.file)}",
            AGAIN,
        )
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise CheckpointError(f"{path}: not a file", AGAIN)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if stored.offset + stored.length > size:
                raise CheckpointError(
                    f"{path}: truncated: {shown(key)} ends at byte "
                    f"{stored.offset + stored.length:,}, but the file ends at byte {size:,}",
                    foreign.AGAIN,
                )
            view = _FileView(file.fileno(), stored.offset, stored.length)
            where = read_one(path, key, view)
    except OSError as error:
        raise unreadable(folder / plain(stored.file), error) from error
    return replace(
        where,
        offset=where.offset + stored.offset,
        storage_offset=where.storage_offset + stored.offset,
    )


class _FileView(io.RawIOBase):
    """A part of an open file as a file of its own: ``length`` bytes from ``base`` on.

    Reads do not move the position of the open file.
    """

    def __init__(self, descriptor: int, base: int, length: int) -> None:
        self._descriptor, self._base, self._length = descriptor, base, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"negative position {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        read = os.preadv(self._descriptor, [view], self._base + self._at) if view else 0
        self._at += read
        return read


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    from weighin.formats import zip_writer

    target.mkdir()
    scratch = target / "archive"  # torch's own name for an archive that it writes to a stream
    places: dict[str, tuple[int, int]] = {}
    jobs = []
    with (target / DATA_NAME).open("x+b") as file:
        flusher = zip_writer.Flusher(file.fileno(), progress)
        at = 0
        for plan in tensors:
            if plan.shared_with is not None:
                places[plan.name] = places[plan.shared_with]
                continue
            blank = zip_writer.placeholder(plan.shape, plan.dtype)
            record, length = zip_writer.embed(blank, scratch, file.fileno(), at)
            jobs.append(
                partial(zip_writer.fill, file.fileno(), record, partial(pieces, plan.name), flusher)
            )
            places[plan.name] = at, length
            at += -(-length // _ALIGNMENT) * _ALIGNMENT
        zip_writer.run_parallel(jobs)
        zip_writer.finish(file.fileno())
    scratch.unlink(missing_ok=True)
    write_bytes(target / FILE_NAME, _metadata(tensors, places))


def _metadata(tensors: Plans, places: Mapping[str, tuple[int, int]]) -> bytes:
    # Not at the top: this import takes a third of a second, and reading does not need it.
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described, stored = {}, {}
    for plan in tensors:
        shape, zeros = torch.Size(plan.shape), torch.Size([0] * len(plan.shape))
        described[plan.name] = TensorStorageMetadata(
            TensorProperties(dtype=plan.dtype), shape, [ChunkStorageMetadata(zeros, shape)]
        )
        index = MetadataIndex(plan.name, zeros, 0)
        stored[index] = _StorageInfo(DATA_NAME, *places[plan.name])
    has_version = any(field.name == "version" for field in fields(Metadata))  # not in torch 2.6
    metadata = Metadata(
        state_dict_metadata=described,  # type: ignore[arg-type]
        planner_data={plan.name: (plan.name,) for plan in tensors},
        storage_data=stored,
        storage_meta=StorageMeta(),
        **({"version": "1.0.0"} if has_version else {}),
    )
    return pickle.dumps(metadata)
