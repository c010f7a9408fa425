"""List the supported formats of checkpoints, and detect the format of a checkpoint.

=============  ====================================================================
``pt``         one file, as ``torch.save(model.state_dict(), ...)`` writes it
``pt_legacy``  one file, as torch wrote it before 1.6
``safetensors`` one file: a JSON header and the tensors' bytes
``per_param``  a folder: one file for each state-dict key, and ``index.json``
``per_module`` a folder: one file for each layer or submodule, and ``index.json``
``sharded``    a folder: Hugging Face's safetensors shards and their index
``sharded_pt`` a folder: Hugging Face's ``.bin`` shards and their index
``dcp``        a folder that ``torch.distributed.checkpoint`` wrote, with ``.metadata``
=============  ====================================================================

Read, but not written, of training runs and of llama.cpp:

=======================  ==========================================================
``deepspeed``            the folder of a step of DeepSpeed: ZeRO 1, 2 or 3
``deepspeed_universal``  DeepSpeed's universal checkpoint: a folder for each weight
``megatron``             the folder of a step of Megatron-LM, of one rank
``gguf``                 a file of llama.cpp, its parts, or a folder of one model
``sentence_transformers`` the folder of a model whose parts lie in folders of their own
=======================  ==========================================================

The folder of a whole training run stands for its newest step.

weighin also makes files of one format that only a package writes and reads, for this package's own
strategy: ``tensorizer``. The format is not in ``NAMES``: weighin does not read, convert or inspect it.

Importing this module does not import torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError, ConfigError, UnknownName
from weighin.formats import (
    dcp,
    deepspeed,
    deepspeed_universal,
    gguf,
    megatron,
    per_module,
    per_param,
    pt,
    pt_legacy,
    safetensors,
    sentence_parts,
    tensorizer,
)
from weighin.formats.base import Layout, ReadLayout, Slices, TensorSlice
from weighin.formats.heads import remembering
from weighin.formats.pretrained_folder import find_weights, is_pretrained
from weighin.formats.selecting import below, stripped
from weighin.formats.selection import WHOLE, Selection
from weighin.formats.sharded import OF_DIFFUSERS, SHARDED, SHARDED_PT
from weighin.formats.state_dicts import all_empty, is_beside_weights
from weighin.formats.training_step import newest
from weighin.formats.unknown_folder import no_model
from weighin.formats.zip_directory import check_file

# In the order in which ``detect`` tries formats: per_param is last, as it matches any index.json.
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

_READ_ONLY: Final[tuple[ReadLayout, ...]] = (
    deepspeed_universal,
    deepspeed,
    megatron,
    gguf,
    sentence_parts,
)

_OF_PACKAGES: Final[tuple[Layout, ...]] = (tensorizer,)  # a package writes and reads them

NAMES: Final = tuple(layout.NAME for layout in _LAYOUTS)
READ_ONLY: Final = tuple(layout.NAME for layout in _READ_ONLY)


def named(name: str) -> Layout:
    """Return the format with the name ``name``, which weighin writes.

    Raises:
        UnknownName: no format has that name.
        ConfigError: weighin reads this format, but does not write it.
    """
    for layout in (*_LAYOUTS, *_OF_PACKAGES):
        if name == layout.NAME:
            return layout
    if name in READ_ONLY:
        raise ConfigError(
            f"weighin reads the format {name}, but does not write it",
            f"name another format: {', '.join(NAMES)}",
        )
    raise UnknownName("checkpoint format", name, NAMES)


def known(name: str) -> str:
    """Return ``name`` if weighin reads the format with this name; raise UnknownName otherwise."""
    return name if name in READ_ONLY else named(name).NAME


def loaded_as(checkpoint: Path | None, selection: Selection = WHOLE) -> str | None:
    """Return the format in which strategies that read it load the user's checkpoint.

    The result is None if there is no such file. It is also None if a file with a part of it must be
    written, the selected part or its tensors alone, and weighin does not write this format. The
    function raises CheckpointError as ``read`` does.
    """
    if checkpoint is None or not checkpoint.exists():
        return None
    name = detect(checkpoint).NAME
    written = name in READ_ONLY and (selection or not has_only_tensors(checkpoint))
    return None if written else name


@remembering()
def detect(path: Path) -> ReadLayout:
    """Return the format of the checkpoint at ``path``, by file names and first bytes.

    Raises:
        CheckpointError: ``path`` does not exist or is not a checkpoint; the message gives the
            reason.
    """
    if is_pretrained(path) and (file := find_weights(path)) and file != path:
        return _InFolder(detect(file), file)
    # A file says by its first bytes that it is GGUF, whatever its suffix; a folder may have other weights.
    first, last = (_READ_ONLY, ()) if path.is_file() else ((), _READ_ONLY)
    for layout in (*first, *_OF_PACKAGES, *_LAYOUTS, *OF_DIFFUSERS, *last):
        if layout.matches(path):
            return layout
    if (step := newest(path)) != path:
        return _InFolder(detect(step), step)
    if path.is_dir():
        raise no_model(path)
    # The error names the usual mistakes: a web page, a git-lfs pointer.
    check_file(path)
    names = ", ".join([*NAMES, *READ_ONLY])
    raise CheckpointError(f"{path}: not a checkpoint", f"known formats: {names}")


class _InFolder:
    """A checkpoint, given by a folder that contains it: of Hugging Face, or of a training run."""

    def __init__(self, layout: ReadLayout, file: Path) -> None:
        self.NAME, self.SUFFIX = layout.NAME, layout.SUFFIX
        self.inside = layout, file

    def matches(self, path: Path) -> bool:
        return path in self.inside[1].parents

    def files(self, _path: Path) -> list[Path]:
        layout, file = self.inside
        return layout.files(file)

    def read(self, _path: Path) -> Slices:
        layout, file = self.inside
        return layout.read(file)


def checkpoint_in(folder: Path, name: str) -> Path:
    """Return the path of format ``name`` in a folder with one checkpoint for each format."""
    suffix = named(name).SUFFIX
    return folder / name / f"model{suffix}" if suffix else folder / name


@remembering()
def read(path: Path, selection: Selection = WHOLE) -> tuple[str, Slices]:
    """Return the name of the checkpoint's format, and the places of the selected tensors.

    Raises:
        CheckpointError: for the same reasons as ``detect``, or the checkpoint is damaged; the
            message names the file and the place.
    """
    layout = detect(path)
    if isinstance(layout, _InFolder):
        layout, path = layout.inside
    key = selection.key
    if key and layout is dcp:  # dcp.read(key) also skips names that are no tensors
        slices = below(path, dcp.read(path, key), key)
    elif key and layout is pt:
        slices = pt.read(path, key)
    elif key and layout is pt_legacy:
        slices = pt_legacy.read(path, key)
    else:
        slices = layout.read(path)
        slices = below(path, slices, key) if key else slices
    if selection.strip_prefix:
        slices = stripped(path, slices, selection.strip_prefix)
    if _is_empty(slices) and is_beside_weights(path):
        raise all_empty(path)
    return layout.NAME, slices


def refuse_empty(path: Path, slices: Sequence[TensorSlice]) -> None:
    """Raise CheckpointError if all tensors of a checkpoint are empty.

    A caller that has a model need not ask: empty tensors are right for a model of empty tensors, and
    fit no other.
    """
    if _is_empty(slices):
        raise all_empty(path)


def _is_empty(slices: Sequence[TensorSlice]) -> bool:
    return bool(slices) and not any(one.nbytes for one in slices)


def has_only_tensors(path: Path) -> bool:
    """Tell whether any strategy can load the file itself: it is a state dict of tensors alone.

    The function raises CheckpointError as ``read`` does.
    """
    return read(path)[1].only_tensors


@remembering()
def files(path: Path) -> list[Path]:
    """Return every file that a load may read, in a stable order; raise as ``read`` does."""
    return detect(path).files(path)
