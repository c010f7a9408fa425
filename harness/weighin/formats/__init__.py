"""The layouts that a checkpoint can have on the disk; ``base`` says what each of them offers.

=============  ====================================================================
``pt``         one file, as ``torch.save(model.state_dict(), ...)`` writes it
``pt_legacy``  one file, as torch wrote it before 1.6
``safetensors`` one file: a header in JSON, and the tensors
``per_param``  a folder: one file for each state-dict key, and ``index.json``
``per_module`` a folder: one file for each layer or submodule, and ``index.json``
``sharded``    a folder: Hugging Face's safetensors shards and their index
``sharded_pt`` a folder: Hugging Face's ``.bin`` shards and their index
``dcp``        a folder: ``torch.distributed.checkpoint``'s, with ``.metadata``
=============  ====================================================================

Importing this package imports no torch.
"""

from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError, UnknownName
from weighin.formats import dcp, per_module, per_param, pt, pt_legacy, safetensors
from weighin.formats.base import Layout, TensorSlice
from weighin.formats.sharded import SHARDED, SHARDED_PT
from weighin.formats.zip_directory import check_file

# In the order in which they are asked whether a path is theirs: per_param takes every index.json.
_LAYOUTS: Final[tuple[Layout, ...]] = (
    pt,
    pt_legacy,
    safetensors,
    SHARDED,
    SHARDED_PT,
    dcp,
    per_module,
    per_param,
)

NAMES: Final = tuple(layout.NAME for layout in _LAYOUTS)


def named(name: str) -> Layout:
    """Return the layout of that name; raises UnknownName where there is none."""
    for layout in _LAYOUTS:
        if name == layout.NAME:
            return layout
    raise UnknownName("checkpoint format", name, NAMES)


def detect(path: Path) -> Layout:
    """Return the layout of the checkpoint at ``path``, by its names and first bytes.

    Raises:
        CheckpointError: nothing is there, or nothing that any layout knows; says what it is.
    """
    for layout in _LAYOUTS:
        if layout.matches(path):
            return layout
    if path.is_dir():
        raise CheckpointError(
            f"{path}: a folder in which no checkpoint is known: neither an index nor metadata",
            "give the checkpoint file itself, or a folder that `weighin convert` made",
        )
    # What is no checkpoint at all has names of its own: a web page, a git-lfs pointer.
    check_file(path)
    raise CheckpointError(f"{path}: no checkpoint", f"known layouts: {', '.join(NAMES)}")


def checkpoint_in(folder: Path, name: str) -> Path:
    """Return the checkpoint of the layout ``name`` in a folder that may hold one of each."""
    suffix = named(name).SUFFIX
    return folder / name / f"model{suffix}" if suffix else folder / name


def read(path: Path) -> tuple[str, list[TensorSlice]]:
    """Return the name of the checkpoint's layout, and where each of its tensors lies.

    Raises:
        CheckpointError: as ``detect``, or damaged: names the file, what is wrong, and where.
    """
    layout = detect(path)
    return layout.NAME, layout.read(path)


def files(path: Path) -> list[Path]:
    """Return every file that a load of this checkpoint may read, in a stable order.

    Raises:
        CheckpointError: as ``read``.
    """
    return detect(path).files(path)
