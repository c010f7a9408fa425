"""The checksums of a checkpoint's tensors, in a small file that goes where the checkpoint goes.

A file has it beside itself (``model.pt.weighin-checksums.json``), a folder inside::

    {"format": "weighin-checksums", "version": 1, "tensors": {"tok_emb.weight": "float32 0f3a..."}}

A checkpoint in the cache has its checksums in the entry's manifest. The parent uses this: no torch.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from weighin.atomic import write_text
from weighin.checkpoint.manifest import read_manifest
from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice
from weighin.formats.bounded_json import read_object
from weighin.formats.misfit import first_names
from weighin.formats.sniff import shown

NAME: Final = "weighin-checksums.json"

_FORMAT: Final = "weighin-checksums"
_VERSION: Final = 1
_MANIFEST_NAME: Final = "manifest.json"
_SUM: Final = re.compile(r"([a-z0-9_]+) ([0-9a-f]{16})")


class KnownChecksums:
    """The checksums that a checkpoint came with: of each of its tensors, in its own dtype."""

    def __init__(self, checkpoint: Path, path: Path, slices: Iterable[TensorSlice]) -> None:
        """Read them from ``path``, which ``find`` named.

        Raises:
            CheckpointError: unreadable, or of other tensors than ``slices``.
        """
        self._checkpoint, self._path = checkpoint, path
        known = _read(path)
        self._sums = {one.name: known.get(one.name, {}).get(one.dtype_name) for one in slices}
        odd = [name for name, one in self._sums.items() if one is None]
        odd += [name for name in known if name not in self._sums]
        if odd:
            raise self._other("tensors or dtypes", odd)

    def check(self, names: Iterable[str], found: str) -> None:
        """Raise CheckpointError unless ``found`` is the checksum of all these names."""
        if wrong := [name for name in names if self._sums[name] != found]:
            raise self._other("values", wrong)

    def _other(self, what: str, names: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint}: has other {what} than {self._path} says: {first_names(map(shown, names))}",
            "copy or download the checkpoint again; if it was changed on purpose, remove that file",
        )


def beside(checkpoint: Path) -> Path:
    """Return where the checksums of a checkpoint that is one file belong."""
    return checkpoint.with_name(f"{checkpoint.name}.{NAME}")


def find(checkpoint: Path) -> Path | None:
    """Return the file that holds a checkpoint's checksums; None where there is none."""
    from weighin.checkpoint import entries  # only the parent has file locks

    place = checkpoint / NAME if checkpoint.is_dir() else beside(checkpoint)
    if os.path.exists(place):  # noqa: PTH110 (Path.exists raises for a name that is too long)
        return place
    cached = checkpoint.resolve()
    if (entries.folder() / "models").resolve() in cached.parents:
        for folder in cached.parents[:2]:
            if (folder / _MANIFEST_NAME).is_file():
                return folder / _MANIFEST_NAME
    return None


def write(path: Path, sums: Mapping[str, tuple[str, str]]) -> None:
    """Write each name's dtype and checksum."""
    tensors = {name: f"{dtype} {checksum}" for name, (dtype, checksum) in sums.items()}
    content = {"format": _FORMAT, "version": _VERSION, "tensors": tensors}
    write_text(path, json.dumps(content, indent=1) + "\n")


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Return the checksums of each name, by dtype."""
    if path.name == _MANIFEST_NAME:
        entries = read_manifest(path).tensors
        return {one.name: one.checksums for one in entries if one.kind != "non_persistent_buffer"}
    repair = "remove it: a conversion with --verify writes a new one"
    content = read_object(path, repair)
    tensors = content.get("tensors")
    if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
        raise CheckpointError(f"{path}: not checksums that this weighin reads", repair)
    found: dict[str, dict[str, str]] = {}
    for name, text in (tensors if isinstance(tensors, dict) else {}).items():
        match = _SUM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise CheckpointError(f"{path}: damaged: {shown(name)} has no checksum", repair)
        found[name] = {match[1]: match[2]}
    return found
