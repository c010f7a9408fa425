"""Provide checkpoints to load; a cache keeps those that weighin generated or converted.

This module runs in weighin's own process, which does not import torch; a subprocess writes the
checkpoints. ``weighin.checkpoint.entries`` lists the files of the cache.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.checkpoint import entries
from weighin.checkpoint.entries import CachedCheckpoint, clear, folder, list_entries
from weighin.checkpoint.manifest import Manifest, read_manifest
from weighin.checkpoint.subprocess_client import run_maker
from weighin.errors import CheckpointError, ConfigError
from weighin.files import rename
from weighin.formats.pretrained_folder import files_of_adapter
from weighin.formats.pretrained_library import WHOLE, Selection, library_of
from weighin.stream import formats
from weighin.suite import packages, user_code
from weighin.units import format_bytes

__all__ = ["CachedCheckpoint", "Prepared", "Report", "clear", "ensure", "folder", "list_entries"]

Report = Callable[[str, float | None], None]
"""A function that shows the current step's text, and its share done: 0 to 1, None if unknown."""

_DECIDING: Final = ("peft", "compressed-tensors", "bitsandbytes", "gptqmodel")
"""Packages that compute weights of a folder with an adapter or with quantised weights."""

_VALUES: Final = 1  # increase this version when the same seed gives other values


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that is ready to load.

    Attributes:
        path: the checkpoint's file, or its folder if the format has many files.
        made: whether this call of ``ensure`` wrote the checkpoint, or its manifest if ``in_place``.
        in_place: whether ``path`` is the user's own checkpoint, not a checkpoint in the cache.
        warnings: messages for the user, such as that a damaged checkpoint was replaced.
    """

    path: Path
    manifest_path: Path
    format: str
    made: bool
    in_place: bool = False
    warnings: tuple[str, ...] = ()

    def manifest(self) -> Manifest:
        return read_manifest(self.manifest_path)


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments of one call of ``ensure``; ``entry`` is the checkpoint's folder in the cache.

    With ``in_place``, measurements load the user's file; the cache has only this file's manifest.
    """

    model: ModelSpec
    fmt: str
    entry: Path
    checkpoint: Path | None
    dtype: str
    seed: int
    python_path: tuple[str, ...]
    report: Report
    selection: Selection
    in_place: bool


def ensure(
    model: ModelSpec,
    fmt: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    checkpoint: Path | None = None,
    selection: Selection = WHOLE,
    progress: Report | None = None,
    python_path: Sequence[str] = (),
) -> Prepared:
    """Return a checkpoint of ``model`` in format ``fmt``; create it if the cache lacks it.

    ``checkpoint`` is the user's own file, if any. weighin compares this file with the model at the
    first use, and again after a change of the file (size or modification time), the model or
    ``selection``. weighin converts the model's state dict into the cache if the file has another
    format than ``fmt``, if ``selection`` is not ``WHOLE``, or if the file holds more than tensors
    (except for models of transformers, diffusers and timm). ``dtype`` is that of the loads: the library
    of a Hugging Face folder says how its model is in this dtype. ``python_path`` lists the folders from
    which a user's builder is imported.

    Raises:
        UnknownName: no format has this name.
        ConfigError: the model's builder is invalid, or the cache is not writable or too full.
        CheckpointError: the user's checkpoint is damaged or does not fit the model, or the subprocess
            was killed.
    """
    formats.known(fmt)
    origin: list[object] = [model.builder, model.kwargs]
    library = library_of(model.builder)
    if not user_code.is_ours(model.builder):
        if code := user_code.file_of(model.builder, python_path):
            origin += [str(code), _digest(code)]
        origin += packages.versions(["torch", "transformers"]).items()
    elif library:
        names = ["torch", library.name, *_DECIDING]
        origin += [dtype, *packages.versions(names).items()]
    in_place = False
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser()
        in_place = fmt == formats.detect(checkpoint) and not selection
        checkpoint = checkpoint.absolute()  # links stay: config.json is beside the link
        if in_place and library is None:
            in_place = formats.read(checkpoint).only_tensors
        origin += [str(checkpoint), *selection.options]
        for file in [*formats.files(checkpoint), *files_of_adapter(model)]:
            state = file.stat()
            origin += [file.name, state.st_size, state.st_mtime_ns]
    else:
        origin += [seed, _VALUES]
    entry = folder() / "models" / entries.entry_name(model.name, *origin)
    report = progress or (lambda _text, _share: None)
    task = _Task(
        model, fmt, entry, checkpoint, dtype, seed, tuple(python_path), report, selection, in_place
    )
    with entries.locked(
        entry, lambda: report(f"waiting for another weighin process that uses {entry.name}", None)
    ):
        return _ensure_locked(task)


def _digest(code: Path) -> str:
    """Return a digest of a module's file, or of all Python files of a package."""
    package = code.parent if code.name == "__init__.py" else code
    files = sorted(package.rglob("*.py")) if package.is_dir() else [code]
    contents = (str(file.relative_to(package)).encode() + file.read_bytes() for file in files)
    return sha256(b"".join(contents)).hexdigest()


def _ensure_locked(task: _Task) -> Prepared:
    task.entry.mkdir(parents=True, exist_ok=True)
    entries.remove_leftovers(task.entry)
    warnings: tuple[str, ...] = ()
    damage = None if task.in_place else entries.damage(task.entry, task.fmt)
    if damage is None and _cached_manifest(task.entry) is None:
        missing = not (task.entry / "manifest.json").exists()
        damage = "" if missing else "manifest.json is damaged"
    if damage:
        warnings = (f"the cached checkpoint in {task.entry / task.fmt} was replaced: {damage}",)
    if damage is not None:
        try:
            _make(task)
        except BaseException:
            if not any(task.entry.iterdir()):
                task.entry.rmdir()
            raise
    manifest_path = task.entry / "manifest.json"
    if task.in_place:
        assert task.checkpoint is not None
        path, used = task.checkpoint, manifest_path
    else:
        path, used = formats.checkpoint_in(task.entry, task.fmt), task.entry / f"{task.fmt}.json"
    os.utime(used)  # records the time of this use
    made = damage is not None
    return Prepared(path, manifest_path, task.fmt, made, task.in_place, warnings)


def _make(task: _Task) -> None:
    """Let the subprocess write into a temporary folder, then move the files into the cache."""
    verb = "reading" if task.in_place else "converting" if task.checkpoint else "making"
    text = f"{verb} the checkpoint of {task.model.name}"
    task.report(text, None)
    temporary = Path(tempfile.mkdtemp(prefix=entries.TEMPORARY, dir=task.entry))
    try:
        run_maker(
            _request(task, temporary),
            permit=lambda needed: _check_space(task, needed),
            report=lambda done, total: task.report(text, min(done / max(total, 1), 1.0)),
            python_path=task.python_path,
        )
        _publish(task, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _request(task: _Task, out: Path) -> dict[str, Any]:
    return {
        "verb": "index" if task.checkpoint else "make",
        "model": asdict(task.model),
        "dtype": task.dtype,
        "seed": task.seed,
        "checkpoint": str(task.checkpoint),
        "selection": asdict(task.selection),
        "format": task.fmt,
        "out": str(out),
    }


def _publish(task: _Task, temporary: Path) -> None:
    """Move the new files into the cache; write the marker last, to mark only complete formats."""
    new = read_manifest(temporary / "manifest.json")
    old = _cached_manifest(task.entry)
    if old is not None and old.tensors != new.tensors:
        # Another torch version or processor gave other values: discard formats with old values.
        for marker in task.entry.glob("*.json"):
            if marker.name != "manifest.json":
                entries.discard(task.entry, marker.stem)
    entries.discard(task.entry, task.fmt)
    rename(temporary / "manifest.json", task.entry / "manifest.json")
    if not task.in_place:
        rename(temporary / task.fmt, task.entry / task.fmt)
        entries.write_marker(task.entry, task.fmt)


def _cached_manifest(entry: Path) -> Manifest | None:
    try:
        return read_manifest(entry / "manifest.json")
    except CheckpointError:
        return None


def _check_space(task: _Task, needed_bytes: int) -> None:
    free = shutil.disk_usage(task.entry).free
    if free < needed_bytes:
        raise ConfigError(
            f"the {task.fmt} checkpoint of {task.model.name} needs {format_bytes(needed_bytes)} in"
            f" {folder()}, but only {format_bytes(free)} are free",
            "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..., or empty the cache:"
            " weighin cache clear",
        )
