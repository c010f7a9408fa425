"""Read and write ``index.json`` of formats with many files, and turn keys into safe file names."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.files import write_text
from weighin.formats.bounded_json import read_object
from weighin.formats.unknown_file import is_file, shown

INDEX_NAME: Final = "index.json"
VERSION: Final = 1

_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_NAME: Final = 200  # file systems allow 255 bytes
_HEAD_BYTES: Final = 4096


def file_name(key: str) -> str:
    """Return the name of a key's file: the key and ".pt", if the key is a safe file name.

    Unsafe bytes and a leading dot are percent-encoded; a hash replaces the end of a long name.
    Different keys get different names, and no name leads out of the folder.
    """
    name = _UNSAFE.sub(
        lambda match: f"%{match[0][0]:02X}".encode(), key.encode("utf-8", "surrogatepass")
    )
    text = name.decode()
    if text.startswith("."):
        text = f"%2E{text[1:]}"
    if len(text) > _LONGEST_NAME:
        # No escape contains "%-", so that a hashed name never equals another key's name.
        text = f"{text[:150]}%-{sha256(name).hexdigest()[:32]}"
    return f"{text or '%'}.pt"


def says(folder: Path, layout: str) -> bool:
    """Tell whether the first bytes of the folder's index name the format ``layout``."""
    try:
        with (folder / INDEX_NAME).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return re.search(rb'"format"\s*:\s*"' + layout.encode() + rb'"', head) is not None


def write(folder: Path, layout: str, fields: Mapping[str, Any]) -> None:
    """Write the index. Call ``write`` last: readers take a folder with an index as complete."""
    index = {"format": layout, "version": VERSION, **fields}
    write_text(folder / INDEX_NAME, json.dumps(index, indent=1))


def read(folder: Path, layout: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return the index of a folder of this format; ``fields`` maps each field's name to its type.

    Raises:
        CheckpointError: the index is missing or damaged, has another format or version, has a key
            twice, or lacks a field, or has a field of another type.
    """
    path, repair = folder / INDEX_NAME, _repair(layout)
    index = read_object(path, repair)
    if index.get("format") != layout:
        raise CheckpointError(f"{path}: not an index of the format {layout}", repair)
    if index.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: index of version {index.get('version')!r}, but this weighin reads {VERSION}",
            repair,
        )
    if not all(isinstance(index.get(name), kind) for name, kind in fields.items()):
        names = " or no ".join(repr(name) for name in fields)
        raise CheckpointError(f"{path}: damaged: no {names}", repair)
    return index


def check_name(folder: Path, layout: str, name: object, owner: str) -> None:
    """Raise CheckpointError if a file named in an index is missing, or lies outside the folder."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        raise damaged(
            folder, layout, f"the file that holds {owner} lies outside the folder: {shown(name)}"
        )
    if not is_file(folder / name):
        raise damaged(folder, layout, f"the file {shown(name)}, which holds {owner}, is missing")


def damaged(folder: Path, layout: str, what: str) -> CheckpointError:
    return CheckpointError(f"{folder / INDEX_NAME}: {what}", _repair(layout))


def _repair(layout: str) -> str:
    return f"convert the checkpoint again: weighin convert CHECKPOINT OUT --format {layout}"
