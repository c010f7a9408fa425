"""Detect the format of a checkpoint, and read it; of the folder of a training run, the newest step.

A new format of one file is a module with ``read(path) -> Checkpoint``, an entry in ``_OF_A_FILE``, its first
bytes in ``_located``, and its name in ``READ_ONLY``, or else in ``SUFFIXES`` and in ``_WRITE`` of ``write``. If
``foreign.toml`` names it as another program's, that row goes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError, ConfigError, UnknownName
from weighin.stream import (
    dcp_files,
    foreign,
    gguf_files,
    safetensors_files,
    sharded_files,
    torch_files,
    zero,
)
from weighin.stream.hugging_face_folder import find_weights, is_pretrained
from weighin.stream.pretrained_library import WHOLE, Selection
from weighin.stream.slices import Checkpoint, Slice
from weighin.stream.torch_files import all_empty, is_beside_weights, no_key
from weighin.text import first_names, plain, shown

_TENSORIZER: Final = "tensorizer"  # which only the package of this name writes and reads

SUFFIXES: Final = {
    "pt": ".pt", "safetensors": ".safetensors", "sharded": "", "sharded_pt": "",
    "dcp": "", "per_module": "", "per_param": "", _TENSORIZER: ".tensors",
}  # fmt: skip
"""The suffix of a checkpoint of one file, by the format's name; empty if a checkpoint is a folder."""

NAMES: Final = tuple(name for name in SUFFIXES if name != _TENSORIZER)
PICKLED: Final = ("pt", "pt_legacy")  # the formats of torch.save
READ_ONLY: Final = ("pt_legacy", "deepspeed_universal", "deepspeed", gguf_files.NAME)

_OF_A_FILE: Final = {"safetensors": safetensors_files.read, gguf_files.NAME: gguf_files.read}


def suffix_of(name: str) -> str:
    """Return the suffix of a checkpoint in a format that weighin writes; empty for a folder."""
    if name in SUFFIXES:
        return SUFFIXES[name]
    if name in READ_ONLY:
        raise ConfigError(
            f"weighin reads the format {name}, but does not write it",
            f"name another format: {', '.join(NAMES)}",
        )
    raise UnknownName("checkpoint format", name, NAMES)


def known(name: str) -> str:
    """Return ``name`` if weighin reads a format of this name; raise UnknownName otherwise."""
    if name not in READ_ONLY:
        suffix_of(name)
    return name


def checkpoint_in(folder: Path, name: str) -> Path:
    """Return the path of the checkpoint in the format ``name``; ``folder`` has one per format."""
    suffix = suffix_of(name)
    return folder / name / (f"model{suffix}" if suffix else "")


def loaded_as(checkpoint: Path | None, selection: Selection = WHOLE) -> str | None:
    """Return the checkpoint's format if strategies load the user's own files; None if they load a copy."""
    if checkpoint is None or not checkpoint.exists():
        return None
    name = detect(checkpoint)
    is_converted = name in READ_ONLY and (selection or not read(checkpoint).only_tensors)
    return None if is_converted else name


@foreign.remembering()
def detect(path: Path) -> str:
    """Return the name of the format of the checkpoint at ``path``, by file names and first bytes."""
    return _located(path)[0]


def _located(path: Path) -> tuple[str, Path]:
    """Return a checkpoint's format, and its own path, which may lie below ``path``."""
    if "\0" in str(path) or len(path.name) > 255:
        raise foreign.missing(path)
    if is_pretrained(path) and (file := find_weights(path)) and file != path:
        return _located(file)
    if path.is_dir():
        name = sharded_files.format_of(path) or zero.format_of(path)
        if not name and gguf_files.matches(path):
            name = gguf_files.NAME
        if name:
            return name, path
        if (step := foreign.named_step(path)) and step[1].is_dir():
            return _located(step[1])
        raise foreign.no_model(path)
    head = foreign.first_bytes(path)
    kinds = {
        gguf_files.NAME: gguf_files.is_file(path),  # by its magic number, whatever its suffix
        _TENSORIZER: head.startswith(b"|TZR|"),
        "pt": foreign.is_zip(head),
        "pt_legacy": foreign.is_legacy(head),
        "safetensors": foreign.is_safetensors(head) or (head and path.suffix == ".safetensors"),
    }
    name = next((name for name, fits in kinds.items() if fits), "") or sharded_files.format_of(path)
    if not name:
        raise foreign.unknown(path, foreign.check_present(path))
    return name, path


@foreign.remembering()
def read(path: Path, selection: Selection = WHOLE) -> Checkpoint:
    """Return the selected tensors; execute no code in the files, and read no file outside the folder."""
    return foreign.once((path, selection), lambda: _read(path, selection))


def _read(path: Path, selection: Selection) -> Checkpoint:
    name, path = _located(path)
    key, prefix = selection.key, selection.strip_prefix
    if name in PICKLED:  # the key is one of nested dicts
        found, key = torch_files.read(path, key), ""
    elif name in _OF_A_FILE:
        found = _OF_A_FILE[name](path)
    elif name.startswith("deepspeed"):
        found = zero.read(path, name)
    elif name == _TENSORIZER:
        raise foreign.unknown(path, foreign.check_present(path))
    else:
        found = sharded_files.read(path, name, key)
    found.format = name
    if key:
        inside = found.without(f"{key}.", only=True)
        if not inside:
            raise no_key(path, key, [one.name.partition(".")[0] for one in found])
        found = inside
    if prefix:
        start = prefix if prefix.endswith(".") else f"{prefix}."
        if not any(one.name.startswith(start) for one in found):
            names = first_names(plain(one.name) for one in found)
            what = f"no tensor's name begins with {shown(start)}"
            raise CheckpointError(f"{path}: {what}", f"choose a prefix of these names: {names}")
        found = found.without(start)
        if len({one.name for one in found}) != len(found):
            what = f"without the prefix {shown(start)}, two tensors would have the same name"
            way = "leave strip_prefix out, or convert the checkpoint with your own code"
            raise CheckpointError(f"{path}: {what}", way)
    if found and not any(one.nbytes for one in found) and is_beside_weights(path):
        raise all_empty(path)
    return found


def refuse_empty(path: Path, slices: Sequence[Slice]) -> None:
    """Raise CheckpointError if a checkpoint has no tensors, or if all its tensors are empty."""
    if not slices:
        raise CheckpointError(
            f"{path}: has no tensors",
            "if the tensors are nested deeper, name the entry that holds them, such as --key model",
        )
    if not any(one.nbytes for one in slices):
        raise all_empty(path)


@foreign.remembering()
def files(path: Path) -> list[Path]:
    """Return every file that a load may read, in a stable order."""
    name, path = _located(path)
    if name in sharded_files.INDEX_FIELDS:  # which may be 20,000 files
        return [path / sharded_files.INDEX_NAME, *sorted(path.glob("*.pt"))]
    if name == "dcp":  # whatever a key selects
        return dcp_files.files(path)
    return [path] if name in (*PICKLED, _TENSORIZER) else [*read(path).files]
