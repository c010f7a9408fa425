"""Read the files of ``torch.save``: zip archives, and the format of torch before 1.6.

A zip archive has the pickled state dict in the record ``data.pkl``, and a record for each storage.
The older format, which torch.save(..., _use_new_zipfile_serialization=False) still writes, is::

    pickle   0x1950a86a20f9469cfc6c, the magic number
    pickle   1001, the version
    pickle   {"little_endian": True, ...}
    pickle   the state dict; each tensor refers to its storage by a key
    pickle   [key, ...], the order of the storages
    then for each storage: 8 bytes with its number of elements, and its bytes
"""

import io
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, Final

from weighin.errors import CheckpointError
from weighin.stream import foreign, pickles
from weighin.stream.pickles import Named, Opaque, type_name
from weighin.stream.slices import Checkpoint, Slice
from weighin.text import first_names, plain, shown

MAGIC: Final = 0x1950A86A20F9469CFC6C
VERSION: Final = 1001

_MOST_DIRECTORY_BYTES: Final = 8 * 1024**2  # of a zip file: the directory of 100,000 tensors
_LOCAL_BYTES: Final = 30  # of a record's own header, before its name
_LONGEST_KEY: Final = 200  # characters of a key that advice names, which must be whole
_BIG_ENDIAN: Final = "written on a big-endian machine, whose order of bytes weighin does not read"
_OPTIM_STATES: Final = "_optim_states.pt"
_SAVE: Final = "save the weights alone: torch.save(model.state_dict(), ...)"
_PLAIN: Final = (
    "load it with the code that wrote it, turn it into a plain tensor with values (tensor.to_dense(),"
    " dequantize(), unbind(), full_tensor(), resolve_conj(), view(torch.uint8), cpu()), and save it:"
    " torch.save({NAME: TENSOR, ...}, ...)"
)
_FROM_NUMPY: Final = (
    "save tensors instead: torch.save({name: torch.from_numpy(array) for name, array in ...}, ...)"
)

Record = tuple[int, int]  # the offset of its first byte in the file, and its size in bytes


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file's value, and the places of its storages by key."""

    path: Path
    value: Any
    places: dict[str, Record]
    refused: bool = False

    def slice(self, name: str, tensor: Slice) -> Slice:
        """Return where a tensor of the pickle lies, under the name ``name``."""
        start, size = self.places.get(tensor.name, (0, 0))
        if tensor.storage_bytes != size:  # torch.load refuses a longer record, too
            what = f"has {tensor.storage_bytes:,} bytes, but its record in the file has {size:,}"
            raise foreign.damaged(self.path, f"the storage of {shown(name)} {what}")
        offset, dtype = start + tensor.offset, tensor.dtype_name
        return Slice(name, tensor.shape, tensor.stride, dtype, self.path, offset, start, size)

    def checkpoint(self, key: str) -> Checkpoint:
        """Return the state dict at the dotted ``key``; for "", the file itself must be one."""
        found = [*islice(_at_key(self.value, key, set()), 1)] if key else [self.value]
        if not found:
            raise no_key(self.path, key, self.value if isinstance(self.value, dict) else ())
        inside = found[0]
        if not isinstance(inside, dict):
            raise self._no_state_dict(key if isinstance(inside, Opaque) else "", inside)
        tensors: dict[str, Slice] = {}
        values: dict[Any, Any] = {}
        for name, item in inside.items():
            is_tensor = isinstance(name, str) and isinstance(item, Slice)
            (tensors if is_tensor else values)[name] = item
        seen: set[int] = set()
        # Last such as a dtype, which is beside a quantised tensor.
        for name, item in sorted(values.items(), key=lambda one: isinstance(one[1], Named)):
            if tensors and is_extra_state(name):
                continue  # torch.load reads it
            holds = any(
                isinstance(one, Slice) or getattr(one, "is_tensor", False)
                for _, one in _inside(key, name, item, seen)
            )
            if holds or not (key and tensors and isinstance(name, str)):
                odd = (each for each in _inside(key, name, item, set()) if _is_object(each[1]))
                raise self._no_state_dict(*next(odd, (name, item)))
        state = Checkpoint(self.slice(name, tensor) for name, tensor in tensors.items())
        state.files, state.values, state.refused = (self.path,), values, self.refused
        state.metadata = getattr(inside, "metadata", None)
        return state

    def _no_state_dict(self, place: Any, item: Any) -> CheckpointError:
        sizes = _sizes(self.value)
        if sizes and not any(sizes.values()):
            return all_empty(self.path)
        error = _no_tensor(self.path, place, item)
        return CheckpointError(error.message, with_key(sizes) or error.repair)


def read(path: Path, key: str = "") -> Checkpoint:
    """Return the state dict in a file of ``torch.save``; for GPT-2 XL, this takes 0.02 s."""
    return open_file(path).checkpoint(key)


def read_one(path: Path, name: str, base: int = 0, length: int | None = None) -> Slice:
    """Return the tensor, to be called ``name``, that ``torch.save`` wrote alone into a file."""
    file = open_file(path, base, length)
    if isinstance(file.value, Slice):
        return file.slice(name, file.value)
    if _is_object(file.value):
        raise _no_tensor(path, name, file.value)
    raise CheckpointError(f"{path}: holds a {type_name(file.value)}, not a tensor", foreign.RESAVE)


def open_file(path: Path, base: int = 0, length: int | None = None) -> TorchFile:
    """Return the content of a file of ``torch.save``, or of the archive at ``base`` in it."""
    head = foreign.check_present(path) if length is None else b"PK"
    if not foreign.is_legacy(head) and not foreign.is_zip(head):
        raise foreign.unknown(path, head)
    try:
        with path.open("rb") as file:
            if foreign.is_legacy(head):
                return _open_legacy(path, file)
            size = os.fstat(file.fileno()).st_size if length is None else length
            return _open_archive(_Window(path, file.fileno(), base, size))
    except OSError as error:
        raise foreign.unreadable(path, error) from error


class _Window:
    """A part of an open file, as ``zipfile`` reads it: not any number of bytes of a crafted archive."""

    def __init__(self, path: Path, descriptor: int, base: int, length: int) -> None:
        self.path, self.descriptor, self.base, self.length = path, descriptor, base, length
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        at += {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if at < 0:
            raise OSError("its table of contents (zip's central directory) begins before byte 0")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        data = self.bytes_at(self._at, self.length if size < 0 else size, _MOST_DIRECTORY_BYTES)
        self._at += len(data)
        return data

    def bytes_at(self, at: int, size: int, most: int) -> bytes:
        inside = max(0, min(size, self.length - at)) if at >= 0 else 0
        if inside > most:
            what = f"its pickle or zip directory has {inside:,} bytes; weighin reads {most:,}"
            raise CheckpointError(f"{self.path}: {what}", foreign.SHARDS)
        return os.pread(self.descriptor, inside, self.base + at) if inside else b""


def _open_archive(window: _Window) -> TorchFile:
    path, records = window.path, _records(window)
    texts = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(texts) != 1:
        what = f"its zip archive has {len(texts)} files data.pkl, but torch.save writes one"
        raise CheckpointError(f"{path}: {what}", foreign.RESAVE)
    root = texts[0].removesuffix("data.pkl")
    order = records.get(f"{root}byteorder")
    if order and window.bytes_at(*order, pickles.MOST_BYTES) != b"little":
        raise CheckpointError(f"{path}: {_BIG_ENDIAN}", foreign.resaving(path))
    start, size = records[texts[0]]
    text = io.BytesIO(window.bytes_at(start, size, pickles.MOST_BYTES))
    pickled = pickles.load(path, text, start)
    places = {
        name.removeprefix(f"{root}data/"): (window.base + at, size)
        for name, (at, size) in records.items()
        if name.startswith(f"{root}data/")
    }
    return TorchFile(path, pickled.value, places, pickled.refused)


def _records(window: _Window) -> dict[str, Record]:
    """Return the records of a zip archive, which lie apart in the file and have different names."""
    path = window.path
    try:
        archive = zipfile.ZipFile(window)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:  # fmt: skip
        if "not a zip file" in str(error):
            what = "truncated: the zip archive has no end record"
            raise CheckpointError(f"{path}: {what}", foreign.AGAIN) from None
        raise foreign.damaged(path, f"{error}") from None
    infos, end = archive.infolist(), archive.start_dir
    if other := foreign.other_zip(path, [info.filename for info in infos]):
        raise other
    for at in (info.header_offset for info in infos if 0 <= info.header_offset < end):
        # The disk may read all headers at the same time.
        size = io.DEFAULT_BUFFER_SIZE
        os.posix_fadvise(window.descriptor, window.base + at, size, os.POSIX_FADV_WILLNEED)
    records: dict[str, Record] = {}
    folded: dict[bytes, str] = {}
    infos.sort(key=lambda info: info.header_offset)
    reached = 0
    heads = foreign.map_late(
        lambda info: window.bytes_at(info.header_offset, _LOCAL_BYTES, _LOCAL_BYTES), infos
    )
    for info, head in zip(infos, heads, strict=True):
        name, shows = info.filename, f"record {shown(info.filename)}"
        if info.flag_bits & 1 or info.compress_type or info.compress_size != info.file_size:
            what = f"{shows} is compressed or encrypted"
            raise CheckpointError(f"{path}: {what}", foreign.resaving(path))
        # Only ASCII's case, as torch.load ignores it.
        lower = name.encode("utf-8", "surrogatepass").lower()
        if (other_name := folded.setdefault(lower, name)) != name or name in records:
            what = f"torch.load cannot tell {shows} from record {shown(other_name)}"
            raise foreign.damaged(path, what)
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        at = info.header_offset + _LOCAL_BYTES + lengths
        lies_alone = reached <= info.header_offset and at + info.file_size <= end
        if not lies_alone or not head.startswith(b"PK\3\4"):
            place = f"{shows} at byte {info.header_offset:,}"
            raise foreign.damaged(path, f"{place} overlaps another, or lies outside the archive")
        records[name] = at, info.file_size
        reached = at + info.file_size
    if infos and infos[0].header_offset:
        raise foreign.damaged(path, "something lies before the archive, where torch.load reads it")
    return records


def _open_legacy(path: Path, file: BinaryIO) -> TorchFile:
    magic, version, system = (pickles.load(path, file).value for _ in range(3))
    if (magic, version) != (MAGIC, VERSION):
        what = f"its format has another version than {VERSION}, the only one that weighin reads"
        raise CheckpointError(f"{path}: {what}", foreign.resaving(path))
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{path}: {_BIG_ENDIAN}", foreign.resaving(path))
    pickled = pickles.load(path, file)
    keys, storages = pickles.load(path, file).value, pickled.storages
    file_bytes, at = os.fstat(file.fileno()).st_size, file.tell()
    are_texts = isinstance(keys, list) and {*map(type, keys)} <= {str}
    places: dict[str, Record] = {}
    # Of a list that does not match, no storage has a place: its first tensor is refused.
    for key in keys if are_texts and sorted(keys) == sorted(storages) else ():
        name, end = f"storage {shown(key)}", at + 8 + storages[key].nbytes
        if end > file_bytes:
            raise foreign.truncated(path, name, end, file_bytes)
        numel = int.from_bytes(os.pread(file.fileno(), 8, at), "little")
        if numel != storages[key].numel:
            what = f"has {numel:,} elements, but its tensors need {storages[key].numel:,}"
            raise foreign.damaged(path, f"{name} at byte {at:,} {what}")
        places[key] = at + 8, end - at - 8
        at = end
    return TorchFile(path, pickled.value, places, pickled.refused)


def is_extra_state(name: object) -> bool:
    """Tell whether a name in a state dict is the name of a module's extra state."""
    return isinstance(name, str) and "_extra_state" in name.split(".")


def _at_key(value: Any, key: str, seen: set[tuple[int, str]]) -> Iterator[Any]:
    """Yield all that a dotted key can mean, as names may contain dots; last the values below it by their rest."""
    if not isinstance(value, dict) or (id(value), key) in seen:
        return
    seen.add((id(value), key))  # a crafted dict may hold itself
    if key in value:
        yield value[key]
    parts = key.split(".")
    for size in range(len(parts) - 1, 0, -1):
        yield from _at_key(value.get(".".join(parts[:size])), ".".join(parts[size:]), seen)
    start = f"{key}."
    below = (name for name in value if isinstance(name, str) and name.startswith(start))
    if inside := {name.removeprefix(start): value[name] for name in below}:
        yield inside


def _inside(key: str, name: Any, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the value at ``name``, and all in it that may hold tensors, in order, with dotted keys; none ``seen``."""
    todo = [(key, name, value)]
    while todo:
        above, name, one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))  # a crafted pickle may refer to one value many times
        yield (above := _joined(above, name)), one
        if isinstance(one, Opaque):
            items: Iterable[tuple[Any, Any]] = zip(repeat(None), one.contents)
        elif isinstance(one, dict | list | tuple):
            items = one.items() if isinstance(one, dict) else enumerate(one)
        else:
            continue
        kinds = (dict, list, tuple, Opaque, Slice)
        todo += reversed([(above, name, each) for name, each in items if isinstance(each, kinds)])


def _joined(above: str, name: Any) -> str:
    if not isinstance(name, str | int) or len(above) > 100:
        return above
    return f"{above}.{plain(str(name))}" if above else plain(str(name))


def _is_object(value: Any) -> bool:
    if not isinstance(value, Opaque):
        return False
    return value.is_tensor or ("." in value.kind and not pickles.is_safe(value.kind))


def _sizes(value: Any) -> dict[str, int]:
    """Map the dotted key of each nested state dict to its size in bytes; leave out optimizers."""
    places: dict[str, int] = {}
    todo, seen = [("", value)], set[int]()  # a crafted pickle may refer to one dict many times
    while todo:
        above, inside = todo.pop()
        if not isinstance(inside, dict) or id(inside) in seen:
            continue
        seen.add(id(inside))
        rest = {name: one for name, one in inside.items() if not is_extra_state(name)}
        tensors = [one for one in rest.values() if isinstance(one, Slice)]
        if above and tensors and len(tensors) == len(rest) and {*map(type, rest)} == {str}:
            places[above] = sum(one.nbytes for one in tensors)
            continue
        start = f"{above}." if above else ""
        for name in reversed(rest):
            is_usual = isinstance(name, str) and 0 < len(name) <= _LONGEST_KEY - len(start)
            if is_usual and "optim" not in name.lower():
                todo.append((f"{start}{name}", rest[name]))
    return places


def with_key(sizes: Mapping[str, int]) -> str:
    """Return advice to select one of the three largest state dicts; ``sizes`` has the bytes of each."""
    from weighin.units import format_bytes  # imports decimal, which few loads need

    usual = (place for place in sizes if sizes[place] and len(place) <= _LONGEST_KEY)
    places = sorted(usual, key=lambda place: -sizes[place])[:3]
    ways = " or ".join(f"--key {one} ({format_bytes(sizes[one])})" for one in places)
    return foreign.select_key(ways, places[0]) if places else ""


def no_key(path: Path, key: str, keys: Sequence[object] | Mapping[Any, object]) -> CheckpointError:
    names = first_names(plain(one) for one in dict.fromkeys(keys) if isinstance(one, str))
    repair = with_key(_sizes(keys)) or f"its keys: {names or 'none'}"
    return CheckpointError(f"{path}: has no key {shown(key)}", repair)


def is_beside_weights(path: Path) -> bool:
    """Tell whether a folder, or a file's folder, has files in which ZeRO-3 keeps weights."""
    folder = path if path.is_dir() else path.parent
    return next(folder.glob(f"*{_OPTIM_STATES}"), None) is not None


def all_empty(path: Path) -> CheckpointError:
    """Return the exception for a checkpoint whose tensors are all empty, as in ZeRO-3's model states."""
    if is_beside_weights(path):
        return CheckpointError(
            f"{path}: all tensors are empty, because ZeRO-3 keeps the weights in *{_OPTIM_STATES}",
            f"give the folder of all files: {path if path.is_dir() else path.parent}",
        )
    return CheckpointError(
        f"{path}: all tensors have 0 elements, so the checkpoint holds no weights",
        "save the whole weights: a process that shards a model (ZeRO-3, FSDP) must gather them"
        " before it calls state_dict()",
    )


def _no_tensor(path: Path, place: Any, item: Any) -> CheckpointError:
    """Return the exception for a value that is no plain tensor, at the dotted key ``place`` of a file."""
    where, title = "it" if place == "" else shown(place), type_name(item)
    record = item if isinstance(item, Opaque) else Opaque("")
    states = [one.keys() for one in record.contents if isinstance(one, dict)]
    if isinstance(place, Opaque):
        what, repair = f"not a state dict: a dict has a key of type {place.kind}", _SAVE
    elif record.is_tensor:
        what, repair = f"{where} is a {title}; weighin reads plain tensors", _PLAIN
    elif title.endswith("multiarray._reconstruct"):
        what, repair = f"{where} is a NumPy array, not a tensor", _FROM_NUMPY
    elif any(keys >= {"_parameters", "_buffers"} for keys in states):
        what = f"{where} is a whole pickled module ({title}), and was NOT executed"
        repair = pickles.IF_TRUSTED
    elif _is_object(record):
        what = f"holds more than tensors, and was NOT executed: {where} refers to {title}"
        repair = pickles.IF_TRUSTED
    elif place == "":
        what, repair = f"holds a {title}, not a state dict", _SAVE
    else:
        what, repair = f"not a flat state dict: {where} holds a {title}", _SAVE
    return CheckpointError(f"{path}: {what}", repair)
