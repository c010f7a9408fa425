"""Read and write Hugging Face's shards: a folder of numbered files, and an index of their keys.

::

    model-00001-of-00002.safetensors      or  pytorch_model-00001-of-00002.bin
    model-00002-of-00002.safetensors          pytorch_model-00002-of-00002.bin
    model.safetensors.index.json              pytorch_model.bin.index.json
        {"metadata": {"total_size": 123}, "weight_map": {"key": "model-00001-of-00002.safetensors"}}

weighin writes all names of a tied tensor into one shard. For safetensors shards, only the first
name is in ``weight_map``; the other names are in the shard's own metadata. If ``weight_map`` then
differs from the state dict's list of names, ``weighin.order`` in the index's metadata has the list.

The index must name shards by plain file names in the folder. A shard may be a symbolic link to a
file elsewhere, because Hugging Face's cache uses links, and only the folder's owner can create a
link.

The path of a checkpoint of shards is its folder, or its index if that has an unusual name, such
as ``model.safetensors.index.fp16.json``. weighin reads the tensors in the shards, as
``from_pretrained`` does, even if the index lists other tensors; a note then names the difference.
weighin refuses two shards with different values for one tensor; ``from_pretrained`` silently takes
the value of the later shard.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.files import sync_folder, write_text
from weighin.formats import safetensors
from weighin.formats.base import Layout, Pieces, Plans, Progress, Slices, TensorPlan, TensorSlice
from weighin.formats.foreign import broken_link, is_file, read_object
from weighin.formats.parallel_headers import map_files
from weighin.formats.storages import are_equal
from weighin.stream.torch_files import PT
from weighin.text import first_names, plain, shown

MAX_SHARD_BYTES: Final = 5 * 1024**3
"""The largest size of a shard, unless a single tensor is larger; Hugging Face's default is 5 GB."""

_KEYS: Final = ("key", "keys")
_ORDER: Final = "weighin.order"
_AGAIN: Final = "write the folder again: model.save_pretrained(FOLDER), or weighin convert"


class Sharded:
    """A format of several files (shards); each shard is a file of another format, safetensors or pt."""

    SUFFIX = ""

    def __init__(self, name: str, stem: str, suffix: str, shard: Layout) -> None:
        self.NAME = name
        self.index_name = f"{stem}{suffix}.index.json"
        self._stem, self._suffix, self._shard = stem, suffix, shard
        self._ties_in_map = shard.NAME == "pt"  # in pt, two keys can share a storage
        self._any_index = re.compile(rf".+{re.escape(suffix)}\.index(\.[\w-]+)?\.json")

    def matches(self, path: Path) -> bool:
        """Tell whether ``path`` is an index of shards of this format, or a folder with one."""
        if path.is_dir():
            return (path / self.index_name).is_file()
        return self._any_index.fullmatch(path.name) is not None and path.is_file()

    def files(self, path: Path) -> list[Path]:
        index = self._index(path)
        shards = dict.fromkeys(self._weight_map(index)[0].values())
        return [index, *(index.parent / name for name in shards)]

    def read(self, path: Path) -> Slices:
        """Return the tensors' offsets, in the order of ``weighin.order`` or else of the index."""
        index = self._index(path)
        weight_map, order = self._weight_map(index)
        places: dict[str, TensorSlice] = {}
        contradictions: dict[str, list[str]] = {}
        shards = list(dict.fromkeys(weight_map.values()))
        read = map_files(self._shard.read, [index.parent / shard for shard in shards])
        for shard, stored in zip(shards, read, strict=True):
            # A tied name of safetensors is not in the map; its tensor has the offset of a name in the map.
            listed = {one.offset for one in stored if weight_map.get(one.name) == shard}
            for place in stored:
                home = weight_map.get(place.name)
                if twice := places.get(place.name):
                    _check_equal(place, twice)
                    contradictions.setdefault("in two shards", []).append(place.name)
                elif home not in (None, shard):
                    contradictions.setdefault("in another shard", []).append(place.name)
                elif home is None and (self._ties_in_map or place.offset not in listed):
                    contradictions.setdefault("not listed", []).append(place.name)
                places.setdefault(place.name, place)
        if absent := [name for name in weight_map if name not in places]:
            contradictions["in no shard"] = absent
        names = order or [*weight_map, *places]
        if order and sorted(order) != sorted(places):
            raise self._damaged(index, f"{_ORDER} is not a list of the checkpoint's tensor names")
        slices = Slices(places[name] for name in dict.fromkeys(names) if name in places)
        slices.notes = tuple(
            f"{index}: contradicts its shards, which count: {len(names)} {_KEYS[len(names) > 1]}"
            f" {fault} ({first_names(map(plain, names))})"
            for fault, names in contradictions.items()
        )
        return slices

    def write(
        self,
        target: Path,
        tensors: Plans,
        pieces: Pieces,
        progress: Progress | None = None,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Write a folder that does not exist yet: the shards, then the index."""
        shards = split(tensors, max_shard_bytes)
        target.mkdir()
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"{self._stem}-{number:05d}-of-{len(shards):05d}{self._suffix}"
            self._shard.write(target / name, shard, pieces, progress)
            weight_map |= {
                plan.name: name for plan in shard if plan.shared_with is None or self._ties_in_map
            }
        sizes = [plan.nbytes for plan in tensors if plan.shared_with is None]
        metadata: dict[str, Any] = {"total_size": sum(sizes)}
        names = [plan.name for plan in tensors]
        if list(weight_map) != names:
            metadata[_ORDER] = names
        index = {"metadata": metadata, "weight_map": weight_map}
        sync_folder(target)
        write_text(target / self.index_name, json.dumps(index, indent=2) + "\n")

    def _index(self, path: Path) -> Path:
        return path / self.index_name if path.is_dir() else path

    def _weight_map(self, index: Path) -> tuple[dict[str, str], list[str] | None]:
        """Return the shard of each key, and the list ``weighin.order``, or None without this list.

        Raises:
            CheckpointError: the index is damaged, or a shard is missing.
        """
        content = read_object(index, _AGAIN)
        weight_map, metadata = content.get("weight_map"), content.get("metadata")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self._damaged(index, "damaged: no 'weight_map'")
        order = metadata.get(_ORDER) if isinstance(metadata, dict) else None
        names = isinstance(order, list) and all(isinstance(name, str) for name in order)
        if order is not None and not names:
            raise self._damaged(index, f"{_ORDER} is not a list of the checkpoint's tensor names")
        checked: set[str] = set()
        for key, name in weight_map.items():
            if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
                raise self._damaged(
                    index,
                    f"the shard that holds {shown(key)} lies outside the folder: {shown(name)}",
                )
            if name not in checked and not is_file(shard := index.parent / name):
                raise broken_link(shard) or CheckpointError(
                    f"{index}: the shard {shown(name)}, which holds {shown(key)}, is missing",
                    f"add the missing file to {index.parent}",
                )
            checked.add(name)
        return weight_map, order

    def _damaged(self, index: Path, what: str) -> CheckpointError:
        return CheckpointError(f"{index}: {what}", _AGAIN)


def _check_equal(one: TensorSlice, other: TensorSlice) -> None:
    """Raise CheckpointError if two shards have a tensor of one name, but different values for it."""
    comparable = one.shape == other.shape and one.contiguous and other.contiguous
    if not (comparable and are_equal(one, other)):
        later = max(one.file.name, other.file.name)
        raise CheckpointError(
            f"{one.file}: {shown(one.name)} is also in shard {other.file.name!r}, with other values",
            "decide which values are right, and write the shards again without the other tensor;"
            f" from_pretrained takes the values in {later}",
        )


def split(tensors: Plans, max_bytes: int) -> list[list[TensorPlan]]:
    """Divide the tensors into shards, in order; tied tensors are in one shard."""
    shards: list[list[TensorPlan]] = [[]]
    homes: dict[str, list[TensorPlan]] = {}
    filled = 0
    for plan in tensors:
        if plan.shared_with is not None:
            homes[plan.shared_with].append(plan)
            continue
        if shards[-1] and filled + plan.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(plan)
        homes[plan.name] = shards[-1]
        filled += plan.nbytes
    return shards


SHARDED: Final = Sharded("sharded", "model", safetensors.SUFFIX, safetensors)
SHARDED_PT: Final = Sharded("sharded_pt", "pytorch_model", ".bin", PT)
OF_DIFFUSERS: Final = (
    Sharded("sharded", "diffusion_pytorch_model", safetensors.SUFFIX, safetensors),
    Sharded("sharded_pt", "diffusion_pytorch_model", ".bin", PT),
)
"""The same formats under the file names of diffusers. weighin reads these names and never writes them."""
