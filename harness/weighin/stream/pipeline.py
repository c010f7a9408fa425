"""Read the folder of a pipeline of diffusers: ``model_index.json``, and a folder for each part.

::

    model_index.json   {"_class_name": "StableDiffusionPipeline",
                        "unet": ["diffusers", "UNet2DConditionModel"], "scheduler": [...], ...}
    unet/  vae/  text_encoder/       each is the folder of a model
    scheduler/  tokenizer/           parts without weights
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.files import MIB, object_in
from weighin.stream.pretrained_library import WEIGHTS
from weighin.text import one_line

INDEX: Final = "model_index.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a pipeline, such as "unet", whose folder may be missing.

    ``library`` and ``class_name`` are empty for a part that ``model_index.json`` lacks. ``file_bytes``
    is None without weights, and of several suffixes (.bin, .safetensors) only that of the largest set.
    """

    name: str
    library: str
    class_name: str
    path: Path
    file_bytes: int | None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline: its class, and its parts in the order of ``model_index.json``."""

    path: Path
    class_name: str
    parts: tuple[Part, ...]

    @property
    def models(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.file_bytes is not None)

    @property
    def largest(self) -> Part:
        return max(self.models, key=lambda part: part.file_bytes or 0)

    def refused(self) -> CheckpointError:
        from weighin.units import format_bytes  # imports decimal, which few loads need

        parts = [f"{part.name} ({format_bytes(part.file_bytes or 0)})" for part in self.models]
        return CheckpointError(
            f"{self.path}: a diffusers pipeline of {len(parts)} models: {one_line(', '.join(parts))}",
            f"give one of them; the largest: {self.largest.path}",
        )


def is_pipeline(path: Path) -> bool:
    return (path / INDEX).is_file()


def read(path: Path) -> Pipeline:
    """Return the pipeline in a folder, with subfolders that have weights, but are not in the index."""
    index = object_in(path / INDEX, MIB)
    named = {}
    for name, value in index.items():
        is_part = isinstance(value, list) and [type(one) for one in value] == [str, str]
        if is_part and Path(name).name == name:
            named[name] = value  # its library and class
    for inner in sorted(path.iterdir()):
        if _weights_bytes(inner) is not None:
            named.setdefault(inner.name, ["", ""])
    parts = [
        Part(name, library, kind, path / name, _weights_bytes(path / name))
        for name, (library, kind) in named.items()
    ]
    return Pipeline(path, str(index.get("_class_name", "")), tuple(parts))


def _weights_bytes(folder: Path) -> int | None:
    sizes: dict[str, int] = {}
    with suppress(OSError):  # not a folder, or a folder that this user cannot read
        for file in folder.iterdir():
            if file.suffix in WEIGHTS and file.is_file():
                sizes[file.suffix] = sizes.get(file.suffix, 0) + file.stat().st_size
    return max(sizes.values(), default=None)
