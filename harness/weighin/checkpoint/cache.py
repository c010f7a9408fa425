"""Checkpoints ready to be loaded: made once, kept in the cache, checked at each use.

Runs in the parent: torch is imported in the maker's process only. See ``entries`` for the layout.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weighin import atomic, formats
from weighin.cell import ModelSpec
from weighin.checkpoint import entries
from weighin.checkpoint.entries import CachedCheckpoint, clear, folder, list_entries
from weighin.checkpoint.manifest import Manifest, read_manifest
from weighin.checkpoint.subprocess_client import run_maker
from weighin.errors import CheckpointError, ConfigError
from weighin.units import format_bytes

__all__ = ["CachedCheckpoint", "Prepared", "Report", "clear", "ensure", "folder", "list_entries"]

Report = Callable[[str, float | None], None]
"""Called with one line on what is being done, and the share that is done (None: unknown)."""

_VALUES: Final = 1  # raised when the same seed begins to give other values


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that is ready to be loaded.

    Attributes:
        path: the file, or the folder of a format of many files.
        files_bytes: of all its files.
        made: whether it was made by this call.
        warnings: what a user should know, such as that a damaged one was made again.
    """

    path: Path
    manifest_path: Path
    format: str
    files_bytes: int
    made: bool
    warnings: tuple[str, ...] = ()

    def manifest(self) -> Manifest:
        """Return the whole manifest."""
        return read_manifest(self.manifest_path)


@dataclass(frozen=True, slots=True)
class _Task:
    """One call of ``ensure``: what to make, and where."""

    model: ModelSpec
    fmt: str
    entry: Path
    checkpoint: Path | None
    seed: int
    python_path: tuple[str, ...]
    report: Report

    @property
    def in_place(self) -> bool:
        """Whether the user's own file is what is loaded, and only its manifest is cached."""
        return self.checkpoint is not None and self.fmt == formats.detect(self.checkpoint).NAME


def ensure(
    model: ModelSpec,
    fmt: str,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: Report | None = None,
    python_path: Sequence[str] = (),
) -> Prepared:
    """Return a checkpoint of ``model`` in format ``fmt``; make it where there is none yet.

    With ``checkpoint`` it is the user's own file: read against the model once (again when its
    size or time changes), and converted into the cache where ``fmt`` is not its own format.
    ``python_path`` holds the folders that a user's builder is imported from.

    Raises:
        UnknownName: no format is called so.
        ConfigError: the model's builder cannot be used, or the disk is too full.
        CheckpointError: the user's checkpoint cannot be used, or the maker was killed.
    """
    formats.named(fmt)
    origin: list[object] = [model.builder, model.kwargs]
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser()
        formats.detect(checkpoint)
        checkpoint = checkpoint.resolve()
        origin.append(str(checkpoint))
        for file in formats.files(checkpoint):
            state = file.stat()
            origin += [file.name, state.st_size, state.st_mtime_ns]
    else:
        origin += [seed, _VALUES]
    entry = folder() / "models" / entries.entry_name(model.name, *origin)
    report = progress or (lambda _text, _share: None)
    task = _Task(model, fmt, entry, checkpoint, seed, tuple(python_path), report)
    with entries.locked(
        entry, lambda: report(f"waiting: another weighin holds {entry.name}", None)
    ):
        return _ensure_locked(task)


def _ensure_locked(task: _Task) -> Prepared:
    task.entry.mkdir(parents=True, exist_ok=True)
    entries.remove_leftovers(task.entry)
    warnings: tuple[str, ...] = ()
    wrong = None if task.in_place else entries.damage(task.entry, task.fmt)
    if wrong is None and _cached_manifest(task.entry) is None:
        missing = not (task.entry / "manifest.json").exists()
        wrong = "" if missing else "manifest.json is damaged"
    if wrong:
        warnings = (f"the cached checkpoint in {task.entry / task.fmt} was made again: {wrong}",)
    if wrong is not None:
        try:
            _make(task)
        except BaseException:
            if not any(task.entry.iterdir()):
                task.entry.rmdir()
            raise
    return _prepared(task, made=wrong is not None, warnings=warnings)


def _prepared(task: _Task, *, made: bool, warnings: tuple[str, ...]) -> Prepared:
    manifest_path = task.entry / "manifest.json"
    if task.in_place:
        assert task.checkpoint is not None
        path = task.checkpoint
        os.utime(manifest_path)  # when it was last used
    else:
        path = formats.checkpoint_in(task.entry, task.fmt)
        os.utime(task.entry / f"{task.fmt}.json")
    return Prepared(
        path=path,
        manifest_path=manifest_path,
        format=task.fmt,
        files_bytes=sum(file.stat().st_size for file in formats.files(path)),
        made=made,
        warnings=warnings,
    )


def _make(task: _Task) -> None:
    """Run the maker in a folder beside the entry's, then rename what it made into place."""
    verb = "reading" if task.in_place else "converting" if task.checkpoint else "making"
    text = f"{verb} the checkpoint of {task.model.name}"
    task.report(text, None)
    temporary = Path(tempfile.mkdtemp(prefix=entries.TEMPORARY, dir=task.entry))
    try:
        run_maker(
            _arguments(task, temporary),
            permit=lambda needed: _check_space(task, needed),
            report=lambda done, total: task.report(text, min(done / max(total, 1), 1.0)),
            python_path=task.python_path,
        )
        _publish(task, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _arguments(task: _Task, out: Path) -> list[str]:
    spec = task.model
    arguments = ["index", f"--checkpoint={task.checkpoint}"] if task.checkpoint else ["make"]
    arguments += [f"--model={spec.name}", f"--builder={spec.builder}", f"--out={out}"]
    arguments += [f"--kwargs={json.dumps(spec.kwargs)}", f"--format={task.fmt}"]
    return arguments if task.checkpoint else [*arguments, f"--seed={task.seed}"]


def _publish(task: _Task, temporary: Path) -> None:
    """Put what was made in its place: at every instant, what has a marker is whole."""
    new = read_manifest(temporary / "manifest.json")
    old = _cached_manifest(task.entry)
    if old is not None and old.tensors != new.tensors:
        # Another torch or another processor gave other values: no format may keep the old ones.
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
