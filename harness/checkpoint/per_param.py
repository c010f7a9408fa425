"""One file for each state-dict key, in a folder with an index that keeps the order.

``index.json``::

    {"format": "per_param", "version": 1,
     "tensors": {"tok_emb.weight": "tok_emb.weight.pt", ...},
     "shared": {"head.weight": "tok_emb.weight"}}

``tensors`` names every key; a key that is tied to an earlier one names that one's file, and
``shared`` says so.
"""

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from harness.checkpoint.durable import write_text
from harness.checkpoint.formats import INDEX_NAME
from harness.errors import CheckpointError

VERSION: Final = 1

_SUFFIX: Final = ".pt"
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_NAME: Final = 200  # file systems take 255 bytes
_REPAIR: Final = "convert the checkpoint again: weighin convert CHECKPOINT OUT --format per_param"


def file_name(key: str) -> str:
    """Return the name of a key's file: the key itself, where a file may be called so.

    Other bytes are percent-encoded, and so is a leading dot; a name that gets too long ends in
    a hash of the key. No two keys get one name, and no name leaves the folder.
    """
    name = _UNSAFE.sub(
        lambda match: f"%{match[0][0]:02X}".encode(), key.encode("utf-8", "surrogatepass")
    )
    text = name.decode()
    if text.startswith("."):
        text = f"%2E{text[1:]}"
    if len(text) > _LONGEST_NAME:
        # "%-" comes out of no escape, so that a hashed name is nobody's plain one.
        text = f"{text[:150]}%-{sha256(name).hexdigest()[:32]}"
    return (text or "%") + _SUFFIX


def write_index(folder: Path, keys: Iterable[str], shared: Mapping[str, str]) -> None:
    """Write the index; its presence says that all files were written before it.

    ``shared`` maps a tied key to the first key of its group.
    """
    tensors = {key: file_name(shared.get(key, key)) for key in keys}
    index = {"format": "per_param", "version": VERSION, "tensors": tensors, "shared": dict(shared)}
    write_text(folder / INDEX_NAME, json.dumps(index, indent=1))


def read_index(folder: Path) -> dict[str, Path]:
    """Return each key's file, in the state dict's order; tied keys have the same file.

    Raises:
        CheckpointError: no index, a damaged one, a file that is missing or lies elsewhere, or
            a file that two keys share which are not tied.
    """
    index = _read(folder / INDEX_NAME)
    tensors, shared = index["tensors"], index["shared"]
    present = {entry.name for entry in folder.iterdir()}
    owners: dict[str, str] = {}
    for key, name in tensors.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise _damaged(folder, f"the file of {key!r} lies outside the folder: {name!r}")
        if name not in present:
            raise _damaged(folder, f"file {name!r} of {key!r} is missing")
        owner = owners.setdefault(name, key)
        if owner != key and shared.get(key) != owner:
            raise _damaged(folder, f"{owner!r} and {key!r} are not tied but share {name!r}")
    for key, first in shared.items():
        if key not in tensors or owners.get(tensors[key]) != first:
            raise _damaged(folder, f"{key!r} is tied to {first!r} but has another file")
    return {key: folder / name for key, name in tensors.items()}


def read_shared(folder: Path) -> dict[str, str]:
    """Return which key is tied to which earlier one; raises CheckpointError as ``read_index``."""
    return dict(_read(folder / INDEX_NAME)["shared"])


def _read(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", _REPAIR) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged index: {error}", _REPAIR) from error
    if not isinstance(index, dict) or index.get("format") != "per_param":
        raise CheckpointError(f"{path}: not an index of one file per parameter", _REPAIR)
    if index.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: index of version {index.get('version')!r}, this weighin reads {VERSION}",
            _REPAIR,
        )
    if not all(isinstance(index.get(part), dict) for part in ("tensors", "shared")):
        raise CheckpointError(f"{path}: damaged index: no 'tensors' or no 'shared'", _REPAIR)
    return index


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} occurs twice")
        found[key] = value
    return found


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{folder / INDEX_NAME}: {what}", _REPAIR)
