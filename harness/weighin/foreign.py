"""Read text that others wrote, in bounded time and memory: records, plans, events, YAML, options.

A bound is the error that the parser raises anyway: ``ValueError`` for a text, ``OSError`` for a file.
"""

import errno
import json
import os
import stat
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:  # pathlib takes 1 MiB in a worker
    from pathlib import Path

MIB: Final = 1024**2
_MOST_DEPTH: Final = 100
_MOST_VALUES: Final = 5_000_000


def read_bytes(path: "Path", most_bytes: int = 16 * MIB) -> bytes:
    """Return the content of a regular file; raise OSError for any other file, or a longer one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"longer than {most_bytes // MIB} MiB", str(path))
    return content


def parse_json(text: bytes | str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text; only without ``finite`` may it hold NaN and infinities.

    Raises:
        ValueError: not JSON, too many digits, or too many nested values.
    """
    try:
        value = json.loads(text, parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError(_DEEP) from None
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return value if raw.count(b"[") + raw.count(b"{") <= _MOST_DEPTH else bounded(value)


def json_in(path: "Path", most_bytes: int = 16 * MIB) -> Any:
    """Return the JSON value in a file, which may hold NaN and infinities; None if there is none."""
    try:
        return parse_json(read_bytes(path, most_bytes), finite=False)
    except (OSError, ValueError):
        return None


def object_in(path: "Path", most_bytes: int = 16 * MIB) -> dict[str, Any]:
    """Return the JSON object in a file, as ``json_in`` does; empty if there is none."""
    content = json_in(path, most_bytes)
    return content if isinstance(content, dict) else {}


def bounded(value: Any) -> Any:
    """Return ``value``; raise ValueError if it is nested too deeply, refers to itself, or is too big."""
    level, seen = [value], 0
    for _ in range(_MOST_DEPTH):
        level = (
            [
                item
                for each in level
                for item in (each.values() if isinstance(each, dict) else each)
                if isinstance(item, dict | list)
            ]
            if seen
            else [each for each in level if isinstance(each, dict | list)]
        )
        seen += len(level) + 1
        if not level:
            return value
        if seen > _MOST_VALUES:
            break
    raise ValueError(_DEEP)


_DEEP: Final = f"nested deeper than {_MOST_DEPTH} levels, or it refers to itself"


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
