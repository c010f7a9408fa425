"""Read JSON from untrusted files in bounded memory."""

import errno
import json
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.foreign import read_bytes
from weighin.formats.unknown_file import not_json, shown, unreadable

MOST_BYTES: Final = 16 * 1024**2
"""The largest index that is read: some 170,000 keys. One byte of text takes at most 12 bytes as
Python objects."""

_MOST_BRACKETS: Final = 200_000
"""One list for each of some 170,000 keys, as in a folder with a file for each module. An empty list
takes 80 bytes of memory."""


def read_object(path: Path, repair: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: the file is unreadable, too long, or not a JSON object, or a key occurs twice.
    """
    try:
        text = read_bytes(path, MOST_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise unreadable(path, error) from error
        size = path.stat().st_size
        raise CheckpointError(f"{path}: {size:,} bytes are too many", repair) from None
    if text.count(b"[") + text.count(b"{") > _MOST_BRACKETS:
        raise CheckpointError(f"{path}: damaged: it has too many nested values", repair)
    try:
        value = json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except RecursionError:
        raise CheckpointError(f"{path}: damaged: it is nested too deeply", repair) from None
    except ValueError as error:
        raise not_json(path, text, f"damaged: {error}", repair) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object", repair)
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON text; raise ValueError if a key occurs twice."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{shown(key)} occurs twice")
        content[key] = value
    return content
