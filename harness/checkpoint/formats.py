"""The formats that a checkpoint can have on the disk, and which files belong to one.

============  =====================================================================
``pt``        one file, as ``torch.save(model.state_dict(), ...)`` writes it
``per_param`` a folder: one file for each state-dict key, and ``index.json``
============  =====================================================================
"""

from pathlib import Path
from typing import Final

from harness.errors import CheckpointError, UnknownName

FORMATS: Final = ("pt", "per_param")

INDEX_NAME: Final = "index.json"
"""The file that makes a folder a ``per_param`` checkpoint."""


def check_format(name: str) -> str:
    """Return ``name``; raises UnknownName where no format is called so."""
    if name not in FORMATS:
        raise UnknownName("checkpoint format", name, FORMATS)
    return name


def detect_format(path: Path) -> str:
    """Return the format of the checkpoint at ``path``, from its names alone.

    Raises:
        CheckpointError: nothing is there, or a folder without an index.
    """
    if path.is_file():
        return "pt"
    if path.is_dir():
        if (path / INDEX_NAME).is_file():
            return "per_param"
        raise CheckpointError(
            f"{path}: a folder without {INDEX_NAME}, so no checkpoint of one file per parameter",
            "give the checkpoint file itself, or a folder that `weighin convert` made",
        )
    if path.exists():
        raise CheckpointError(f"{path}: not a file", "give a checkpoint file")
    raise CheckpointError(f"{path}: no such file", "check the path")


def checkpoint_files(path: Path) -> list[Path]:
    """Return every file that a load of this checkpoint may read, in a stable order.

    Raises:
        CheckpointError: as ``detect_format``.
    """
    if detect_format(path) == "pt":
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file())
