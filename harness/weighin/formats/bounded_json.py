"""Read JSON from untrusted files in bounded memory."""

import errno
import json
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.files import read_bytes
from weighin.formats.unknown_file import not_json, shown, unreadable

MOST_BYTES: Final = 16 * 1024**2
"""The size of the largest file that is read: an index of some 170,000 keys. One byte of JSON text takes
up to 12 bytes of memory as Python objects."""

_MOST_BRACKETS: Final = 200_000
"""The most lists and objects in one file, because an empty list takes 80 bytes of memory. An index of
170,000 keys may have a list for each key."""


def read_object(path: Path, repair: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: the file is unreadable, too long, nested too deeply, or no JSON object, or
            a key occurs twice.
    """
    try:
        text = read_bytes(path, MOST_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise unreadable(path, error) from error
        size = path.stat().st_size
        raise CheckpointError(
            f"{path}: the file's {size:,} bytes are more than weighin reads", repair
        ) from None
    if text.count(b"[") + text.count(b"{") > _MOST_BRACKETS:
        raise CheckpointError(f"{path}: damaged: too many values are nested in one another", repair)
    try:
        value = json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except RecursionError:
        raise CheckpointError(
            f"{path}: damaged: its values are nested too deeply in one another", repair
        ) from None
    except ValueError as error:
        raise not_json(path, text, f"damaged: {error}", repair) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object", repair)
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise ValueError if a key occurs twice."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{shown(key)} occurs twice")
        content[key] = value
    return content
