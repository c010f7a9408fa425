"""One zip file, as ``torch.save(model.state_dict(), path)`` writes it since torch 1.6."""

import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from harness.checkpoint.layouts.base import Pieces, Progress, TensorPlan, TensorSlice
from harness.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from harness.checkpoint.layouts.file_view import FileView

NAME = "pt"
SUFFIX = ".pt"

_LOCAL_HEADER: Final = struct.Struct("<4s22x2H")  # its magic, and how long name and extra are
_AGAIN: Final = "load the file and save it again with torch.save"


def matches(path: Path) -> bool:
    """Tell whether ``path`` is a zip file."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"PK"
    except OSError:
        return False


def files(path: Path) -> list[Path]:
    """Return the file itself."""
    return [path]


def read(path: Path) -> list[TensorSlice]:
    """Return where each tensor of a flat state dict lies; takes 0.03 s for GPT-2 XL.

    Raises:
        CheckpointError: not a zip that ``torch.save`` wrote, not a flat dict of tensors,
            compressed records, or a tensor that lies outside its record.
    """
    from harness.checkpoint.opening import load_state_dict

    return slices(path, load_state_dict(path, map_location="meta"))


def write(
    target: Path,
    tensors: Sequence[TensorPlan],
    pieces: Pieces,
    progress: Progress | None = None,
) -> None:
    """Write ``torch.save``'s own file; tied tensors share a storage in it."""
    from harness.checkpoint.writing import placeholders, write_pt

    write_pt(target, placeholders(tensors), pieces, progress)


def slices(
    path: Path, state: "Mapping[str, torch.Tensor]", archive: "FileView | None" = None
) -> list[TensorSlice]:
    """Return where the tensors lie that were loaded from ``path`` to the meta device.

    With ``archive``, an archive inside that file, places count from the archive's start.

    Raises:
        CheckpointError: as ``read``.
    """
    import torch

    if archive is None:
        with path.open("rb") as file:
            records = _stored_records(path, file)
    else:
        records = _stored_records(path, archive)
    found = []
    for name, tensor in state.items():
        _check_dense(path, name, tensor)
        storage = tensor.untyped_storage()
        # torch gives tied keys separate storages on the meta device, at the same offset.
        start: int | None = getattr(storage, "_checkpoint_offset", None)
        if start is None:
            raise CheckpointError(
                f"{path}: torch {torch.__version__} does not say where {name!r} lies in the file",
                "update torch, or use a strategy that reads through torch.load",
            )
        where = TensorSlice(
            name=name,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            file=path,
            offset=start + int(tensor.storage_offset()) * tensor.element_size(),
            storage_offset=start,
            storage_bytes=storage.nbytes(),
        )
        _check_inside(where, records.get(start, 0))
        found.append(where)
    return found


def _check_dense(path: Path, name: str, tensor: "torch.Tensor") -> None:
    import torch

    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or lazy:
        raise CheckpointError(
            f"{path}: {name!r} is no plain dense tensor ({tensor.layout}, {tensor.dtype})",
            "save dense tensors: tensor.to_dense(), tensor.dequantize(), tensor.resolve_conj()",
        )


def _check_inside(where: TensorSlice, record_bytes: int) -> None:
    """What the pickle says of a tensor must fit what the archive says of its storage."""
    if where.storage_bytes > record_bytes:
        raise CheckpointError(
            f"{where.file}: damaged: the storage of {where.name!r} has {where.storage_bytes:,} "
            f"bytes, its record in the file {record_bytes:,}",
            "copy or download the file again",
        )
    reach = sum((size - 1) * step for size, step in zip(where.shape, where.stride, strict=True))
    end = where.offset - where.storage_offset + (reach + 1) * where.dtype.itemsize
    if where.nbytes and not 0 < end <= where.storage_bytes:
        raise CheckpointError(
            f"{where.file}: damaged: {where.name!r} ends at byte {end:,} of a storage of "
            f"{where.storage_bytes:,}",
            "copy or download the file again",
        )


def _stored_records(path: Path, file: "IO[bytes] | FileView") -> dict[int, int]:
    """Return where each record's data starts, and how long it is.

    Raises:
        CheckpointError: a record was compressed by a zip program, and cannot be read in place;
            or the values have another byte order than this machine's.
    """
    records: dict[int, int] = {}
    try:
        file_bytes = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(
                        f"{path}: record {record.filename!r} is compressed", _AGAIN
                    )
                file.seek(record.header_offset)
                header = file.read(_LOCAL_HEADER.size)
                magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
                start = record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
                if magic != b"PK\3\4" or start + record.file_size > file_bytes:
                    raise _damaged(path, f"record {record.filename!r} lies outside the file")
                records[start] = record.file_size
                if record.filename.endswith("/byteorder") and archive.read(record) != b"little":
                    raise CheckpointError(f"{path}: written on a big-endian machine", _AGAIN)
    except (zipfile.BadZipFile, struct.error, OSError, ValueError, NotImplementedError) as error:
        raise _damaged(path, f"cannot be read as a zip archive: {error}") from error
    return records


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", "copy or download the file again")
