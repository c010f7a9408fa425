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
index lists others. But weighin refuses two shards with different values for one tensor, of which
``from_pretrained`` silently takes the later.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, combinations
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream import foreign, pickles, safetensors_files, torch_files
from weighin.stream.pickles import Named, Opaque
from weighin.stream.slices import ITEM_BYTES, Checkpoint, Slice, are_equal, is_sizes, row_major
from weighin.stream.torch_files import with_key
from weighin.text import shown

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
MAX_SHARD_BYTES: Final = 5 * 1024**3  # Hugging Face's default is 5 GB

_ANY_INDEX: Final = {"sharded": "safetensors", "sharded_pt": "bin"}
_SHARDS_AGAIN: Final = "write the folder again: model.save_pretrained(FOLDER), or weighin convert"


def format_of(path: Path) -> str:
    """Return the name of the format of a folder, or of an index of shards; "" for another path."""
    if name := next((name for name in SHARD_INDEXES if _shard_index(path, name)), ""):
        return name
    if (path / DCP_INDEX).is_file():
        return "dcp"
    try:
        with (path / INDEX_NAME).open("rb") as file:
            head = file.read(4096)  # where the format stands
    except OSError:
        return ""
    is_module = re.search(rb'"format"\s*:\s*"per_module"', head)
    return "per_module" if is_module else "per_param"


def read(path: Path, name: str, key: str = "") -> Checkpoint:
    """Return the tensors of a checkpoint in the format ``name``, in the state dict's order."""
    if index := _shard_index(path, name):
        return _read_shards(index, name)
    return _read_dcp(path, key) if name == "dcp" else _read_keys(path / INDEX_NAME, name)


def _shard_index(path: Path, name: str) -> Path | None:
    if path.is_dir():
        indexes = (path / index for index in SHARD_INDEXES.get(name, ()))
        return next((index for index in indexes if index.is_file()), None)
    is_index = re.fullmatch(rf".+\.{_ANY_INDEX.get(name)}\.index(\.[\w-]+)?\.json", path.name)
    return path if is_index and path.is_file() else None


def _file(index: Path, name: object, key: str, repair: str) -> Path:
    """Return the file that an index names for a tensor; refuse a name that leads out of the folder."""
    if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
        what = f"the file that holds {shown(key)} lies outside the folder: {shown(name)}"
        raise CheckpointError(f"{index}: {what}", repair)
    file = index.parent / name
    if not os.path.isfile(file):  # noqa: PTH113 (False for an impossible name)
        what = f"the file {shown(name)}, which holds {shown(key)}, is missing"
        raise foreign.broken_link(file) or CheckpointError(f"{index}: {what}", repair)
    return file


def _contents(
    index: Path,
    homes: Mapping[str, object],
    read_file: Callable[[Path, Sequence[str]], Iterable[Slice]],
    repair: str,
) -> Iterator[tuple[Path, list[str], Iterable[Slice]]]:
    """Yield each file that an index names, its keys, and what ``read_file`` reads in it."""
    files: dict[object, Path] = {}
    keys: dict[Path, list[str]] = {}
    for key, name in homes.items():
        if not isinstance(name, str) or name not in files:
            files[name] = _file(index, name, key, repair)
        keys.setdefault(files[name], []).append(key)
    stored = foreign.map_late(lambda file: read_file(file, keys[file]), keys)
    yield from zip(keys, keys.values(), stored, strict=True)


def _read_shards(index: Path, fmt: str) -> Checkpoint:
    weight_map = foreign.read_object(index, _SHARDS_AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise foreign.damaged(index, "no 'weight_map'", _SHARDS_AGAIN)
    read_shard = safetensors_files.read if fmt == "sharded" else torch_files.read
    places: dict[str, Slice] = {}
    files, missing = [index], f"add the missing file, or {_SHARDS_AGAIN}"
    for file, _, stored in _contents(index, weight_map, lambda one, _: read_shard(one), missing):
        files.append(file)
        for one in stored:
            if (other := places.setdefault(one.name, one)) is one:
                continue
            alike = one.shape == other.shape and one.contiguous and other.contiguous
            if not (alike and are_equal(one, other)):
                raise CheckpointError(
                    f"{file}: {shown(one.name)} is also in shard {other.file.name!r}, with other values",
                    "decide which values are right, and write the shards again without the other tensor;"
                    f" from_pretrained takes the values in {max(one.file.name, other.file.name)}",
                )
    names = dict.fromkeys([*weight_map, *places])
    found = Checkpoint(places[name] for name in names if name in places)
    found.files = tuple(files)
    return found


_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_NAME: Final = 200  # file systems allow 255 bytes


def file_name(key: str) -> str:
    """Return the name of a key's file, percent-encoded: unique, and inside the folder."""
    encoded = key.encode("utf-8", "surrogatepass")
    name = _UNSAFE.sub(lambda match: f"%{match[0][0]:02X}".encode(), encoded)
    text = re.sub(r"\A\.", "%2E", name.decode())
    if len(text) > _LONGEST_NAME:
        # No escape contains "%-", so that a hashed name never equals another key's name.
        text = f"{text[:150]}%-{sha256(name).hexdigest()[:32]}"
    return f"{text or '%'}.pt"


def module_of(key: str) -> str:
    """Return a key up to its first number, or else its first part: "trf_blocks.3", "tok_emb"."""
    numbered = re.match(r"(.*?\.\d+)\..", key)
    return numbered[1] if numbered else key.partition(".")[0]


def _read_keys(path: Path, fmt: str) -> Checkpoint:
    again = f"convert the checkpoint again: weighin convert CHECKPOINT OUT --format {fmt}"
    index = foreign.read_object(path, again)
    if (index.get("format"), index.get("version")) != (fmt, INDEX_VERSION):
        what = f"not an index of the format {fmt} in version {INDEX_VERSION}"
        raise CheckpointError(f"{path}: {what}", again)
    try:
        pairs = [*index["tensors"].items()] if fmt == "per_param" else []
        pairs += [(key, name) for name, keys in index.get("files", {}).items() for key in keys]
        homes = foreign.no_duplicates(pairs)
        order = index.get("order", [*homes])
        is_whole = {*map(type, [*homes, *order])} == {str} and sorted(order) == sorted(homes)
    except (AttributeError, KeyError, TypeError):
        is_whole = False
    except ValueError as error:
        raise foreign.damaged(path, f"{error}", again) from None
    if not is_whole:
        fields = " and ".join(map(repr, INDEX_FIELDS[fmt]))
        raise foreign.damaged(path, f"{fields} must name each tensor exactly once", again)

    def read_file(file: Path, keys: Sequence[str]) -> Iterable[Slice]:
        if fmt == "per_module":
            return torch_files.read(file)
        one = torch_files.read_one(file, keys[0])
        return [replace(one, name=key) for key in keys]

    places: dict[str, Slice] = {}
    files = [path]
    for file, keys, stored in _contents(path, homes, read_file, again):
        if odd := {one.name for one in stored} ^ {*keys}:
            what = f"its keys differ from those that {INDEX_NAME} lists, such as {shown(min(odd))}"
            raise CheckpointError(f"{file}: {what}", again)
        places |= {one.name: one for one in stored}
        files.append(file)
    found = Checkpoint(places[key] for key in order)
    found.files = tuple(sorted(files))
    return found


_DCP_AGAIN: Final = (
    "save it again with torch.distributed.checkpoint.save; if torch.distributed.checkpoint.load cannot"
    " read it either, the folder is damaged"
)
_KNOWN: Final = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|TensorStorageMetadata"
    r"|BytesStorageMetadata|ChunkStorageMetadata|TensorProperties|StorageMeta|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.serialization\._get_layout"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCoreMetadata"
    r"|torch\.(Size|bool|(q?u?int|bits|b?float|complex)\d\w{,30})"
    r"|pathlib\.(_local\.)?(Posix|Windows)Path|collections\.OrderedDict"
    r"|builtins\.getattr"  # Python 3.11.0 to 3.11.3 pickles enum members with getattr
)
_MOST_BLOCKS: Final = 2_000  # of one tensor; every pair of blocks is compared


def _read_dcp(folder: Path, key: str) -> Checkpoint:
    """Return all tensors, or those below ``key``; torch flattens nested dicts into dotted names."""
    path = folder / DCP_INDEX
    try:
        with path.open("rb") as file:
            pickled = pickles.load(path, file, resave=_DCP_AGAIN)
    except OSError as error:
        raise foreign.unreadable(path, error) from error
    if odd := [name for name in pickled.names if not _KNOWN.fullmatch(name)]:
        what = "the pickle holds more than tensors, and weighin did NOT execute it: it refers to"
        repair = f"if you trust the folder, {_merge(path)}"
        raise CheckpointError(f"{path}: {what} {odd[0]}", repair)
    metadata = _fields(pickled.value)
    tensors, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not (isinstance(tensors, dict) and isinstance(stored, dict) and tensors):
        raise foreign.damaged(path, "it has no tensors or no offsets", _DCP_AGAIN)
    places: dict[tuple[str, Shape], Any] = {}  # of the blocks of each tensor
    for index, place in stored.items():
        name, start = _fields(index).get("fqn"), _fields(index).get("offset")
        if isinstance(name, str) and is_sizes(start):
            places[name, tuple(start)] = _fields(place)
    found, values = Checkpoint(), dict[str, object]()
    archives: dict[tuple[str, int], Slice] = {}
    paths: Any = metadata.get("planner_data")  # the keys of each tensor in nested dicts
    sizes = Counter[str]()  # of the state dicts in nested dicts, but those of optimizers
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise foreign.damaged(path, f"a key is not a string: {shown(name)}", _DCP_AGAIN)
        if key and not name.startswith(f"{key}."):
            continue
        if isinstance(tensor, Opaque) and tensor.kind.endswith(".BytesStorageMetadata"):
            values[name] = Opaque("pickled object")
            continue
        found.append(_dcp_tensor(path, name, tensor, places, archives))
        keys: Any = paths.get(name) if isinstance(paths, dict) else None
        if isinstance(keys, tuple) and len(keys) > 1 and isinstance(keys[0], str):
            sizes[keys[0]] += 0 if "optim" in keys[0].lower() else found[-1].nbytes
    if values and not key and (way := with_key(sizes)):
        what = f"not a flat state dict of tensors: {shown(next(iter(values)))} is not a tensor"
        raise CheckpointError(f"{path}: {what}", way)
    found.values, found.files = values, (path, *sorted(folder.glob("*.distcp")))
    return found


def _fields(value: Any) -> Any:
    """Return the attributes that the pickle sets on an object."""
    state = value.contents[-1] if isinstance(value, Opaque) and value.contents else None
    return state if isinstance(state, dict) else {}


def _dcp_tensor(
    path: Path, key: str, tensor: Any, places: Mapping[Any, Any], archives: dict[Any, Slice]
) -> Slice:
    try:
        fields = _fields(tensor)
        chunks = fields["chunks"] if isinstance(fields["chunks"], list) else []
        blocks = [(one["offsets"], one["sizes"]) for one in map(_fields, chunks)]
        shape, dtype = fields["size"], fields["properties"].contents[-1][0]
        is_tensor = isinstance(dtype, Named) and all(map(is_sizes, chain([shape], *blocks)))
    except (AttributeError, LookupError, TypeError):
        is_tensor = False
    if not is_tensor:
        raise foreign.damaged(path, f"{shown(key)} is not described as a tensor", _DCP_AGAIN)
    if (kind := dtype.name.removeprefix("torch.")) not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {shown(key)} has the dtype torch.{kind}; weighin does not read this dtype",
            "load the checkpoint with torch, and save tensors of another dtype",
        )
    shape, blocks = tuple(shape), [(tuple(start), tuple(size)) for start, size in blocks]
    _check_tiles(path, key, shape, blocks)
    parts = []
    for start, size in blocks:
        place = places.get((key, start), {})
        name, offset, length = map(place.get, ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and is_sizes((offset, length))):
            raise foreign.damaged(path, f"no valid offset of {shown(key)} at {start}", _DCP_AGAIN)
        if (name, offset) not in archives:
            file = _file(path, name, key, _DCP_AGAIN)
            if offset + length > (file_bytes := file.stat().st_size):
                raise foreign.truncated(file, shown(key), offset + length, file_bytes)
            archives[name, offset] = torch_files.read_one(file, key, offset, length)
        where = replace(archives[name, offset], name=key, start=start)
        if (where.shape, where.dtype_name) != (size, kind):
            what = f"{where.shape} of torch.{where.dtype_name} here, but {size} of torch.{kind} in {DCP_INDEX}"
            raise CheckpointError(f"{where.file}: {shown(key)} has the shape {what}", _DCP_AGAIN)
        if len(blocks) > 1 and where.span < prod(size):  # torch stores each element
            raise foreign.damaged(where.file, f"elements of {shown(key)} overlap", _DCP_AGAIN)
        parts.append(where)
    if len(parts) == 1:
        return replace(parts[0], start=())
    return replace(parts[0], shape=shape, stride=row_major(shape), start=(), parts=tuple(parts))


def _merge(index: Path) -> str:
    command = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
    return f"merge it: {command} {quote(str(index.parent))} FILE.pt (this executes the pickle)"


def _check_tiles(path: Path, key: str, shape: Shape, blocks: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CheckpointError unless at most 2,000 blocks contain each element, and exactly once."""
    for start, size in blocks:
        fits = len(start) == len(size) == len(shape)
        if not fits or any(at + n > end for at, n, end in zip(start, size, shape, strict=True)):
            what = f"the part of {shown(key)} at {start} is outside the shape {shape}"
            raise foreign.damaged(path, what, _DCP_AGAIN)
    if len(blocks) > _MOST_BLOCKS:
        what = f"{shown(key)} is stored in {len(blocks):,} parts"
        raise CheckpointError(f"{path}: {what}", _merge(path))
    solid = [block for block in blocks if prod(block[1])]
    for (start, size), (other, others) in combinations(solid, 2):
        pairs = zip(start, size, other, others, strict=True)
        if all(a < b + n and b < a + m for a, m, b, n in pairs):
            what = f"the parts of {shown(key)} at {start} and {other} overlap"
            raise foreign.damaged(path, what, _DCP_AGAIN)
    if not blocks or sum(prod(size) for _, size in solid) != prod(shape):  # without an overlap
        raise foreign.damaged(path, f"the parts of {shown(key)} leave a gap in {shape}", _DCP_AGAIN)
