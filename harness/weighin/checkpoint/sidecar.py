"""Keep the checksums of a checkpoint's tensors in a small file beside or in the checkpoint.

For a checkpoint of one file, the checksum file is next to that file
(``model.pt.weighin-checksums.json``); for a folder, it is in the folder. The file's content::

    {"format": "weighin-checksums", "version": 1, "tensors": {"tok_emb.weight": "float32 0f3a..."}}

A checkpoint in the cache has no checksum file, because its manifest has the checksums. The module
does not import torch, so that weighin's own process can use it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from weighin.checkpoint.manifest import read_manifest
from weighin.errors import CheckpointError
from weighin.files import write_text
from weighin.formats.base import TensorSlice
from weighin.formats.bounded_json import read_object
from weighin.formats.misfit import first_names
from weighin.formats.unknown_file import shown

NAME: Final = "weighin-checksums.json"

_FORMAT: Final = "weighin-checksums"
_VERSION: Final = 1
_MANIFEST_NAME: Final = "manifest.json"
_SUM: Final = re.compile(r"([a-z0-9_]+) ([0-9a-f]{16})")


class KnownChecksums:
    """The known checksums of a checkpoint: one for each tensor, in its dtype in the file."""

    def __init__(self, checkpoint: Path, path: Path, slices: Iterable[TensorSlice]) -> None:
        """Read the checksums from ``path``, the file that ``find`` returned for ``checkpoint``.

        Raises:
            CheckpointError: the file is unreadable, or has other tensors or dtypes than ``slices``.
        """
        self._checkpoint, self._path = checkpoint, path
        sums = _read(path)
        self._sums = {
            where.name: sums.get(where.name, {}).get(where.dtype_name) for where in slices
        }
        odd = [name for name, checksum in self._sums.items() if checksum is None]
        odd += [name for name in sums if name not in self._sums]
        if odd:
            raise self._other("tensors or dtypes", odd)

    def check(self, names: Iterable[str], actual: str) -> None:
        """Raise CheckpointError if a known checksum of the tensors ``names`` is not ``actual``."""
        if wrong := [name for name in names if self._sums[name] != actual]:
            raise self._other("values", wrong)

    def _other(self, what: str, names: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint}: has other {what} than {self._path} lists:"
            f" {first_names(map(shown, names))}",
            "if it was changed on purpose, remove that file; if not, restore the checkpoint",
        )


def beside(checkpoint: Path) -> Path:
    """Return the path of the checksum file of a checkpoint that is one file."""
    return checkpoint.with_name(f"{checkpoint.name}.{NAME}")


def find(checkpoint: Path) -> Path | None:
    """Return a checkpoint's checksum file, or its manifest in the cache; None if it has neither."""
    from weighin.checkpoint import entries  # imports filelock, which only the parent needs

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
    """Write a checksum file; ``sums`` maps each tensor's name to its dtype and checksum."""
    tensors = {name: f"{dtype} {checksum}" for name, (dtype, checksum) in sums.items()}
    content = {"format": _FORMAT, "version": _VERSION, "tensors": tensors}
    write_text(path, json.dumps(content, indent=1) + "\n")


def _read(path: Path) -> dict[str, dict[str, str]]:
    if path.name == _MANIFEST_NAME:
        entries = read_manifest(path).tensors
        return {e.name: e.checksums for e in entries if e.kind != "non_persistent_buffer"}
    repair = "remove this file: weighin convert --verify writes a new one"
    content = read_object(path, repair)
    tensors = content.get("tensors")
    if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
        raise CheckpointError(f"{path}: not a checksum file that this weighin reads", repair)
    sums: dict[str, dict[str, str]] = {}
    for name, text in (tensors if isinstance(tensors, dict) else {}).items():
        match = _SUM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise CheckpointError(f"{path}: damaged: {shown(name)} has no checksum", repair)
        sums[name] = {match[1]: match[2]}
    return sums
