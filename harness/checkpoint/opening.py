"""Opening a checkpoint that a user gives, and saying in one line what is wrong with it."""

import pickle
import re
import shlex
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from harness.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from harness.checkpoint.layouts.file_view import FileView

_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")  # torch before 1.6
_AGAIN: Final = "copy or download the file again"


def load_state_dict(
    path: Path, *, map_location: str | None = None, mmap: bool = False
) -> "dict[str, torch.Tensor]":
    """Return a flat state dict, in the file's order, without running code from the file.

    Raises:
        CheckpointError: no file, no checkpoint, damaged, or not a flat dict of tensors.
    """
    return _flat(path, _load(path, map_location, mmap))


def load_tensor(path: Path, *, map_location: str | None = None) -> "torch.Tensor":
    """Return the one tensor of a file, mapped unless it goes to the meta device.

    Raises:
        CheckpointError: as ``load_state_dict``, or the file holds something else.
    """
    return _tensor(path, _load(path, map_location, mmap=map_location is None))


def _tensor(path: Path, tensor: Any) -> "torch.Tensor":
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: holds a {type(tensor).__name__}, not a tensor", _AGAIN)
    return tensor


def load_embedded(path: Path, archive: "FileView") -> "torch.Tensor":
    """Return the one tensor of an archive inside a file, on the meta device.

    Raises:
        CheckpointError: as ``load_tensor``.
    """
    return _tensor(path, _read(path, archive, "meta", mmap=False))


def _load(path: Path, map_location: str | None, mmap: bool) -> Any:
    check_file(path)
    return _read(path, path, map_location, mmap)


def _read(path: Path, source: Any, map_location: str | None, mmap: bool) -> Any:
    import torch

    try:
        return torch.load(source, map_location=map_location, mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, and was NOT executed: {_reason(error)}",
            "save plain weights where you trust the file: torch.save(model.state_dict(), ...)",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AssertionError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {_first_line(error)}", _AGAIN) from error


def check_file(path: Path) -> None:
    """Raise CheckpointError where ``path`` cannot be a zip checkpoint, with what it is instead."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file", "check the path")
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file", "give the checkpoint file itself")
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}", "check its permissions"
        ) from error
    if not head:
        raise CheckpointError(f"{path}: empty file", _AGAIN)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            f"{path}: a git-lfs pointer, not the checkpoint it points to",
            f"fetch the file itself: git lfs pull --include {path.name}",
        )
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(
            f"{path}: an HTML page, not a checkpoint",
            "the download link led to a web page: use the link to the file itself",
        )
    if not head.startswith(b"PK"):
        raise _not_a_zip(path, head)
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path}: truncated: the zip archive has no end", _AGAIN)


def _not_a_zip(path: Path, head: bytes) -> CheckpointError:
    if _LEGACY_MAGIC in head[:32]:
        line = "import sys, torch; p = sys.argv[1]; torch.save(torch.load(p, weights_only=True), p + '.new')"
        return CheckpointError(
            f"{path}: written in the format of torch before 1.6, which cannot be mapped",
            f'convert it: python -c "{line}" {shlex.quote(str(path))}',
        )
    if path.suffix == ".safetensors":
        return CheckpointError(
            f"{path}: a safetensors file, which this version does not read as a checkpoint",
            "give a file that torch.save wrote",
        )
    return CheckpointError(f"{path}: not a checkpoint that torch.save wrote", _AGAIN)


def _flat(path: Path, state: Any) -> "dict[str, torch.Tensor]":
    import torch

    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: holds a {type(state).__name__}, not a state dict",
            "save the weights alone: torch.save(model.state_dict(), ...)",
        )
    for key, value in state.items():
        if isinstance(key, str) and isinstance(value, torch.Tensor):
            continue
        raise CheckpointError(
            f"{path}: not a flat state dict: {key!r} holds a {type(value).__name__}",
            f"save the inner dict alone, for example torch.save(checkpoint[{key!r}], ...)"
            if isinstance(value, dict)
            else "save the weights alone: torch.save(model.state_dict(), ...)",
        )
    if not state:
        raise CheckpointError(f"{path}: the state dict is empty", "save a model that has weights")
    return state


def _reason(error: Exception) -> str:
    """Return what torch refused: the name of a function or class, or its own first line."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"it refers to {named[1]}" if named else _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
