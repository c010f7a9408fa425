"""Provide checkpoints to load; the cache keeps those that weighin generated or converted.

An entry of the cache has the checkpoint of one model in one or more formats, with values that were
generated from one seed or read from one checkpoint of the user::

    $WEIGHIN_CACHE/models/gpt2-xl-1f2e3d4c/   one entry
        manifest.json     the tensors that the model must have after a load
        pt.json           marker: format pt is complete; its files, their sizes and mtimes
        pt/model.pt
        per_param.json
        per_param/...
        .making-XXXX/     the folder of a running or killed child
    $WEIGHIN_CACHE/locks/gpt2-xl-1f2e3d4c.lock
    $WEIGHIN_CACHE/plans.sha256    the digests of the plans that weighin wrote (``weighin.plan.start``)

weighin writes a format again if its marker or the manifest is missing or damaged, or if a file's
size or modification time differs from the marker. The checkpoint files are read-only, so that a
strategy (code that loads a checkpoint) cannot change them, unless it runs as root. This module runs in
weighin's own process, which does not import torch; a child writes the checkpoints.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from weighin.cell import ModelSpec
from weighin.checkpoint import staging
from weighin.checkpoint.child import run_child
from weighin.checkpoint.manifest import Manifest, read_manifest
from weighin.errors import CheckpointError, ConfigError, UnknownName
from weighin.files import rename, write_text
from weighin.stream import formats
from weighin.stream.pretrained_folder import digest, files_of_adapter
from weighin.stream.pretrained_library import WHOLE, Selection, library_of
from weighin.suite import registry, user_code
from weighin.units import format_bytes

Report = Callable[[str, float | None], None]
"""A function that shows the current step's text, and its share done: 0 to 1, None if unknown."""

_DECIDING: Final = ("peft", "compressed-tensors", "bitsandbytes", "gptqmodel")
"""Packages that compute weights of a folder with an adapter or with quantised weights."""

_VALUES: Final = 1  # increase this version when the same seed gives other values
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")
_TEMPORARY: Final = ".making-"
_MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that is ready to load.

    ``made`` tells whether this call of ``ensure`` wrote the checkpoint, or only its manifest if ``in_place``:
    then ``path`` is the user's own checkpoint. ``warnings`` are for the user.
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
class CachedCheckpoint:
    """A checkpoint in the cache; ``last_used_s`` is in seconds since the epoch. If the cache has only the
    manifest of a user's own file, ``size_bytes`` is 0 and ``format`` is "index".
    """

    name: str
    format: str
    size_bytes: int
    last_used_s: float
    path: Path


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

    ``checkpoint`` is the user's own file, which is compared with the model at its first use and after a
    change of the file, the model or ``selection``. Its state dict is converted into the cache if it has another
    format than ``fmt``, or holds more than the model's tensors. ``dtype`` is that of the loads.
    ``python_path`` lists the folders from which a user's builder is imported.
    """
    formats.known(fmt)
    origin, in_place = _origin(model, dtype, python_path), False
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser()
        in_place = fmt == formats.detect(checkpoint) and not selection
        checkpoint = checkpoint.absolute()  # links stay: config.json is beside the link
        if in_place and library_of(model.builder) is None:
            in_place = formats.read(checkpoint).only_tensors
        origin.append(str(checkpoint))
        origin += [f"--key={selection.key}"] if selection.key else []
        origin += [f"--strip-prefix={selection.strip_prefix}"] if selection.strip_prefix else []
        for file in [*formats.files(checkpoint), *files_of_adapter(model)]:
            state = file.stat()
            origin += [file.name, state.st_size, state.st_mtime_ns]
    else:
        origin += [seed, _VALUES]
    digits = sha256(json.dumps(origin, sort_keys=True, default=str).encode()).hexdigest()
    safe = _UNSAFE.sub("_", model.name).lstrip(".") or "model"
    entry = staging.folder() / "models" / f"{safe[:100]}-{digits[:8]}"
    report = progress or (lambda _text, _share: None)
    verb = "reading" if in_place else "converting" if checkpoint else "making"
    text = f"{verb} the checkpoint of {model.name}"
    request = {
        "verb": "index" if checkpoint else "make",
        "model": asdict(model),
        "dtype": dtype,
        "seed": seed,
        "checkpoint": str(checkpoint),
        "selection": asdict(selection),
        "format": fmt,
    }

    def make() -> None:
        """Let a child write into a temporary folder, then move the files into the cache."""
        report(text, None)
        with staging.own_folder(entry, _TEMPORARY) as temporary:
            run_child(
                request | {"out": str(temporary)},
                permit=lambda needed: _check_space(
                    entry, f"{fmt} checkpoint of {model.name}", needed
                ),
                report=lambda done, total: report(text, min(done / max(total, 1), 1.0)),
                python_path=python_path,
            )
            _publish(entry, temporary, fmt, in_place=in_place)

    with _locked(
        entry, lambda: report(f"waiting for another weighin process that uses {entry.name}", None)
    ):
        entry.mkdir(parents=True, exist_ok=True)
        staging.remove_orphans(entry, _TEMPORARY)
        damage = None if in_place else _damage(entry, fmt)
        if damage is None and _cached_manifest(entry) is None:
            damage = f"{_MANIFEST} is damaged" if (entry / _MANIFEST).exists() else ""
        if damage is not None:
            try:
                make()
            except BaseException:
                if not any(entry.iterdir()):
                    entry.rmdir()
                raise
        manifest = entry / _MANIFEST
        os.utime(manifest if in_place else entry / f"{fmt}.json")  # the time of this use
    was = f"the cached checkpoint in {entry / fmt} was replaced: {damage}"
    path = checkpoint if in_place and checkpoint else formats.checkpoint_in(entry, fmt)
    return Prepared(path, manifest, fmt, damage is not None, in_place, (was,) if damage else ())


def _origin(model: ModelSpec, dtype: str, python_path: Sequence[str]) -> list[object]:
    """Return what determines the tensors' values, except for the seed or the user's files."""
    origin: list[object] = [model.builder, model.kwargs]
    library = library_of(model.builder)
    if not user_code.is_ours(model.builder):
        if code := user_code.file_of(model.builder, python_path):
            origin += [str(code), digest(code.parent if code.name == "__init__.py" else code)]
        origin += registry.versions(["torch", "transformers"]).items()
    elif library:
        names = ["torch", library.name, *_DECIDING]
        origin += [dtype, *registry.versions(names).items()]
    return origin


def _publish(entry: Path, temporary: Path, fmt: str, *, in_place: bool) -> None:
    """Move the new files into the cache; write the marker last, to mark only complete formats."""
    new = read_manifest(temporary / _MANIFEST)
    old = _cached_manifest(entry)
    if old is not None and old.tensors != new.tensors:
        # Another torch version or processor gave other values: discard formats with old values.
        for marker in _markers(entry):
            discard(entry, marker.stem)
    discard(entry, fmt)
    rename(temporary / _MANIFEST, entry / _MANIFEST)
    if not in_place:
        rename(temporary / fmt, entry / fmt)
        write_marker(entry, fmt)


def _cached_manifest(entry: Path) -> Manifest | None:
    try:
        return read_manifest(entry / _MANIFEST)
    except CheckpointError:
        return None


def _check_space(entry: Path, what: str, needed_bytes: int) -> None:
    free = shutil.disk_usage(entry).free
    if free < needed_bytes:
        raise ConfigError(
            f"the {what} needs {format_bytes(needed_bytes)} in {staging.folder()}, but only"
            f" {format_bytes(free)} are free",
            "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..., or empty the cache:"
            " weighin cache clear",
        )


def write_marker(entry: Path, fmt: str) -> None:
    """Mark an entry's files of a format as complete, with their sizes and times, and make them read-only."""
    files = {}
    for file in sorted((entry / fmt).iterdir()):
        file.chmod(0o444)
        files[file.name] = (file.stat().st_size, file.stat().st_mtime_ns)
    write_text(entry / f"{fmt}.json", json.dumps({"format": fmt, "files": files}))


def _damage(entry: Path, fmt: str) -> str | None:
    """Return what is damaged in a format of an entry; "" if it has no marker, None if nothing is."""
    try:
        files: dict[str, list[int]] = json.loads((entry / f"{fmt}.json").read_text())["files"]
        recorded = [(name, size, mtime_ns) for name, (size, mtime_ns) in files.items()]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return "its marker is damaged"
    for name, size, mtime_ns in recorded:
        try:
            state = (entry / fmt / name).stat()
        except OSError:
            return f"{name} is missing"
        if state.st_size != size:
            return f"{name} has {state.st_size:,} bytes, not {size:,}"
        if state.st_mtime_ns != mtime_ns:
            return f"{name} was changed after it was made"
    return None if (entry / _MANIFEST).is_file() else f"{_MANIFEST} is missing"


def discard(entry: Path, fmt: str) -> None:
    """Remove the marker, and then the files, of format ``fmt`` from an entry of the cache."""
    (entry / f"{fmt}.json").unlink(missing_ok=True)
    shutil.rmtree(entry / fmt, ignore_errors=True)


@contextmanager
def _locked(entry: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Lock one entry within the context; ``waiting`` is called if another process has the lock. The kernel
    releases the lock of a process that is killed.
    """
    path = staging.folder() / "locks" / f"{entry.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {staging.folder()}: {error.strerror}",
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


def list_entries() -> list[CachedCheckpoint]:
    """Return all checkpoints of the cache, the most recently used first."""
    checkpoints = [stored for entry in _entries() for stored in _checkpoints(entry)]
    return sorted(checkpoints, key=lambda stored: stored.last_used_s, reverse=True)


def clear(name: str | None = None) -> list[CachedCheckpoint]:
    """Remove all entries of the model ``name``, the one entry called ``name``, or all entries if ``name`` is
    None; return the removed checkpoints. ``clear`` waits for children that are writing to these entries.
    """
    chosen = [e for e in _entries() if name is None or name in {e.name, e.name.rpartition("-")[0]}]
    if name is not None and not chosen:
        raise UnknownName("cached model", name, {e.name.rpartition("-")[0] for e in _entries()})
    removed: list[CachedCheckpoint] = []
    for entry in chosen:
        with _locked(entry, lambda: None):
            removed += _checkpoints(entry)
            for marker in entry.glob("*.json"):  # first: a format without a marker is incomplete
                marker.unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)
    return removed


def _entries() -> Iterator[Path]:
    models = staging.folder() / "models"
    if models.is_dir():
        # A symbolic link could lead out of the cache.
        yield from sorted(e for e in models.iterdir() if e.is_dir() and not e.is_symlink())


def _markers(entry: Path) -> list[Path]:
    return [path for path in sorted(entry.glob("*.json")) if path.name != _MANIFEST]


def _checkpoints(entry: Path) -> Iterator[CachedCheckpoint]:
    markers = _markers(entry)
    for marker in markers:
        files = entry / marker.stem
        size = sum(file.stat().st_size for file in files.iterdir()) if files.is_dir() else 0
        yield CachedCheckpoint(entry.name, marker.stem, size, marker.stat().st_mtime, files)
    if not markers and (manifest := entry / _MANIFEST).is_file():
        yield CachedCheckpoint(entry.name, "index", 0, manifest.stat().st_mtime, manifest)
