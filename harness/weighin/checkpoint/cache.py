"""Provide checkpoints to load; the cache keeps those that weighin generated or converted.

An entry of the cache has the checkpoint of one model in one or more formats::

    $WEIGHIN_CACHE/models/gpt2-xl-1f2e3d4c/   one entry, for one seed or one checkpoint of the user
        manifest.json     the tensors that the model must have after a load
        pt.json           marker: format pt is complete; its files, their sizes and mtimes
        pt/model.pt       read-only, so that no strategy changes it, unless it runs as root
        .making-XXXX/     the folder of a running or killed child
    $WEIGHIN_CACHE/locks/gpt2-xl-1f2e3d4c.lock
    $WEIGHIN_CACHE/plans.sha256    the digests of the plans that weighin wrote (``weighin.plan.start``)

This module runs in weighin's own process, which does not import torch; a child writes the checkpoints.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.checkpoint import temporary_folders
from weighin.checkpoint.child import Report, run_child
from weighin.checkpoint.manifest import Manifest, read_manifest
from weighin.errors import CheckpointError, ConfigError, UnknownName
from weighin.files import object_in, rename, try_lock, write_text
from weighin.stream import formats
from weighin.stream.hugging_face_folder import digest, files_of_adapter
from weighin.stream.pretrained_library import WHOLE, Selection, library_of
from weighin.suite import registry, user_code

_VALUES: Final = 1  # increase this version when the same seed gives other values
_TEMPORARY: Final = ".making-"
_MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that is ready to load: if ``in_place``, the user's own file."""

    path: Path
    manifest_path: Path
    format: str
    made: bool
    in_place: bool = False
    warnings: tuple[str, ...] = ()

    def manifest(self) -> Manifest:
        return read_manifest(self.manifest_path)


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
    """Return a checkpoint of ``model`` in format ``fmt``; write one if the cache has none, or a changed one.

    A user's own ``checkpoint`` is compared with the model at its first use and after a change of the file,
    the model or ``selection``, and is converted as ``generate.index`` tells. ``dtype`` is that of the loads.
    ``python_path`` lists the folders from which a user's builder is imported.
    """
    formats.known(fmt)
    in_place = False
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser()
        in_place = fmt == formats.detect(checkpoint) and not selection
        checkpoint = checkpoint.absolute()  # links stay: config.json is beside the link
        if in_place and library_of(model.builder) is None:
            in_place = formats.read(checkpoint).only_tensors
    origin = _origin(model, dtype, seed, checkpoint, selection, python_path)
    digits = sha256(json.dumps(origin, sort_keys=True, default=str).encode()).hexdigest()
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", model.name).lstrip(".") or "model"
    entry = temporary_folders.folder() / "models" / f"{safe[:100]}-{digits[:8]}"
    manifest, marker = entry / _MANIFEST, entry / f"{fmt}.json"
    used = manifest if in_place else marker
    report = progress or (lambda _text, _share: None)
    waiting = f"waiting for another weighin process, which uses {entry.name}"
    with _locked(entry, lambda: report(waiting, None)):
        entry.mkdir(parents=True, exist_ok=True)
        temporary_folders.remove_orphans(entry, _TEMPORARY)
        found = used.exists()
        is_whole = found and _manifest(entry) is not None
        if is_whole and not in_place:
            is_whole = object_in(marker).get("files") == _states(entry / fmt)
        if not is_whole:
            verb = "reading" if in_place else "converting" if checkpoint else "making"
            text = f"{verb} the checkpoint of {model.name}"
            report(text, None)
            try:
                with temporary_folders.own_folder(entry, _TEMPORARY) as temporary:
                    request = {
                        "verb": "index" if checkpoint else "make",
                        "model": asdict(model),
                        "dtype": dtype,
                        "seed": seed,
                        "checkpoint": str(checkpoint),
                        "selection": asdict(selection),
                        "format": fmt,
                        "out": str(temporary),
                        "space": (
                            str(temporary_folders.folder()),
                            f"the {fmt} checkpoint of {model.name}",
                            "put the cache on another disk (WEIGHIN_CACHE=/path weighin ...), or"
                            " empty the cache (weighin cache clear)",
                        ),
                    }
                    run_child(request, report=partial(report, text), python_path=python_path)
                    _publish(entry, temporary, "" if in_place else fmt)
            except BaseException:
                if not any(entry.iterdir()):
                    entry.rmdir()
                raise
        os.utime(used)  # the time of this use
    was = f"{entry / fmt}: files of this cached checkpoint were changed or lost, so it was written again"
    path = checkpoint if in_place and checkpoint else formats.checkpoint_in(entry, fmt)
    warnings = (was,) if found and not is_whole else ()
    return Prepared(path, manifest, fmt, not is_whole, in_place, warnings)


def _origin(
    model: ModelSpec,
    dtype: str,
    seed: int,
    checkpoint: Path | None,
    selection: Selection,
    python_path: Sequence[str],
) -> list[object]:
    """Return what determines the tensors' values."""
    origin: list[object] = [model.builder, model.kwargs]
    if not user_code.is_ours(model.builder):
        if code := user_code.file_of(model.builder, python_path):
            origin += [str(code), digest(code.parent if code.name == "__init__.py" else code)]
        origin += registry.versions(["torch", "transformers"]).items()
    elif library := library_of(model.builder):
        # The last four compute weights of a folder with an adapter or with quantised weights.
        names = ["torch", library.name, "peft", "compressed-tensors", "bitsandbytes", "gptqmodel"]
        origin += [dtype, *registry.versions(names).items()]
    if checkpoint is None:
        return [*origin, seed, _VALUES]
    origin.append(str(checkpoint))
    origin += [f"--key={selection.key}"] if selection.key else []
    origin += [f"--strip-prefix={selection.strip_prefix}"] if selection.strip_prefix else []
    for file in [*formats.files(checkpoint), *files_of_adapter(model)]:
        state = file.stat()
        origin += [file.name, state.st_size, state.st_mtime_ns]
    return origin


def _publish(entry: Path, temporary: Path, fmt: str) -> None:
    """Move the new manifest, and the files in format ``fmt`` if it names one, into an entry."""
    new, old = read_manifest(temporary / _MANIFEST), _manifest(entry)
    if old is not None and old.tensors != new.tensors:
        # Another torch version or processor gave other values: discard formats with old values.
        for marker in _markers(entry):
            discard(entry, marker.stem)
    rename(temporary / _MANIFEST, entry / _MANIFEST)
    if fmt:
        discard(entry, fmt)
        rename(temporary / fmt, entry / fmt)
        write_marker(entry, fmt)


def _manifest(entry: Path) -> Manifest | None:
    try:
        return read_manifest(entry / _MANIFEST)
    except CheckpointError:
        return None


def write_marker(entry: Path, fmt: str) -> None:
    """Mark an entry's files of a format as complete, with their sizes and times, and make them read-only."""
    for file in (entry / fmt).iterdir():
        file.chmod(0o444)
    write_text(entry / f"{fmt}.json", json.dumps({"format": fmt, "files": _states(entry / fmt)}))


def _states(folder: Path) -> dict[str, list[int]]:
    """Return the size and the time of the last change of each file in a folder."""
    if not folder.is_dir():
        return {}
    states = {file.name: file.stat() for file in sorted(folder.iterdir())}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def discard(entry: Path, fmt: str) -> None:
    (entry / f"{fmt}.json").unlink(missing_ok=True)  # first: without it, a format is incomplete
    shutil.rmtree(entry / fmt, ignore_errors=True)


@contextmanager
def _locked(entry: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Lock one entry within the context. If another process has the lock, call ``waiting``, and wait."""
    path = temporary_folders.folder() / "locks" / f"{entry.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {temporary_folders.folder()}: {error.strerror}",
            "choose another folder: WEIGHIN_CACHE=/path weighin ...",
        ) from error
    try:
        if not try_lock(descriptor):
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def list_entries(name: str | None = None) -> list[dict[str, Any]]:
    """Return what the cache has, all or of the model or entry ``name``, last used first, as ``--json`` does.

    A user's own file, of which the cache has only a manifest, has the format "index".
    """
    found = [each for entry in _entries(name) for each in _checkpoints(entry)]
    return [stored for _, stored in sorted(found, key=itemgetter(0), reverse=True)]


def clear(name: str | None = None) -> list[dict[str, Any]]:
    """Remove what ``list_entries(name)`` returns, and return it; wait for other processes that write there."""
    removed: list[dict[str, Any]] = []
    for entry in _entries(name):
        with _locked(entry, lambda: None):
            removed += [stored for _, stored in _checkpoints(entry)]
            for marker in entry.glob("*.json"):  # first: a format without a marker is incomplete
                marker.unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)
    return removed


def _entries(name: str | None) -> list[Path]:
    roots = (temporary_folders.folder() / one for one in ("models", temporary_folders.ENVIRONMENTS))
    found = [entry for root in roots for entry in sorted(root.glob("[!.]*"))]
    # A symbolic link could lead out of the cache.
    entries = [entry for entry in found if entry.is_dir() and not entry.is_symlink()]
    chosen = [e for e in entries if name in (None, e.name, e.name.rpartition("-")[0])]
    if name is not None and not chosen:
        raise UnknownName("cached model", name, {e.name.rpartition("-")[0] for e in entries})
    return chosen


def _markers(entry: Path) -> list[Path]:
    return [path for path in sorted(entry.glob("*.json")) if path.name != _MANIFEST]


def _checkpoints(entry: Path) -> Iterator[tuple[datetime, dict[str, Any]]]:
    manifest = entry / _MANIFEST
    for marker in _markers(entry) or ([manifest] if manifest.is_file() else []):
        files = manifest if marker == manifest else entry / marker.stem
        used = datetime.fromtimestamp(marker.stat().st_mtime, UTC)
        stored = {
            "name": entry.name,
            "format": "index" if marker == manifest else marker.stem,
            "bytes": sum(
                one.lstat().st_size for one in (files, *files.rglob("*")) if one.is_file()
            ),
            "last_used": used.isoformat(timespec="seconds"),
            "path": str(files),
        }
        yield used, stored
