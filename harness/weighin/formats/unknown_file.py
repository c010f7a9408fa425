"""Say in an error what a path without a checkpoint is: a missing file, a broken link, a web page.

The module ``unknown_folder`` does so for folders. This module also shortens names for messages.
"""

from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.formats.first_bytes import read_head
from weighin.formats.pretrained_library import WEIGHTS
from weighin.formats.recognise import by_content
from weighin.text import one_line

AGAIN: Final = "copy or download the file again"
"""The advice for a file that ends too early. Other faults do not prove that a copy is cut off."""

RESAVE: Final = (
    "save it again with the program that wrote it; if that program cannot read it either, the file is"
    " damaged"
)
"""The advice for a file that breaks a rule of its format."""

SHARDS: Final = "save the checkpoint in several files, as model.save_pretrained(FOLDER) does"
"""The repair for a file with more tensors, or a longer zip directory, than weighin reads."""

HUB_ENTRY: Final = "models--"
"""The beginning of the name of a model's folder in the Hub's cache: "models--owner--name"."""

_MOST_SHOWN: Final = 100
_MOST_BITS: Final = 256  # of the largest integer that an error shows
_PATH_STARTS: Final = ("./", "../", "/", "~")
_PATH_ENDS: Final = (
    "/", ".gguf", ".gz", ".h5", ".json", ".msgpack", ".npz", ".onnx", ".pkl", ".pt2", ".py", ".tar", ".zip",
    *WEIGHTS,
)  # fmt: skip


def looks_like_path(text: str) -> bool:
    """Tell whether a text can only be a path, and not the id of a model on the Hugging Face Hub.

    "checkpoints/mine" is a path if there is a folder "checkpoints"; otherwise it may be an id.
    """
    if text.startswith(_PATH_STARTS) or text.endswith(_PATH_ENDS) or text in (".", ".."):
        return True
    return text.count("/") > 1 or ("/" in text and Path(text).parent.is_dir())


def missing(path: Path | str) -> CheckpointError:
    return broken_link(Path(path)) or CheckpointError(
        f"{path}: no such file or folder", "check the path"
    )


def broken_link(path: Path) -> CheckpointError | None:
    """Return the error for a symbolic link to a file that does not exist; None for another path."""
    try:
        if path.exists():
            return None
        target = path.readlink()
    except (OSError, ValueError):  # the path is no link, or no valid file name
        return None
    what = f"{path}: a broken symbolic link to {one_line(str(target))}, which does not exist"
    if target.parent.name == "blobs" and (name := hub_id(path.parent)):
        return CheckpointError(
            f"{what}: a file of {name} was removed from the cache of the Hub", f"hf download {name}"
        )
    return CheckpointError(what, "restore the file to which the link leads, or correct the link")


def is_file(path: Path) -> bool:
    """Tell whether a path is a file; False for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def hub_id(snapshot: Path) -> str:
    """Return the model's id, "owner/name", for a snapshot folder in the Hub's cache; else ""."""
    snapshots, entry = snapshot.parent, snapshot.parent.parent.name
    if snapshots.name == "snapshots" and entry.startswith(HUB_ENTRY):
        return entry.removeprefix(HUB_ENTRY).replace("--", "/")
    return ""


def check_present(path: Path) -> bytes:
    """Return the first bytes of a file, if it may be a checkpoint.

    Raises:
        CheckpointError: the path does not exist, is not a regular file or cannot be read, or the file
            is empty, a git-lfs pointer, a web page or of another known kind.
    """
    if not path.exists():
        raise missing(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file", "give the path of the checkpoint's file")
    try:
        head = read_head(path)
    except OSError as error:
        raise unreadable(path, error) from error
    _check_fetched(path, head)
    if path.suffix == ".py":
        raise CheckpointError(
            f"{path}: a Python file, not a checkpoint",
            f"name the function in this file that builds the model: --model {path}:FUNCTION",
        )
    if recognised := by_content(path, head):
        what, repair = recognised
        raise CheckpointError(f"{path}: {what}", repair)
    return head


def _check_fetched(path: Path, head: bytes) -> None:
    """Raise CheckpointError for an empty file, a git-lfs pointer or a web page."""
    if not head:
        raise CheckpointError(f"{path}: empty file", AGAIN)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            f"{path}: a git-lfs pointer (a small text file that stands for the real file), not the"
            " checkpoint",
            f"fetch the checkpoint: git lfs pull --include {path.name}",
        )
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(
            f"{path}: an HTML page, not a checkpoint",
            "download the checkpoint again with the file's own link: the used link leads to a web"
            " page",
        )


def not_json(path: Path, text: bytes, fault: str, repair: str) -> CheckpointError:
    """Return the error for a file whose text is not JSON; ``fault`` is the JSON parser's message.

    Raises:
        CheckpointError: the file is empty, or is a git-lfs pointer or a web page.
    """
    _check_fetched(path, text)
    if text.lstrip().startswith(b"{") and not text.rstrip().endswith(b"}"):
        return CheckpointError(f"{path}: truncated: the JSON object has no end", AGAIN)
    return CheckpointError(f"{path}: {fault}", repair)


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """Return the error for a file that the operating system cannot read."""
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror}",
        "check that the file exists, that you may read it, and that its disk works",
    )


def unknown(path: Path, head: bytes) -> CheckpointError:
    return CheckpointError(
        f"{path}: of a kind that weighin does not know; its first bytes are {head[:8].hex(' ')}",
        "save the weights with torch.save or safetensors, with the program that wrote the file",
    )


def first_bytes(path: Path) -> bytes:
    """Return the first 512 bytes of a file; b"" if the file cannot be read."""
    try:
        return read_head(path) if path.is_file() else b""  # opening a pipe would block
    except OSError:
        return b""


def shown(name: object) -> str:
    """Return a tensor's name for a message: in quotes, and cut if the name is very long."""
    if isinstance(name, str | bytes) and len(name) > _MOST_SHOWN:
        return f"{name[:_MOST_SHOWN]!r}... ({len(name):,} characters)"
    if isinstance(name, int) and name.bit_length() > _MOST_BITS:  # Python may refuse to print it
        return f"an integer of {name.bit_length():,} bits"
    return repr(name)


def short(value: object) -> str:
    """Return a value for a message, cut if its text is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
