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
    dcp          *.distcp; .metadata (``dcp_files``)

An index must name files by plain names in its folder. A shard may be a symbolic link to a file
elsewhere, because Hugging Face's cache uses links, and only the folder's owner can create a link.

``sharded`` is read as ``from_pretrained`` reads it: the tensors are those in the shards, even if the
index lists others. But weighin refuses two shards with different values for one tensor, of which
``from_pretrained`` silently takes the later.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.stream import dcp_files, foreign, safetensors_files, torch_files
from weighin.stream.slices import Checkpoint, Slice, are_equal
from weighin.text import shown

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
"""The names of an index: that of transformers, under which weighin also writes, and that of diffusers."""
MAX_SHARD_BYTES: Final = 5 * 1024**3  # Hugging Face's default is 5 GB

_ANY_INDEX: Final = {"sharded": "safetensors", "sharded_pt": "bin"}
_SHARDS_AGAIN: Final = "write the folder again: model.save_pretrained(FOLDER), or weighin convert"


def format_of(path: Path) -> str:
    """Return the format's name of a folder or of an index of shards; "" if ``path`` is neither."""
    if name := next((name for name in SHARD_INDEXES if _shard_index(path, name)), ""):
        return name
    if (path / dcp_files.INDEX).is_file():
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
    return dcp_files.read(path, key) if name == "dcp" else _read_keys(path / INDEX_NAME, name)


def _shard_index(path: Path, name: str) -> Path | None:
    if path.is_dir():
        indexes = (path / index for index in SHARD_INDEXES.get(name, ()))
        return next((index for index in indexes if index.is_file()), None)
    is_index = re.fullmatch(rf".+\.{_ANY_INDEX.get(name)}\.index(\.[\w-]+)?\.json", path.name)
    return path if is_index and path.is_file() else None


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
            files[name] = foreign.file_of(index, name, key, repair)
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
