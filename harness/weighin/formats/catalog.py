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

weighin reads these formats, but does not write them:

=======================  ==========================================================
``deepspeed``            DeepSpeed's folder of a step: ZeRO 1, 2, 3 or none
``deepspeed_universal``  DeepSpeed's universal checkpoint: a folder for each weight
``gguf``                 llama.cpp: a file, a part of a model, or a model's folder
``sentence_transformers`` the folder of a model whose parts lie in folders of their own
=======================  ==========================================================

If a path is the folder of a whole training run, weighin reads the run's newest step.

weighin also writes files in the format of the package ``tensorizer``, for the strategy of that
name. ``NAMES`` does not list this format, because weighin does not read, convert or inspect its
files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError, ConfigError, UnknownName
from weighin.formats import dcp, gguf, safetensors, sentence_parts, tensorizer
from weighin.formats.base import Layout, ReadLayout, Slices, TensorSlice
from weighin.formats.foreign import newest, no_model, once, remembering
from weighin.formats.per_key import PER_MODULE, PER_PARAM
from weighin.formats.pretrained_folder import find_weights, is_pretrained
from weighin.formats.pretrained_library import WHOLE, Selection
from weighin.formats.sharded import OF_DIFFUSERS, SHARDED, SHARDED_PT
from weighin.stream.state_dicts import all_empty, is_beside_weights, no_key
from weighin.stream.torch_files import PT, PT_LEGACY, check_file
from weighin.stream.zero import UNIVERSAL, ZERO
from weighin.text import first_names, plain, shown

# ``detect`` tries the formats in this order. per_param is last, because it matches any index.json.
_LAYOUTS: Final[tuple[Layout, ...]] = (
    PT,
    PT_LEGACY,
    safetensors,
    SHARDED,
    SHARDED_PT,
    dcp,
    PER_MODULE,
    PER_PARAM,
)

_READ_ONLY: Final[tuple[ReadLayout, ...]] = (
    UNIVERSAL,
    ZERO,
    gguf,
    sentence_parts,
)

_OF_PACKAGES: Final[tuple[Layout, ...]] = (tensorizer,)  # formats that a package writes and reads

NAMES: Final = tuple(layout.NAME for layout in _LAYOUTS)
READ_ONLY: Final = tuple(layout.NAME for layout in _READ_ONLY)


def named(name: str) -> Layout:
    """Return the format that has the name ``name``; it must be one that weighin writes.

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
    """Return ``name`` if weighin reads a format of this name; raise UnknownName otherwise."""
    return name if name in READ_ONLY else named(name).NAME


def loaded_as(checkpoint: Path | None, selection: Selection = WHOLE) -> str | None:
    """Return the name of the checkpoint's format if strategies load the user's own files.

    The result is None if there is no checkpoint. It is also None for a format that weighin does not
    write, if ``selection`` is set or the checkpoint holds more than tensors: the strategies then
    load a converted copy. The errors are those of ``read``.
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
    return _located(path)[0]


def _located(path: Path) -> tuple[ReadLayout, Path]:
    """Return the format of a checkpoint, and the path of the checkpoint itself.

    The second path lies below ``path`` if ``path`` is the folder of a training run, or a Hugging
    Face folder whose weights are not in shards with the usual index.
    """
    if is_pretrained(path) and (file := find_weights(path)) and file != path:
        return _located(file)
    # A file of GGUF has its magic number, whatever its suffix. In a folder, other weights come first.
    first, last = (_READ_ONLY, ()) if path.is_file() else ((), _READ_ONLY)
    for layout in (*first, *_OF_PACKAGES, *_LAYOUTS, *OF_DIFFUSERS, *last):
        if layout.matches(path):
            return layout, path
    if (step := newest(path)) != path:
        return _located(step)
    if path.is_dir():
        raise no_model(path)
    # check_file names the usual mistakes: a web page, a git-lfs pointer.
    check_file(path)
    names = ", ".join([*NAMES, *READ_ONLY])
    raise CheckpointError(f"{path}: not a checkpoint", f"known formats: {names}")


def checkpoint_in(folder: Path, name: str) -> Path:
    """Return the path of the checkpoint in the format ``name``; ``folder`` has one per format."""
    suffix = named(name).SUFFIX
    return folder / name / f"model{suffix}" if suffix else folder / name


@remembering()
def read(path: Path, selection: Selection = WHOLE) -> tuple[str, Slices]:
    """Return the format's name, and the selected tensors with their files and offsets.

    Raises:
        CheckpointError: as for ``detect``, or the checkpoint is damaged or lacks selected names.
    """
    return once((path, selection), lambda: _read(path, selection))


def _read(path: Path, selection: Selection) -> tuple[str, Slices]:
    layout, path = _located(path)
    key, prefix = selection.key, selection.strip_prefix
    # These read a key of nested dicts, and ignore values elsewhere.
    if key and layout is dcp:
        slices = dcp.read(path, key)
    elif key and layout is PT:
        slices = PT.read(path, key)
    elif key and layout is PT_LEGACY:
        slices = PT_LEGACY.read(path, key)
    else:
        slices = layout.read(path)
    if key and layout not in (PT, PT_LEGACY):
        inside = slices.without(f"{key}.", only=True)
        if not inside:
            raise no_key(path, key, [one.name.partition(".")[0] for one in slices])
        slices = inside
    if prefix:
        slices = _stripped(path, slices, prefix if prefix.endswith(".") else f"{prefix}.")
    if _is_empty(slices) and is_beside_weights(path):
        raise all_empty(path)
    return layout.NAME, slices


def _stripped(path: Path, slices: Slices, prefix: str) -> Slices:
    if not any(one.name.startswith(prefix) for one in slices):
        raise CheckpointError(
            f"{path}: no tensor's name begins with {shown(prefix)}",
            f"the tensors in the file are called: {first_names(plain(one.name) for one in slices)}",
        )
    renamed = slices.without(prefix)
    if len({one.name for one in renamed}) != len(renamed):
        raise CheckpointError(
            f"{path}: two tensors would have the same name without the prefix {shown(prefix)}",
            "leave --strip-prefix out, or convert the checkpoint with your own code",
        )
    return renamed


def refuse_empty(path: Path, slices: Sequence[TensorSlice]) -> None:
    """Raise CheckpointError if a checkpoint has no tensors, or if all its tensors are empty."""
    if not slices:
        raise CheckpointError(
            f"{path}: no tensors in it",
            "if they are deeper inside, name the entry that holds them: --key model",
        )
    if _is_empty(slices):
        raise all_empty(path)


def _is_empty(slices: Sequence[TensorSlice]) -> bool:
    return bool(slices) and not any(one.nbytes for one in slices)


def has_only_tensors(path: Path) -> bool:
    """Tell whether a checkpoint has tensors alone, so that any strategy loads it unconverted.

    The errors are those of ``read``.
    """
    return read(path)[1].only_tensors


@remembering()
def files(path: Path) -> list[Path]:
    """Return every file that a load may read, in a stable order; raise as ``read`` does."""
    layout, path = _located(path)
    return layout.files(path)
