"""Read a sentence-transformers folder whose parts lie in folders of their own, as one checkpoint.

::

    modules.json       [{"name": "0", "path": "0_Transformer", "type": "...Transformer"}, ...]
    0_Transformer/     the folder of a model of transformers
    1_Pooling/         a part without weights
    2_Dense/           config.json and model.safetensors

The tensors have the names of the state dict of sentence-transformers 6: "0.model.KEY" for a key in
the transformer's files, and "2.KEY" for a key in the files of another part. If the transformer's
files lie in the folder itself, weighin reads the folder as a model of transformers instead.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.files import MIB, json_in
from weighin.stream.foreign import models_below
from weighin.stream.pretrained_folder import CONFIG, find_weights, is_pretrained
from weighin.stream.pretrained_library import WEIGHTS
from weighin.stream.slices import Checkpoint
from weighin.text import one_line, shown

NAME = "sentence_transformers"

MODULES: Final = "modules.json"


def matches(path: Path) -> bool:
    return path.is_dir() and not (path / CONFIG).exists() and bool(own_folders(path))


def has_more_parts(path: Path) -> bool:
    """Tell whether parts with weights lie beside a transformer in the folder itself, as a dense layer."""
    return is_pretrained(path) and bool(own_folders(path))


def own_folders(folder: Path) -> list[str]:
    """Return the names of the subfolders that hold one part of the model each, with weights."""
    places = [part.get("path") for part in _listed(folder)]
    inner = models_below(folder) if places else []
    return [place for place in places if isinstance(place, str) and place in inner]


def _listed(folder: Path) -> list[dict[str, Any]]:
    content = json_in(folder / MODULES, MIB)
    parts = content if isinstance(content, list) else []
    return [part if isinstance(part, dict) else {} for part in parts]


def read(path: Path, read_part: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Return the tensors of all parts; CheckpointError: weights of a part lie in subfolders of its folder."""
    whole = Checkpoint()
    values: dict[str, object] = {}
    for index, module in enumerate(_listed(path)):
        place = module.get("path")
        if not isinstance(place, str) or "\0" in place or ".." in (path / place).parts:
            raise CheckpointError(
                f"{path / MODULES}: part {index} has no 'path' that lies within the folder",
                "save the model again: SentenceTransformer.save(FOLDER)",
            )
        weights = find_weights(path / place)
        if weights is None:
            _refuse_below(path, place)
            continue
        prefix = f"{module.get('name', index)}."
        if str(module.get("type")).rpartition(".")[2] == "Transformer":
            prefix += "model."
        slices = read_part(weights)
        whole += [replace(one, name=f"{prefix}{one.name}") for one in slices]
        values |= {f"{prefix}{name}": value for name, value in slices.values.items()}
        whole.refused = whole.refused or slices.refused
        whole.notes += slices.notes
        whole.files += slices.files
    whole.values, whole.format = values, NAME
    return whole


def _refuse_below(path: Path, place: str) -> None:
    part = path / place
    below = (file for file in sorted(part.rglob("*")) if file.suffix in WEIGHTS) if place else ()
    if inside := next(iter(below), None):
        raise CheckpointError(
            f"{path}: a sentence-transformers folder whose weights lie in several parts:"
            f" {one_line(', '.join(own_folders(path)))}. weighin cannot join the weights of the"
            f" part {shown(place)}: {shown(str(inside.relative_to(path)))}",
            f"give the folder of one part: {inside.parent}",
        )
