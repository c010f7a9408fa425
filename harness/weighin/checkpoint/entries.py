"""Manage the cache's folder. An entry of the cache has the checkpoint of one model in one or more
formats, with values that were generated from one seed or read from one checkpoint of the user.

::

    $WEIGHIN_CACHE/models/gpt2-xl-1f2e3d4c/   one entry
        manifest.json     the tensors that the model must have after a load
        pt.json           marker: format pt is complete; its files, their sizes and mtimes
        pt/model.pt
        per_param.json
        per_param/...
        .making-XXXX/     the folder of a running or killed subprocess
    $WEIGHIN_CACHE/locks/gpt2-xl-1f2e3d4c.lock
    $WEIGHIN_CACHE/plans.sha256    the digests of the plans that weighin wrote (``weighin.plan.start``)

weighin writes a format again if its marker or the manifest is missing or damaged, or if a file's
size or modification time differs from the marker. The checkpoint files are read-only, so that a
strategy (code that loads a checkpoint) cannot change them, unless it runs as root.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from weighin.errors import ConfigError, UnknownName
from weighin.files import write_text

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")
TEMPORARY: Final = ".making-"
"""The prefix of the folders into which subprocesses write."""


@dataclass(frozen=True, slots=True)
class CachedCheckpoint:
    """A checkpoint in the cache. ``last_used_s`` is in seconds since the epoch.

    ``size_bytes`` is the size of the checkpoint's files. If the cache has only the manifest of a user's
    own file, ``size_bytes`` is 0 and ``format`` is "index".
    """

    name: str
    format: str
    size_bytes: int
    last_used_s: float
    path: Path


def folder() -> Path:
    """Return the cache's folder: $WEIGHIN_CACHE, or a folder in the user's cache directory.

    Raises:
        ConfigError: the folder is below a home folder that does not exist.
    """
    chosen = os.environ.get("WEIGHIN_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(chosen or f"{caches}/weighin").expanduser().absolute()
    except RuntimeError as error:  # such as a user who is not in /etc/passwd, without HOME
        raise ConfigError(
            f"there is no folder for weighin's cache: {str(error).rstrip('.').lower()}",
            "name a folder: WEIGHIN_CACHE=/path weighin ...",
        ) from None


def slow_disks() -> Path:
    """Return the folder in which the slow disks of all runs are mounted."""
    return folder() / "disks"


@contextmanager
def used(chosen: Path) -> Iterator[None]:
    """Make ``chosen`` the cache's folder within the context, also of processes that start in it."""
    before = os.environ.get("WEIGHIN_CACHE")
    os.environ["WEIGHIN_CACHE"] = str(chosen.expanduser().absolute())
    try:
        yield
    finally:
        del os.environ["WEIGHIN_CACHE"]
        if before is not None:
            os.environ["WEIGHIN_CACHE"] = before


def entry_name(model: str, *origin: Any) -> str:
    """Return the name of an entry's folder: the model's name and a digest of ``origin``.

    ``origin`` is all that determines the tensors' values: the builder and its arguments, and the
    seed or the user's files.
    """
    text = json.dumps(origin, sort_keys=True, default=str)
    safe = _UNSAFE.sub("_", model).lstrip(".") or "model"
    return f"{safe[:100]}-{sha256(text.encode()).hexdigest()[:8]}"


def write_marker(entry: Path, fmt: str) -> None:
    """Mark an entry's files of format ``fmt`` as complete, and make these files read-only.

    The marker records the current sizes and modification times (in ns) of the files.
    """
    files = {}
    for file in sorted((entry / fmt).iterdir()):
        file.chmod(0o444)
        files[file.name] = (file.stat().st_size, file.stat().st_mtime_ns)
    write_text(entry / f"{fmt}.json", json.dumps({"format": fmt, "files": files}))


def damage(entry: Path, fmt: str) -> str | None:
    """Return a text that says what is damaged in format ``fmt`` of an entry of the cache.

    The result is None if the manifest exists and each file has the size and modification time in
    the marker, and "" if the entry has no marker of this format.
    """
    try:
        files: dict[str, list[int]] = json.loads((entry / f"{fmt}.json").read_text())["files"]
        recorded = [(name, size, mtime_ns) for name, (size, mtime_ns) in files.items()]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return "its marker is damaged"
    for name, size, mtime_ns in recorded:
        if harm := _harm(entry / fmt / name, size, mtime_ns):
            return f"{name} {harm}"
    if not (entry / "manifest.json").is_file():
        return "manifest.json is missing"
    return None


def _harm(file: Path, size: int, mtime_ns: int) -> str:
    try:
        state = file.stat()
    except OSError:
        return "is missing"
    if state.st_size != size:
        return f"has {state.st_size:,} bytes, not {size:,}"
    return "" if state.st_mtime_ns == mtime_ns else "was changed after it was made"


def discard(entry: Path, fmt: str) -> None:
    """Remove the marker, and then the files, of format ``fmt`` from an entry of the cache."""
    (entry / f"{fmt}.json").unlink(missing_ok=True)
    shutil.rmtree(entry / fmt, ignore_errors=True)


@contextmanager
def locked(entry: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Lock one entry within the context; the kernel releases the lock if the process is killed.

    If another process has the lock, ``locked`` calls ``waiting`` once and then waits.

    Raises:
        ConfigError: the cache is not writable.
    """
    path = folder() / "locks" / f"{entry.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {folder()}: {error.strerror}",
            "choose another folder: WEIGHIN_CACHE=/path weighin ...",
        ) from error
    from filelock import FileLock, Timeout  # imports asyncio, which takes 0.05 s

    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remove_leftovers(entry: Path) -> None:
    """Remove the folders of killed subprocesses from an entry; the caller must hold its lock."""
    for leftover in entry.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def list_entries() -> list[CachedCheckpoint]:
    """Return all checkpoints of the cache, the most recently used first."""
    checkpoints = [stored for entry in _entries() for stored in _formats(entry)]
    return sorted(checkpoints, key=lambda stored: stored.last_used_s, reverse=True)


def clear(name: str | None = None) -> list[CachedCheckpoint]:
    """Remove from the cache all entries of the model ``name``, or the one entry called ``name``. If
    ``name`` is None, remove all entries.

    ``clear`` waits for subprocesses that are writing to these entries, removes nothing else in the
    cache's folder, and returns the removed checkpoints.

    Raises:
        UnknownName: no entry and no model in the cache has this name.
    """
    chosen = [e for e in _entries() if name is None or name in {e.name, e.name.rpartition("-")[0]}]
    if name is not None and not chosen:
        raise UnknownName("cached model", name, {e.name.rpartition("-")[0] for e in _entries()})
    removed: list[CachedCheckpoint] = []
    for entry in chosen:
        with locked(entry, lambda: None):
            removed += _formats(entry)
            for marker in entry.glob(
                "*.json"
            ):  # first, because a format without a marker is incomplete
                marker.unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)
    return removed


def _entries() -> Iterator[Path]:
    models = folder() / "models"
    if models.is_dir():
        # A symbolic link could lead out of the cache.
        yield from sorted(e for e in models.iterdir() if e.is_dir() and not e.is_symlink())


def _formats(entry: Path) -> Iterator[CachedCheckpoint]:
    markers = [path for path in sorted(entry.glob("*.json")) if path.name != "manifest.json"]
    for marker in markers:
        files = entry / marker.stem
        size = sum(file.stat().st_size for file in files.iterdir()) if files.is_dir() else 0
        yield CachedCheckpoint(entry.name, marker.stem, size, marker.stat().st_mtime, files)
    if not markers and (manifest := entry / "manifest.json").is_file():
        yield CachedCheckpoint(entry.name, "index", 0, manifest.stat().st_mtime, manifest)
