"""Find models of the Hugging Face Hub in the local cache, without the network.

::

    ~/.cache/huggingface/hub/models--owner--name/refs/main              the commit of a branch or tag
                                                /snapshots/COMMIT/...   links to ../../blobs

A few old models have an id without an owner, such as "gpt2".
"""

import os
import re
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError, ConfigError
from weighin.stream import foreign
from weighin.stream.foreign import HUB_ENTRY
from weighin.text import few, one_line

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SHOWN: Final = 5


def cached_snapshot(name: str, revision: str = "") -> Path | None:
    """Return the folder of a Hub model in the local cache; None if ``name`` is no Hub id.

    A name without an owner is a Hub id only if the cache has this model. CheckpointError: the cache
    lacks the model or the revision, or ``name`` is the path of a missing file.
    """
    if foreign.looks_like_path(name) and not Path(name).expanduser().exists():
        raise foreign.missing(name)
    if not (match := _HUB_ID.fullmatch(name)):
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    entry = hub / f"{HUB_ENTRY}{name.replace('/', '--')}"
    if (entry / "snapshots").is_dir():
        return _snapshot_of(entry, revision)
    if match[1] is None:
        return None
    raise CheckpointError(
        f"{name} is not in the Hub's cache {hub}, and weighin downloads no model",
        f"hf download {name}",
    )


def path_of(path: Path, revision: str = "") -> Path:
    """Return the snapshot for the id of a model, or for the model's folder in the Hub's cache;
    return any other path unchanged.
    """
    path = path.expanduser()
    if path.name.startswith(HUB_ENTRY) and (path / "snapshots").is_dir():
        return _snapshot_of(path, revision)
    if path.exists():
        if revision:
            raise ConfigError(
                f"{path}: not a model in the cache of the Hub, so the revision {revision} would be"
                " ignored",
                "leave revision out, or give the model's id: OWNER/NAME",
            )
        return path
    try:
        return cached_snapshot(str(path), revision) or path
    except CheckpointError:
        return path


def _snapshot_of(entry: Path, revision: str) -> Path:
    """Return the snapshot of a revision; ``entry`` is the model's folder "models--owner--name"."""
    snapshots, wanted = entry / "snapshots", revision or "main"
    references = {
        path.relative_to(entry / "refs").as_posix(): path
        for path in sorted((entry / "refs").rglob("*"))
        if path.is_file()
    }
    try:
        commit = references[wanted].read_text().strip() if wanted in references else wanted
    except (OSError, ValueError):
        commit = wanted
    commits = sorted(path.name for path in snapshots.iterdir() if path.is_dir())
    if commit in commits:
        return snapshots / commit
    known = [*references, *(each for each in commits if each != "main")]
    name = foreign.hub_id(snapshots / "main")
    repair = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    if usable := [each for each in known if each not in (wanted, "main")]:
        repair = (
            f"--set revision={one_line(usable[0])} (in Python: revision={usable[0]!r}), or {repair}"
        )
    raise CheckpointError(
        f"{name}: the Hub's cache lacks the revision {one_line(wanted)} of this model; it has:"
        f" {one_line(few(known, _SHOWN)) or 'none'}",
        repair,
    )


def name_of(folder: Path) -> str:
    """Return the name of a folder; for a snapshot in the Hub's cache, return the model's id."""
    return foreign.hub_id(folder) or folder.name
