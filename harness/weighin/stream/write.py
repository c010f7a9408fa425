"""Write checkpoints of every format in bounded memory, piece by piece.

A writer first makes the files with holes in place of the tensors' values, so that their structure is
exactly that of the format's own library: ``torch.save`` itself writes the archives
(``torch.serialization.skip_data``). Threads then write the values into the holes, and the values'
CRC-32s into the records of archives. No tensor is ever in memory as a whole.
"""

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from weighin.errors import ConfigError, FormatLimit, extra
from weighin.files import sync, write_bytes, write_text
from weighin.stream import sharded_files
from weighin.stream.dcp_files import INDEX as DCP_INDEX
from weighin.stream.safetensors_files import DTYPES, FORMAT, METADATA, PACKED
from weighin.stream.sharded_files import INDEX_FIELDS, INDEX_NAME, INDEX_VERSION, file_name
from weighin.stream.slices import Pieces, Plans, TensorPlan, dtype_name
from weighin.text import shown

DCP_DATA: Final = "__0_0.distcp"

_ALIGNMENT: Final = 64  # bytes: the data begin at a cache line, as in torch.save
_MOST_PT_TENSORS: Final = 60_000  # ``pickles`` reads some 70,000
_TENSORIZER_INDEX_BYTES: Final = 256 * 1024  # which the package reserves in each file for its index
_TENSORIZER_ENTRY_BYTES: Final = 33  # of a tensor in the index, without its name, dtype and shape
_AS_PT: Final = "write the format pt, which has every dtype of torch: --format pt"


def write(
    fmt: str,
    target: Path,
    tensors: Plans,
    pieces: Pieces | None,
    *,
    max_shard_bytes: int = sharded_files.MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint in the format ``fmt`` to ``target``, a path that does not exist yet.

    Takes memory for a few pieces (tensorizer: for the largest tensor). At the end, the files are synced and
    dropped from the page cache. If ``pieces`` is None, the values stay holes, which read as zeros. Raises
    ConfigError for a dtype or name that the format does not allow, and FormatLimit for too many tensors.
    """
    if fmt in _WRITE:
        _WRITE[fmt](target, tensors, pieces)
    else:
        _write_folder(fmt, target, tensors, pieces, max_shard_bytes)


def _stored(tensors: Plans) -> list[TensorPlan]:
    """Return the tensors that are not tied to an earlier one."""
    return [plan for plan in tensors if plan.shared_with is None]


class _Hole(NamedTuple):
    """Where a tensor's values are missing in a file, and the places of their CRC-32, if any."""

    name: str
    start: int
    size: int
    crc_places: tuple[int, ...] = ()


def _fill(path: Path, holes: Iterable[_Hole], pieces: Pieces | None) -> None:
    """Write the tensors' values into the holes of a file; without ``pieces``, leave the holes."""
    if pieces is None:
        return

    def fill(hole: _Hole) -> None:
        at, crc = 0, 0
        for piece in pieces(hole.name):
            data = memoryview(piece.detach().reshape(-1).view(torch.uint8).numpy().data)
            if at + len(data) > hole.size:
                at += len(data)
                break
            _write_all(descriptor, data, hole.start + at)
            at += len(data)
            crc = zlib.crc32(data, crc) if hole.crc_places else 0
        if at != hole.size:
            what = f"{at} bytes or more were given for a tensor whose size is"
            raise ValueError(f"{hole.name!r}: {what} {hole.size} bytes")
        for place in hole.crc_places:
            os.pwrite(descriptor, struct.pack("<I", crc), place)

    with path.open("r+b") as file:
        descriptor = file.fileno()
        run_parallel(partial(fill, hole) for hole in holes)
        drop_written(descriptor)


def drop_written(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def run_parallel(jobs: Iterable[Callable[[], None]]) -> None:
    """Run all jobs on two threads; an error cancels all unstarted jobs."""
    pool = ThreadPoolExecutor(2)  # one computes while the other waits for the disk
    try:
        for done in as_completed([pool.submit(job) for job in jobs]):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def _with_holes(path: Path, tensors: Plans, *, alone: bool = False) -> list[_Hole]:
    """Write an archive of ``torch.save``, of a state dict or of a tensor alone, and return its holes."""
    state, stored = dict[str, torch.Tensor](), _stored(tensors)
    for plan in tensors:  # memory that nobody touches takes no RAM
        if plan.shared_with is None:
            state[plan.name] = torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
        else:
            state[plan.name] = state[plan.shared_with]
    with torch.serialization.skip_data():
        torch.save(state[stored[0].name] if alone else state, path)
    holes: dict[int, _Hole] = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        entry_at = archive.start_dir
        for info in archive.infolist():
            entry = os.pread(file.fileno(), 46, entry_at)
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data") and number.isdigit():
                local, size = os.pread(file.fileno(), 30, info.header_offset), info.file_size
                start = info.header_offset + 30 + sum(struct.unpack("<2H", local[26:30]))
                crc_places = [entry_at + 16]
                if size:
                    assert os.pread(file.fileno(), 4, start + size) == b"PK\x07\x08"  # descriptor
                    crc_places.append(start + size + 4)
                name = stored[int(number)].name
                holes[int(number)] = _Hole(name, start, size, tuple(crc_places))
            entry_at += 46 + sum(struct.unpack("<3H", entry[28:34]))
    assert len(holes) == len(stored)
    return [holes[number] for number in sorted(holes)]


def _write_pt(target: Path, tensors: Plans, pieces: Pieces | None, *, alone: bool = False) -> None:
    if len(tensors) > _MOST_PT_TENSORS:
        what = f"{len(tensors):,} tensors; weighin reads at most {_MOST_PT_TENSORS:,}"
        repair = "write them in safetensors: --format safetensors"
        raise FormatLimit(f"{what} in one file of torch.save", repair)
    _fill(target, _with_holes(target, tensors, alone=alone), pieces)


def _write_safetensors(target: Path, tensors: Plans, pieces: Pieces | None) -> None:
    """Write the widest elements first, so that all are aligned; the header keeps the order."""
    stored, names = _stored(tensors), [plan.name for plan in tensors]
    ties = {plan.name: plan.shared_with for plan in tensors if plan.shared_with is not None}
    begins: dict[str, int] = {}
    at = 0
    for plan in sorted(stored, key=lambda plan: -plan.dtype.itemsize):
        begins[plan.name] = at
        at += plan.nbytes
    if reserved := ({METADATA} & {*names}) | ({FORMAT} & ties.keys()):
        what = f"a tensor is called {min(reserved)!r}, a name that safetensors reserves"
        raise ConfigError(what, _AS_PT)
    kinds = {torch_name: name for name, torch_name in DTYPES.items()}
    header: dict[str, Any] = {METADATA: {FORMAT: "pt", **ties}}
    for plan in stored:
        kind = dtype_name(plan.dtype)
        if kind not in kinds or (not plan.shape and kind in PACKED):
            scalars = " for a tensor of one element without a shape" if kind in kinds else ""
            what = f"tensor {shown(plan.name)}: safetensors cannot store {plan.dtype}{scalars}"
            raise ConfigError(what, _AS_PT)
        begin, numbers = begins[plan.name], PACKED.get(kind, 1)
        header[plan.name] = {
            "dtype": kinds[kind],
            "shape": [*plan.shape[:-1], *(numbers * size for size in plan.shape[-1:])],
            "data_offsets": [begin, begin + plan.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    holes = [_Hole(plan.name, len(head) + begins[plan.name], plan.nbytes) for plan in stored]
    with target.open("xb") as file:
        file.write(head)
        file.truncate(len(head) + at)
        os.fsync(file.fileno())
    _fill(target, holes, pieces)


def _write_folder(
    fmt: str, target: Path, tensors: Plans, pieces: Pieces | None, max_shard_bytes: int
) -> None:
    """Write the files of a folder, all names of a tied tensor into one file, and last the index."""
    names = [plan.name for plan in tensors]
    shared = {plan.name: plan.shared_with for plan in tensors if plan.shared_with is not None}
    is_sharded = fmt in sharded_files.SHARD_INDEXES
    homes = _shards(fmt, tensors, max_shard_bytes) if is_sharded else _homes(fmt, names, shared)
    files: dict[str, list[TensorPlan]] = {}
    for plan in tensors:
        files.setdefault(homes[plan.name], []).append(plan)
    write_file: Callable[[Path, Plans, Pieces | None], None] = _write_pt
    if fmt == "sharded":
        write_file = _write_safetensors
    elif fmt == "per_param":
        write_file = partial(_write_pt, alone=True)
    target.mkdir()
    jobs = [partial(write_file, target / name, plans, pieces) for name, plans in files.items()]
    if fmt == "per_param":  # the other files are written by several threads each
        run_parallel(jobs)
    else:
        for job in jobs:
            job()
    if not is_sharded:
        write_index(fmt, target, names, shared)
        return
    # A shard of safetensors has only the first name of a tied tensor in its header.
    weight_map = {n: home for n, home in homes.items() if n not in shared or fmt == "sharded_pt"}
    total = {"total_size": sum(plan.nbytes for plan in _stored(tensors))}
    sync(target)
    text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
    write_text(target / sharded_files.SHARD_INDEXES[fmt][0], f"{text}\n")


def _shards(fmt: str, tensors: Plans, max_shard_bytes: int) -> dict[str, str]:
    """Return the name of each tensor's shard."""
    stem, _, suffix = (
        sharded_files.SHARD_INDEXES[fmt][0].removesuffix(".index.json").rpartition(".")
    )
    numbers: dict[str, int] = {}
    count, filled = 1, 0
    for plan in tensors:
        if plan.shared_with is not None:
            numbers[plan.name] = numbers[plan.shared_with]
            continue
        if filled and filled + plan.nbytes > max_shard_bytes:
            count, filled = count + 1, 0
        filled += plan.nbytes
        numbers[plan.name] = count
    return {name: f"{stem}-{n:05d}-of-{count:05d}.{suffix}" for name, n in numbers.items()}


def _homes(fmt: str, keys: Iterable[str], shared: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each key's file in a folder of files for each key or module."""
    part_of: Callable[[str], str] = sharded_files.module_of if fmt == "per_module" else str
    return {key: file_name(part_of(shared.get(key, key))) for key in keys}


def write_index(fmt: str, folder: Path, keys: Iterable[str], shared: Mapping[str, str]) -> None:
    """Write ``index.json``, as the last file: a folder with an index counts as complete."""
    homes = _homes(fmt, keys, shared)
    files: dict[str, list[str]] = {}
    for key, name in homes.items():
        files.setdefault(name, []).append(key)
    values = {"tensors": homes, "files": files, "shared": dict(shared), "order": list(homes)}
    index = {"format": fmt, "version": INDEX_VERSION}
    index |= {name: values[name] for name in INDEX_FIELDS[fmt]}
    write_text(folder / INDEX_NAME, json.dumps(index, indent=1))


def _write_dcp(target: Path, tensors: Plans, pieces: Pieces | None) -> None:
    """Write each tensor, tied keys once, as an archive of ``torch.save`` into one file, and the metadata."""
    # Not at the top: this import takes a third of a second, and other formats do not need it.
    from torch.distributed.checkpoint import default_planner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import StorageMeta

    target.mkdir()
    scratch = target / "archive"  # torch's own name for an archive that it writes to a stream
    places: dict[str, tuple[int, int]] = {}
    holes, at = [], 0
    with (target / DCP_DATA).open("xb") as file:
        for plan in tensors:
            if plan.shared_with is not None:
                places[plan.name] = places[plan.shared_with]
                continue
            ((_, begin, size, crc_places),) = _with_holes(scratch, [plan], alone=True)
            with scratch.open("rb") as archive:
                length, end = os.fstat(archive.fileno()).st_size, begin + size
                for start, count in ((0, begin), (end, length - end)):
                    text = os.pread(archive.fileno(), count, start)
                    _write_all(file.fileno(), memoryview(text), at + start)
            crc_places = tuple(at + place for place in crc_places)
            holes.append(_Hole(plan.name, at + begin, size, crc_places))
            places[plan.name] = at, length
            at += -(-length // _ALIGNMENT) * _ALIGNMENT
    scratch.unlink(missing_ok=True)
    _fill(target / DCP_DATA, holes, pieces)
    state = {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in tensors}
    saved = default_planner.create_default_local_save_plan(state, True)
    (saved,), metadata = default_planner.create_default_global_save_plan([saved])
    metadata.planner_data = {one.name: (one.name,) for one in tensors}
    metadata.storage_data = {
        item.index: _StorageInfo(DCP_DATA, *places[item.index.fqn]) for item in saved.items
    }
    metadata.storage_meta = StorageMeta()
    if hasattr(metadata, "version"):  # torch 2.6 has none
        metadata.version = "1.0.0"
    write_bytes(target / DCP_INDEX, pickle.dumps(metadata))


def _write_tensorizer(target: Path, tensors: Plans, pieces: Pieces | None) -> None:
    """Write a file with the package tensorizer, a tied weight only under its first name."""
    with extra("loaders", "writing tensorizer's format"):
        from tensorizer import TensorSerializer, TensorType
    stored = _stored(tensors)
    needed = sum(
        _TENSORIZER_ENTRY_BYTES + len(f"{plan.name}{plan.dtype}".encode()) + 4 * len(plan.shape)
        for plan in stored
    )
    if needed > _TENSORIZER_INDEX_BYTES:
        what = f"the names of {len(stored):,} tensors may need {needed:,} bytes in the index, where"
        repair = "leave the strategy tensorizer out: --strategies streaming,safetensors_mmap"
        raise FormatLimit(f"{what} tensorizer reserves {_TENSORIZER_INDEX_BYTES:,}", repair)
    writer = TensorSerializer(str(target))
    try:
        for number, plan in enumerate(stored):
            whole, at = torch.empty(plan.shape, dtype=plan.dtype), 0
            for piece in pieces(plan.name) if pieces else ():
                whole.view(-1)[at : at + piece.numel()] = piece.reshape(-1)
                at += piece.numel()
            index = number % 2**16  # two bytes in the file; the strategy does not read them
            writer.write_tensor(index, plan.name, TensorType.STATE_DICT, whole)
    finally:
        writer.close()
    with target.open("rb+") as file:
        drop_written(file.fileno())


_WRITE: Final[Mapping[str, Callable[[Path, Plans, Pieces | None], None]]] = {
    "pt": _write_pt,
    "safetensors": _write_safetensors,
    "dcp": _write_dcp,
    "tensorizer": _write_tensorizer,
}
