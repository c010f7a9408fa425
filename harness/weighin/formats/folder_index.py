"""``index.json`` of the layouts with many files, and names of files that no key can escape from."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from weighin.atomic import write_text
from weighin.errors import CheckpointError
from weighin.formats.bounded_json import read_object
from weighin.formats.sniff import shown

INDEX_NAME: Final = "index.json"
VERSION: Final = 1

_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_NAME: Final = 200  # file systems take 255 bytes
_HEAD_BYTES: Final = 4096


def file_name(key: str, suffix: str = ".pt") -> str:
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
    return (text or "%") + suffix


def says(folder: Path, layout: str) -> bool:
    """Tell whether the folder's index names that layout, in its first bytes."""
    try:
        with (folder / INDEX_NAME).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return re.search(rb'"format"\s*:\s*"' + layout.encode() + rb'"', head) is not None


def write(folder: Path, layout: str, fields: Mapping[str, Any]) -> None:
    """Write the index; its presence says that all files were written before it."""
    index = {"format": layout, "version": VERSION, **fields}
    write_text(folder / INDEX_NAME, json.dumps(index, indent=1))


def read(folder: Path, layout: str, what: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return the index of a folder of that layout, which ``what`` describes.

    Raises:
        CheckpointError: none, damaged, of another layout or version, a key that occurs twice, or
            one of ``fields`` that is missing or of another type.
    """
    path, repair = folder / INDEX_NAME, _repair(layout)
    index = read_object(path, repair)
    if index.get("format") != layout:
        raise CheckpointError(f"{path}: not an index of {what}", repair)
    if index.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: index of version {index.get('version')!r}, this weighin reads {VERSION}",
            repair,
        )
    if not all(isinstance(index.get(name), kind) for name, kind in fields.items()):
        names = " or no ".join(repr(name) for name in fields)
        raise CheckpointError(f"{path}: damaged index: no {names}", repair)
    return index


def check_name(folder: Path, layout: str, name: object, owner: str) -> str:
    """Return a file's name from an index; raises CheckpointError where it leads elsewhere."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        raise damaged(folder, layout, f"the file of {owner} lies outside the folder: {shown(name)}")
    if not _is_file(folder / name):
        raise damaged(folder, layout, f"file {shown(name)} of {owner} is missing")
    return name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the file system takes
        return False


def damaged(folder: Path, layout: str, what: str) -> CheckpointError:
    """Return the error for an index that says something impossible."""
    return CheckpointError(f"{folder / INDEX_NAME}: {what}", _repair(layout))


def _repair(layout: str) -> str:
    return f"convert the checkpoint again: weighin convert CHECKPOINT OUT --format {layout}"
