"""Read and write Hugging Face's shards: a folder of numbered files, and an index of their keys.

::

    model-00001-of-00002.safetensors      or  pytorch_model-00001-of-00002.bin
    model-00002-of-00002.safetensors          pytorch_model-00002-of-00002.bin
    model.safetensors.index.json              pytorch_model.bin.index.json
        {"metadata": {"total_size": 123}, "weight_map": {"key": "model-00001-of-00002.safetensors"}}

A tied name is in the same shard as the first name of its group. In safetensors shards, a tied name
is in the shard's own metadata and not in ``weight_map``. If tied names change the order of the
state dict, ``weighin.order`` in the index's metadata keeps the order.

The index must name shards by plain file names in the folder. A shard may be a symbolic link to a
file elsewhere: Hugging Face's cache uses such links, and only the folder's owner can create a link.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from weighin.atomic import sync_folder, write_text
from weighin.errors import CheckpointError
from weighin.formats import pt, safetensors
from weighin.formats.base import Layout, Pieces, Progress, TensorPlan, TensorSlice
from weighin.formats.bounded_json import read_object
from weighin.formats.sniff import shown

MAX_SHARD_BYTES: Final = 5 * 1024**3
"""The largest size of a shard, unless a single tensor is larger; Hugging Face's default is 5 GB."""

_ORDER: Final = "weighin.order"
_AGAIN: Final = "write the folder again: model.save_pretrained(FOLDER), or weighin convert"


class Sharded:
    """A format of several files (shards); each shard is a checkpoint of the format ``shard``."""

    SUFFIX = ""

    def __init__(self, name: str, stem: str, suffix: str, shard: Layout) -> None:
        self.NAME = name
        self.index_name = f"{stem}{suffix}.index.json"
        self._stem, self._suffix, self._shard = stem, suffix, shard
        self._ties_in_map = shard.NAME == "pt"  # in pt, two keys can share a storage

    def matches(self, path: Path) -> bool:
        """Tell whether ``path`` is a folder with an index of shards of this format."""
        return path.is_dir() and (path / self.index_name).is_file()

    def files(self, path: Path) -> list[Path]:
        """Return the index and all shards.

        Raises:
            CheckpointError: for the same reasons as ``read``.
        """
        shards = dict.fromkeys(self._weight_map(path)[0].values())
        return [path / self.index_name, *(path / name for name in shards)]

    def read(self, path: Path) -> list[TensorSlice]:
        """Return the places of all tensors, in the stored order of names, else in index order.

        Raises:
            CheckpointError: the index or a shard is damaged; the message names the file and the
                place of the damage.
        """
        weight_map, order = self._weight_map(path)
        slices: dict[str, TensorSlice] = {}
        for name in dict.fromkeys(weight_map.values()):
            for place in self._read_shard(path / name, weight_map):
                if place.name in slices:
                    other = slices[place.name].file.name
                    raise CheckpointError(
                        f"{path / name}: {shown(place.name)} is also in shard {other!r}", _AGAIN
                    )
                slices[place.name] = place
        for key, name in weight_map.items():
            if key not in slices:
                raise self._damaged(path, f"{shown(key)} is not in its shard {shown(name)}")
        names = order or [*weight_map, *(key for key in slices if key not in weight_map)]
        if sorted(names) != sorted(slices):
            raise self._damaged(path, f"{_ORDER} is not a list of the checkpoint's tensor names")
        return [slices[name] for name in names]

    def write(
        self,
        target: Path,
        tensors: Sequence[TensorPlan],
        pieces: Pieces,
        progress: Progress | None = None,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Write a folder that does not exist yet, with its index last; see ``base.Layout.write``."""
        from weighin.formats.raw import plan_bytes

        shards = split(tensors, max_shard_bytes)
        target.mkdir()
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"{self._stem}-{number:05d}-of-{len(shards):05d}{self._suffix}"
            self._shard.write(target / name, shard, pieces, progress)
            weight_map |= {
                plan.name: name for plan in shard if plan.shared_with is None or self._ties_in_map
            }
        sizes = [plan_bytes(plan) for plan in tensors if plan.shared_with is None]
        metadata: dict[str, Any] = {"total_size": sum(sizes)}
        names = [plan.name for plan in tensors]
        if list(weight_map) != names:
            metadata[_ORDER] = names
        index = {"metadata": metadata, "weight_map": weight_map}
        sync_folder(target)
        write_text(target / self.index_name, json.dumps(index, indent=2) + "\n")

    def _weight_map(self, path: Path) -> tuple[dict[str, str], list[str] | None]:
        """Return each key's shard, which must exist, and the order of all keys if it is stored."""
        index = read_object(path / self.index_name, _AGAIN)
        weight_map, metadata = index.get("weight_map"), index.get("metadata")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self._damaged(path, "damaged index: no 'weight_map'")
        order = metadata.get(_ORDER) if isinstance(metadata, dict) else None
        if order is not None and not _is_names(order):
            raise self._damaged(path, f"{_ORDER} is not a list of the checkpoint's tensor names")
        checked: set[str] = set()
        for key, name in weight_map.items():
            if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
                raise self._damaged(
                    path, f"the shard of {shown(key)} lies outside the folder: {shown(name)}"
                )
            if name not in checked and not _is_file(path / name):
                raise CheckpointError(
                    f"{path / self.index_name}: shard {shown(name)} of {shown(key)} is missing",
                    f"add the missing file to {path}",
                )
            checked.add(name)
        return weight_map, order

    def _read_shard(self, shard: Path, weight_map: dict[str, str]) -> list[TensorSlice]:
        """Return the places of a shard's tensors.

        Raises:
            CheckpointError: a tensor of the shard is not listed for this shard in the index.
        """
        places = self._shard.read(shard)
        # A tied name of safetensors is at the same place as a name that is in the map.
        mapped = {place.offset for place in places if weight_map.get(place.name) == shard.name}
        for place in places:
            home = weight_map.get(place.name)
            tied = home is None and not self._ties_in_map and place.offset in mapped
            if home != shard.name and not tied:
                listed = f"lists it in {shown(home)}" if home else "does not list it"
                raise CheckpointError(
                    f"{shard}: {shown(place.name)} is in this file, but the index {listed}", _AGAIN
                )
        return places

    def _damaged(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(f"{path / self.index_name}: {what}", _AGAIN)


def split(tensors: Sequence[TensorPlan], max_bytes: int) -> list[list[TensorPlan]]:
    """Divide the tensors into shards, in order; a tied name goes to the shard of its first name."""
    from weighin.formats.raw import plan_bytes

    shards: list[list[TensorPlan]] = [[]]
    homes: dict[str, list[TensorPlan]] = {}
    filled = 0
    for plan in tensors:
        if plan.shared_with is not None:
            homes[plan.shared_with].append(plan)
            continue
        size = plan_bytes(plan)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(plan)
        homes[plan.name] = shards[-1]
        filled += size
    return shards


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


SHARDED: Final = Sharded("sharded", "model", safetensors.SUFFIX, safetensors)
SHARDED_PT: Final = Sharded("sharded_pt", "pytorch_model", ".bin", pt)
OF_DIFFUSERS: Final = (
    Sharded("sharded", "diffusion_pytorch_model", safetensors.SUFFIX, safetensors),
    Sharded("sharded_pt", "diffusion_pytorch_model", ".bin", pt),
)
"""The same formats under the file names of diffusers; weighin reads them, and writes the others."""
