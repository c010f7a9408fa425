"""Provide checkpoints to load. Each is generated or converted once, cached, and checked before use.

This module runs in the parent process, which does not import torch; a subprocess writes the
checkpoints. The module ``entries`` describes the cache's folder.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from weighin import atomic, formats
from weighin.cell import ModelSpec
from weighin.checkpoint import entries
from weighin.checkpoint.entries import CachedCheckpoint, clear, folder, list_entries
from weighin.checkpoint.manifest import Manifest, read_manifest
from weighin.checkpoint.subprocess_client import run_maker
from weighin.errors import CheckpointError, ConfigError
from weighin.formats.lora import files_of
from weighin.formats.pretrained_library import library_of
from weighin.formats.selection import WHOLE, Selection
from weighin.suite import user_code
from weighin.units import format_bytes

__all__ = ["CachedCheckpoint", "Prepared", "Report", "clear", "ensure", "folder", "list_entries"]

Report = Callable[[str, float | None], None]
"""A function that is called with a line about the current step and its progress, 0 to 1 or None."""

_VALUES: Final = 1  # a version, to be increased when the same seed gives other values


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that is ready to load.

    Attributes:
        path: the checkpoint's file, or its folder if the format has many files.
        files_bytes: the size of all files of the checkpoint.
        made: whether this call of ``ensure`` created the checkpoint.
        in_place: whether the checkpoint is the user's own file, not a file in the cache.
        warnings: messages for the user, such as that a damaged checkpoint was replaced.
    """

    path: Path
    manifest_path: Path
    format: str
    files_bytes: int
    made: bool
    in_place: bool = False
    warnings: tuple[str, ...] = ()

    def manifest(self) -> Manifest:
        """Read and return the checkpoint's manifest."""
        return read_manifest(self.manifest_path)


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments of one call of ``ensure``, and the folder of its entry in the cache.

    ``in_place`` tells whether cells load the user's own file, so that only its manifest is cached.
    """

    model: ModelSpec
    fmt: str
    entry: Path
    checkpoint: Path | None
    seed: int
    python_path: tuple[str, ...]
    report: Report
    selection: Selection
    in_place: bool


def ensure(
    model: ModelSpec,
    fmt: str,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    selection: Selection = WHOLE,
    progress: Report | None = None,
    python_path: Sequence[str] = (),
) -> Prepared:
    """Return a checkpoint of ``model`` in format ``fmt``; create it if the cache lacks it.

    ``checkpoint`` is the user's own file, if any. The user's file is compared with the model once, and
    again when its size or modification time changes. The file is converted into the cache if it has
    another format than ``fmt``, if ``selection`` selects only a part of it or renames its tensors, or
    if it holds more than tensors; the converted file then holds only the model's state dict. ``python_path`` lists the
    folders from which a user's builder is imported.

    Raises:
        UnknownName: no format has this name.
        ConfigError: the model's builder is invalid, or the disk is too full.
        CheckpointError: the user's checkpoint is damaged or does not fit the model, or the subprocess
            was killed.
    """
    formats.known(fmt)
    origin: list[object] = [model.builder, model.kwargs]
    if not user_code.is_ours(model.builder) and (
        code := user_code.file_of(model.builder, python_path)
    ):
        origin.append(str(code))  # two files of the same name may build different models
    in_place = False
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser()
        in_place = fmt == formats.detect(checkpoint).NAME and not selection
        checkpoint = checkpoint.absolute()  # a link stays: config.json is beside it
        if in_place and library_of(model.builder) is None:
            in_place = formats.has_only_tensors(checkpoint)
        origin += [str(checkpoint), *selection.options]
        for file in [*formats.files(checkpoint), *files_of(model)]:
            state = file.stat()
            origin += [file.name, state.st_size, state.st_mtime_ns]
    else:
        origin += [seed, _VALUES]
    entry = folder() / "models" / entries.entry_name(model.name, *origin)
    report = progress or (lambda _text, _share: None)
    task = _Task(
        model, fmt, entry, checkpoint, seed, tuple(python_path), report, selection, in_place
    )
    with entries.locked(
        entry, lambda: report(f"waiting for another weighin process that uses {entry.name}", None)
    ):
        return _ensure_locked(task)


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
    return _prepared(task, made=damage is not None, warnings=warnings)


def _prepared(task: _Task, *, made: bool, warnings: tuple[str, ...]) -> Prepared:
    manifest_path = task.entry / "manifest.json"
    if task.in_place:
        assert task.checkpoint is not None
        path = task.checkpoint
        os.utime(manifest_path)  # records the time of this use
    else:
        path = formats.checkpoint_in(task.entry, task.fmt)
        os.utime(task.entry / f"{task.fmt}.json")
    return Prepared(
        path=path,
        manifest_path=manifest_path,
        format=task.fmt,
        files_bytes=sum(file.stat().st_size for file in formats.files(path)),
        made=made,
        in_place=task.in_place,
        warnings=warnings,
    )


def _make(task: _Task) -> None:
    """Run the subprocess in a temporary folder of the entry, then rename its files into place."""
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
        "seed": task.seed,
        "checkpoint": str(task.checkpoint),
        "selection": asdict(task.selection),
        "format": task.fmt,
        "out": str(out),
    }


def _publish(task: _Task, temporary: Path) -> None:
    """Move the new files into place so that at any time each format with a marker is complete."""
    new = read_manifest(temporary / "manifest.json")
    old = _cached_manifest(task.entry)
    if old is not None and old.tensors != new.tensors:
        # Another torch version or processor gave other values: discard formats with old values.
        for marker in task.entry.glob("*.json"):
            if marker.name != "manifest.json":
                entries.discard(task.entry, marker.stem)
    entries.discard(task.entry, task.fmt)
    atomic.rename(temporary / "manifest.json", task.entry / "manifest.json")
    if not task.in_place:
        atomic.rename(temporary / task.fmt, task.entry / task.fmt)
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
            f"the {task.fmt} checkpoint of {task.model.name} needs {format_bytes(needed_bytes)} "
            f"in {folder()}, where {format_bytes(free)} are free",
            "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..., "
            "or empty it: weighin cache clear",
        )
