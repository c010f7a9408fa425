"""Read the checkpoints that are folders of several files: an index, and files that it names.

::

    sharded      model-00001-of-00002.safetensors, ...; model.safetensors.index.json
    sharded_pt   pytorch_model-00001-of-00002.bin, ...; pytorch_model.bin.index.json
                     {"metadata": {"total_size": 123}, "weight_map": {"key": "model-00001-of-..."}}
    per_param    tok_emb.weight.pt, ...: one tensor each; index.json
                     {"format": "per_param", "version": 1, "tensors": {"tok_emb.weight":
                      "tok_emb.weight.pt", ...}, "shared": {"head.weight": "tok_emb.weight"}}
    per_module   trf_blocks.0.pt, ...: a flat state dict each; index.json
                     {"format": "per_module", "version": 1, "files": {"trf_blocks.0.pt":
                      ["trf_blocks.0.norm1.scale", ...], ...}, "shared": {...}, "order": [...]}
    dcp          *.distcp, each of several archives of torch.save; .metadata, a pickle

An index must name files by plain names in its folder. A shard may be a symbolic link to a file
elsewhere, because Hugging Face's cache uses links, and only the folder's owner can create a link.

``sharded`` is read as ``from_pretrained`` reads it: the tensors are those in the shards, even if the
index lists others; a note then names the difference. If ``weight_map`` differs from the state dict's
list of names, ``weighin.order`` in the index's metadata has the list. weighin refuses two shards with
different values for one tensor; ``from_pretrained`` silently takes the value of the later shard.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, combinations
from math import prod
from operator import gt
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream import pickles, safetensors_files, torch_files
from weighin.stream.foreign import (
    broken_link,
    damaged,
    map_late,
    read_object,
    truncated,
    unreadable,
)
from weighin.stream.pickles import Named, Opaque
from weighin.stream.slices import ITEM_BYTES, Checkpoint, Slice, are_equal, is_sizes, row_major
from weighin.stream.state_dicts import with_key
from weighin.text import first_names, plain, shown

Shape = tuple[int, ...]

INDEX_NAME: Final = "index.json"
INDEX_VERSION: Final = 1
INDEX_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "per_param": ("tensors", "shared"),
    "per_module": ("files", "shared", "order"),
}
"""The fields of ``index.json`` by the format's name."""

SHARD_INDEXES: Final = {
    "sharded": ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"),
    "sharded_pt": ("pytorch_model.bin.index.json", "diffusion_pytorch_model.bin.index.json"),
}
"""The names of an index in a folder: of transformers, under which weighin writes, and of diffusers."""

DCP_INDEX: Final = ".metadata"

MAX_SHARD_BYTES: Final = 5 * 1024**3
"""The largest size of a shard, unless a single tensor is larger; Hugging Face's default is 5 GB."""

_ANY_INDEX: Final = {
    "sharded": re.compile(r".+\.safetensors\.index(\.[\w-]+)?\.json"),
    "sharded_pt": re.compile(r".+\.bin\.index(\.[\w-]+)?\.json"),
}
_HEAD_BYTES: Final = 4096  # of an index.json, in which its format stands
_ORDER: Final = "weighin.order"
_SHARDS_AGAIN: Final = "write the folder again: model.save_pretrained(FOLDER), or weighin convert"


def format_of(path: Path) -> str:
    """Return the name of the format of a folder, or of an index of shards; "" for another path."""
    if name := next((name for name in SHARD_INDEXES if _shard_index(path, name)), ""):
        return name
    if (path / DCP_INDEX).is_file():
        return "dcp"
    try:
        with (path / INDEX_NAME).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return ""
    is_module = re.search(rb'"format"\s*:\s*"per_module"', head)
    return "per_module" if is_module else "per_param"


def read(path: Path, name: str, key: str = "") -> Checkpoint:
    """Return the tensors of a checkpoint in the format ``name``, in the state dict's order."""
    index = _shard_index(path, name)
    if index:
        found = _read_shards(index, name)
    else:
        found = _read_dcp(path, key) if name == "dcp" else _read_keys(path, name)
    found.format = name
    return found


def _file(index: Path, name: object, key: str, repair: str) -> Path:
    """Return the file that an index names for a tensor; refuse a name that leads out of the folder."""
    if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
        what = f"the file that holds {shown(key)} lies outside the folder: {shown(name)}"
        raise CheckpointError(f"{index}: {what}", repair)
    file = index.parent / name
    if not os.path.isfile(file):  # noqa: PTH113 (False for an impossible name)
        raise broken_link(file) or CheckpointError(
            f"{index}: the file {shown(name)}, which holds {shown(key)}, is missing", repair
        )
    return file


def _files(index: Path, homes: Mapping[str, object], repair: str) -> dict[Path, list[str]]:
    """Return the files of an index, each with its tensors; ``homes`` maps tensors to file names."""
    files: dict[object, Path] = {}
    keys: dict[Path, list[str]] = {}
    for key, name in homes.items():
        if not isinstance(name, str) or name not in files:
            files[name] = _file(index, name, key, repair)
        keys.setdefault(files[name], []).append(key)
    return keys


# Shards of Hugging Face


def _shard_index(path: Path, name: str) -> Path | None:
    if path.is_dir():
        indexes = (path / index for index in SHARD_INDEXES.get(name, ()))
        return next((index for index in indexes if index.is_file()), None)
    is_index = name in _ANY_INDEX and _ANY_INDEX[name].fullmatch(path.name)
    return path if is_index and path.is_file() else None


def _read_shards(index: Path, fmt: str) -> Checkpoint:
    content = read_object(index, _SHARDS_AGAIN)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "no 'weight_map'", _SHARDS_AGAIN)
    read_shard = safetensors_files.read if fmt == "sharded" else torch_files.read
    files = _files(index, weight_map, f"add the missing file, or {_SHARDS_AGAIN}")
    places: dict[str, Slice] = {}
    faults: dict[str, list[str]] = {}
    for file, stored in zip(files, map_late(read_shard, files), strict=True):
        # A tied name of safetensors is not in the map; its tensor has the offset of a name in the map.
        listed = {one.offset for one in stored if weight_map.get(one.name) == file.name}
        for place in stored:
            home = weight_map.get(place.name)
            if twice := places.get(place.name):
                _check_equal(place, twice)
                faults.setdefault("in two shards", []).append(place.name)
            elif home not in (None, file.name):
                faults.setdefault("in another shard", []).append(place.name)
            elif home is None and (fmt == "sharded_pt" or place.offset not in listed):
                faults.setdefault("not listed", []).append(place.name)
            places.setdefault(place.name, place)
    if absent := [name for name in weight_map if name not in places]:
        faults["in no shard"] = absent
    order = metadata.get(_ORDER) if isinstance(metadata, dict) else None
    if order is not None and not _names_all(order, places):
        what = f"{_ORDER} is not a list of the checkpoint's tensor names"
        raise CheckpointError(f"{index}: {what}", _SHARDS_AGAIN)
    names = dict.fromkeys(order or [*weight_map, *places])
    found = Checkpoint(places[name] for name in names if name in places)
    found.files = (index, *files)
    found.notes = tuple(
        f"{index}: contradicts its shards, which count: {len(names)} key{'s' * (len(names) > 1)}"
        f" {fault} ({first_names(map(plain, names))})"
        for fault, names in faults.items()
    )
    return found


def _names_all(order: Any, names: Mapping[str, object]) -> bool:
    """Tell whether a list from an index has each of the names, once."""
    are_texts = isinstance(order, list) and all(isinstance(name, str) for name in order)
    return are_texts and sorted(order) == sorted(names)


def _check_equal(one: Slice, other: Slice) -> None:
    comparable = one.shape == other.shape and one.contiguous and other.contiguous
    if not (comparable and are_equal(one, other)):
        later = max(one.file.name, other.file.name)
        raise CheckpointError(
            f"{one.file}: {shown(one.name)} is also in shard {other.file.name!r}, with other values",
            "decide which values are right, and write the shards again without the other tensor;"
            f" from_pretrained takes the values in {later}",
        )


# One file for each key or module

_NUMBERED: Final = re.compile(r"(.*?\.\d+)\..")
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_NAME: Final = 200  # file systems allow 255 bytes


def file_name(key: str) -> str:
    """Return the name of a key's file: the key and ".pt", with unsafe bytes percent-encoded.

    Different keys get different names, and no name leads out of the folder.
    """
    encoded = key.encode("utf-8", "surrogatepass")
    name = _UNSAFE.sub(lambda match: f"%{match[0][0]:02X}".encode(), encoded)
    text = re.sub(r"\A\.", "%2E", name.decode())
    if len(text) > _LONGEST_NAME:
        # No escape contains "%-", so that a hashed name never equals another key's name.
        text = f"{text[:150]}%-{sha256(name).hexdigest()[:32]}"
    return f"{text or '%'}.pt"


def module_of(key: str) -> str:
    """Return the layer or submodule of a key, which is the key up to its first number, or else the
    key's first part: "trf_blocks.3", "tok_emb".
    """
    numbered = _NUMBERED.match(key)
    return numbered[1] if numbered else key.partition(".")[0]


def _read_keys(folder: Path, fmt: str) -> Checkpoint:
    path = folder / INDEX_NAME
    again = f"convert the checkpoint again: weighin convert CHECKPOINT OUT --format {fmt}"

    def refused(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {what}", again)

    index = read_object(path, again)
    if (index.get("format"), index.get("version")) != (fmt, INDEX_VERSION):
        raise refused(f"not an index of the format {fmt} in version {INDEX_VERSION}")
    try:
        homes: dict[str, object] = {}
        if fmt == "per_param":
            homes.update(index["tensors"].items())
        for name, keys in index.get("files", {}).items():
            for key in keys:
                if key in homes:
                    raise refused(f"{shown(key)} occurs twice")
                homes[key] = name
        shared, order = index["shared"].items(), index.get("order", [*homes])
        is_whole = bool(homes) and _names_all(order, homes)
    except (AttributeError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        fields = " and ".join(map(repr, INDEX_FIELDS[fmt]))
        raise damaged(path, f"{fields} must name each tensor exactly once", again)
    files = _files(path, homes, again)

    def read_file(file: Path) -> dict[str, Slice]:
        if fmt == "per_module":
            return {one.name: one for one in torch_files.read(file)}
        one = torch_files.read_one(file, files[file][0])
        return {key: replace(one, name=key) for key in files[file]}

    places: dict[str, Slice] = {}
    for file, stored in zip(files, map_late(read_file, files), strict=True):
        if odd := set(stored) ^ set(files[file]):
            what = f"its keys differ from those that {INDEX_NAME} lists, such as {shown(min(odd))}"
            raise CheckpointError(f"{file}: {what}", again)
        places |= stored
    for key, first in shared:
        one, other = places.get(key), places.get(first) if isinstance(first, str) else None
        if one is None or other is None or one.place != other.place:
            raise refused(f"{shown(key)} is tied to {shown(first)} but stored elsewhere")
    found = Checkpoint(places[key] for key in order)
    found.files = tuple(sorted([path, *files]))
    return found


# torch.distributed.checkpoint

_DCP_AGAIN: Final = (
    "save it again with torch.distributed.checkpoint.save; if torch.distributed.checkpoint.load cannot"
    " read it either, the folder is damaged"
)
_MERGE: Final = (
    "merge it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
)
_MODULE: Final = "torch.distributed.checkpoint.metadata"
_METADATA: Final = frozenset({
    f"{_MODULE}.Metadata", "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
})  # fmt: skip
_TENSOR: Final = f"{_MODULE}.TensorStorageMetadata"
_BYTES: Final = (
    f"{_MODULE}.BytesStorageMetadata"  # a value other than a tensor, in a pickle of its own
)
_KNOWN: Final = _METADATA | {
    _TENSOR, _BYTES, f"{_MODULE}.MetadataIndex", f"{_MODULE}.ChunkStorageMetadata",
    f"{_MODULE}.TensorProperties", f"{_MODULE}.StorageMeta", f"{_MODULE}._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout",
    "torch.Size", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath", "collections.OrderedDict",
    "builtins.getattr",  # Python 3.11.0 to 3.11.3 pickles enum members with getattr
}  # fmt: skip
_DTYPE: Final = re.compile(r"torch\.((q?u?int|bits|b?float|complex)\d\w{,30}|bool)")
_DEEPEST: Final = 5  # parts of a path in nested dicts
_MOST_BLOCKS: Final = 2_000  # of one tensor; every pair of blocks is compared


def _read_dcp(folder: Path, key: str) -> Checkpoint:
    """Return all tensors, or only those whose names begin with ``key`` and a dot.

    torch flattens nested dicts into dotted names: "model.weight", "optimizer.state.weight.step".
    """
    path = folder / DCP_INDEX
    metadata = _dcp_metadata(path)
    tensors, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not (isinstance(tensors, dict) and isinstance(stored, dict) and tensors):
        raise damaged(path, "it has no tensors or no offsets", _DCP_AGAIN)
    places: dict[object, list[tuple[Any, Any]]] = {}
    for index, place in stored.items():
        fields = _fields(index)
        if isinstance(name := fields.get("fqn"), str):
            places.setdefault(name, []).append((fields.get("offset"), _fields(place)))
    found, archives = Checkpoint(), dict[tuple[str, int], Slice]()
    values: dict[str, object] = {}
    paths = metadata.get("planner_data")  # the keys of each tensor in nested dicts
    sizes: dict[str, int] = {}  # of the state dicts in nested dicts, but those of optimizers
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise damaged(path, f"a key is not a string: {shown(name)}", _DCP_AGAIN)
        if key and not name.startswith(f"{key}."):
            continue
        if isinstance(tensor, Opaque) and tensor.kind == _BYTES:
            values[name] = Opaque("pickled object")
            continue
        found.append(_dcp_tensor(path, name, tensor, places.get(name, []), archives))
        keys: Any = paths.get(name) if isinstance(paths, dict) else None
        # A part is the key in a dict or the index in a list; to print another value may take for ever.
        is_path = isinstance(keys, tuple) and 1 < len(keys) <= _DEEPEST
        if is_path and all(isinstance(one, str | int) for one in keys):
            inside = ".".join(one if isinstance(one, str) else shown(one) for one in keys[:-1])
            if "optim" not in inside.lower():
                sizes[inside] = sizes.get(inside, 0) + found[-1].nbytes
    if values and not key and (way := with_key(sizes)):
        what = f"not a flat state dict of tensors: {shown(next(iter(values)))} is not a tensor"
        raise CheckpointError(f"{path}: {what}", way)
    found.values, found.files = values, (path, *sorted(folder.glob("*.distcp")))
    return found


def _dcp_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            pickled = pickles.load(path, file, resave=_DCP_AGAIN)
    except OSError as error:
        raise unreadable(path, error) from error
    for name in pickled.names:
        if name not in _KNOWN and not _DTYPE.fullmatch(name):
            raise CheckpointError(
                f"{path}: the pickle holds more than tensors, and weighin did NOT execute it: it"
                f" refers to {name}",
                f"if you trust the folder, {_MERGE}",
            )
    if not isinstance(pickled.value, Opaque) or pickled.value.kind not in _METADATA:
        raise CheckpointError(f"{path}: not metadata of torch.distributed.checkpoint", _DCP_AGAIN)
    return _fields(pickled.value)


def _fields(value: Any) -> Any:
    """Return the attributes that the pickle sets on an object."""
    state = value.contents[-1] if isinstance(value, Opaque) else None
    return state if isinstance(state, dict) else {}


def _dcp_tensor(
    path: Path, key: str, tensor: Any, places: list[tuple[Any, Any]], archives: dict[Any, Slice]
) -> Slice:
    fields = _fields(tensor)
    chunks, shape, properties = fields.get("chunks"), fields.get("size"), fields.get("properties")
    named = None
    if isinstance(properties, Opaque) and isinstance(properties.contents[-1], tuple):
        named = next(iter(properties.contents[-1]), None)
    chunks = chunks if isinstance(chunks, list) else []
    blocks = [(one.get("offsets"), one.get("sizes")) for one in map(_fields, chunks)]
    are_sizes = all(map(is_sizes, chain([shape], *blocks)))
    if not are_sizes or not isinstance(named, Named) or getattr(tensor, "kind", "") != _TENSOR:
        raise damaged(path, f"{shown(key)} is not described as a tensor", _DCP_AGAIN)
    if (dtype := named.name.removeprefix("torch.")) not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {shown(key)} has the dtype torch.{dtype}; weighin does not read this dtype",
            "load the checkpoint with torch, and save tensors of another dtype",
        )
    shape, blocks = tuple(shape), [(tuple(start), tuple(size)) for start, size in blocks]
    _check_tiles(path, key, shape, blocks)
    by_start = {tuple(start): place for start, place in places if is_sizes(start)}
    parts = []
    for start, size in blocks:
        place = by_start.get(start, {})
        if place.get("transform_descriptors"):
            what = f"{shown(key)} was transformed (compressed) when saved"
            raise CheckpointError(f"{path}: {what}", _MERGE)
        name: Any = place.get("relative_path")
        offset: Any = place.get("offset")
        length: Any = place.get("length")
        if not (isinstance(name, str) and is_sizes((offset, length))):
            raise damaged(path, f"no valid offset of {shown(key)} at {start}", _DCP_AGAIN)
        if (name, offset) not in archives:
            file = _file(path, name, key, _DCP_AGAIN)
            if offset + length > (file_bytes := file.stat().st_size):
                raise truncated(file, shown(key), offset + length, file_bytes)
            archives[name, offset] = torch_files.read_one(file, key, offset, length)
        where = replace(archives[name, offset], name=key, start=start)
        if (where.shape, where.dtype_name) != (size, dtype):
            raise CheckpointError(
                f"{where.file}: {shown(key)} has the shape {where.shape} and the dtype"
                f" torch.{where.dtype_name} here, but {size} and torch.{dtype} in {DCP_INDEX}",
                _DCP_AGAIN,
            )
        parts.append(where)
    if len(parts) == 1:
        return replace(parts[0], start=())
    whole = replace(parts[0], shape=shape, stride=row_major(shape), start=())
    return replace(whole, parts=tuple(parts))


def _check_tiles(path: Path, key: str, shape: Shape, blocks: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CheckpointError unless at most 2,000 blocks contain each element, and exactly once."""
    for start, size in blocks:
        ends = [at + length for at, length in zip(start, size, strict=False)]
        if not len(start) == len(size) == len(shape) or any(map(gt, ends, shape)):
            what = f"the part of {shown(key)} at {start} is outside the shape {shape}"
            raise damaged(path, what, _DCP_AGAIN)
    if len(blocks) > _MOST_BLOCKS:
        raise CheckpointError(f"{path}: {shown(key)} is stored in {len(blocks):,} parts", _MERGE)
    solid = [block for block in blocks if prod(block[1])]
    for (start, size), (other, others) in combinations(solid, 2):
        if all(
            a < b + n and b < a + m for a, m, b, n in zip(start, size, other, others, strict=True)
        ):
            what = f"the parts of {shown(key)} at {start} and {other} overlap"
            raise damaged(path, what, _DCP_AGAIN)
    if not blocks or sum(prod(size) for _, size in solid) != prod(shape):  # without an overlap
        raise damaged(path, f"the parts of {shown(key)} leave a gap in {shape}", _DCP_AGAIN)
