"""JSON that somebody else wrote, read without the memory that a crafted one could ask for."""

import json
import os
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats.sniff import shown

MOST_BYTES: Final = 16 * 1024**2
"""Of an index: some 170,000 keys; at worst 12 bytes of Python objects come of one of text."""

_MOST_BRACKETS: Final = 10_000  # an empty list takes 3 bytes of text and 80 of memory


def read_object(path: Path, repair: str) -> dict[str, Any]:
    """Return the JSON object of a file, in which no key occurs twice.

    Raises:
        CheckpointError: unreadable, too long, no JSON, or no object.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = file.read(MOST_BYTES) if size <= MOST_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", repair) from error
    if size > MOST_BYTES:
        raise CheckpointError(f"{path}: {size:,} bytes are too many for an index", repair)
    if text.count(b"[") + text.count(b"{") > _MOST_BRACKETS:
        raise CheckpointError(f"{path}: damaged index: it nests too much", repair)
    try:
        value = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise CheckpointError(f"{path}: damaged index: it nests too deep", repair) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged index: {error}", repair) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged index: not a JSON object", repair)
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} occurs twice")
        found[key] = value
    return found
