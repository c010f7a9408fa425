"""Recognise files that are not checkpoints, by their first bytes, and shorten names for messages."""

from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError

AGAIN: Final = "copy or download the file again"
_HEAD_BYTES: Final = 512
_MOST_SHOWN: Final = 100


def check_present(path: Path) -> bytes:
    """Return the first bytes of a file that may be a checkpoint.

    Raises:
        CheckpointError: the path does not exist, is not a regular file or cannot be read, or the file
            is empty, a git-lfs pointer or a web page.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file", "check the path")
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file", "give the checkpoint file itself")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}", "check its permissions"
        ) from error
    if not head:
        raise CheckpointError(f"{path}: empty file", AGAIN)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            f"{path}: a git-lfs pointer, not the checkpoint that it points to",
            f"fetch the file itself: git lfs pull --include {path.name}",
        )
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(
            f"{path}: an HTML page, not a checkpoint",
            "the download link led to a web page: use the link to the file itself",
        )
    return head


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file; the result is empty if the file cannot be read."""
    if not path.is_file():  # opening a pipe would block
        return b""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def shown(name: object) -> str:
    """Return a tensor's name for a message: quoted, and cut if it is very long."""
    if isinstance(name, str | bytes) and len(name) > _MOST_SHOWN:
        return f"{name[:_MOST_SHOWN]!r}... ({len(name):,} characters)"
    return repr(name)


def short(value: object) -> str:
    """Return a value for a message, cut if its text is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
