"""The bind mounts of a container: read-only weighin's code, one strategy and one checkpoint.

For a model that the user wrote, the mounts include the folder or installed package of the model's
module, and the paths that the user names. For a use of the model that the user wrote, the mounts
include the file of the use. For a save, and for the use "save", the mounts also include the empty
target folder; only this mount is writable.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import weighin
from weighin import formats
from weighin.cell import Job
from weighin.formats.pretrained_folder import folder_of
from weighin.formats.pretrained_library import library_of
from weighin.isolation import preload
from weighin.isolation.docker import packages
from weighin.suite.registry import data_folder

CODE: Final = "/weighin/code"
_PACKAGES: Final = "/weighin/packages"
_CHECKPOINT: Final = "/weighin/checkpoint"
_WRITTEN: Final = "/weighin/written"


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of this machine, and its path in the container."""

    source: Path
    target: str
    writable: bool = False


def place(job: Job) -> tuple[Job, list[Bind]]:
    """Return the job with its paths inside the container, and the mounts that provide these paths."""
    code = [
        Bind(Path(weighin.__file__).resolve().parent, f"{CODE}/weighin"),
        Bind(data_folder("strategies").resolve(), f"{CODE}/strategies"),
    ]
    strategy_path, strategy = _place_file(Path(job.strategy_path).resolve(), code, "strategy")
    use_path, use = "", list[Bind]()
    if job.use_path:
        use_path, use = _place_file(Path(job.use_path).resolve(), code, "use")
    python_path = [
        Bind(Path(folder).resolve(), f"/weighin/path/{number}")
        for number, folder in enumerate(job.python_path)
    ]
    installed = [Bind(path, f"{_PACKAGES}/{path.name}") for path in packages.lacking(job).paths]
    named = [Bind(Path(path).resolve(), path) for path in job.mounts]
    checkpoint = Path(job.checkpoint)
    root = folder_of(checkpoint) if checkpoint.is_file() else checkpoint.parent
    manifest = Path(job.manifest)
    inside = replace(
        job,
        checkpoint=f"{_CHECKPOINT}/{checkpoint.relative_to(root).as_posix()}",
        manifest=f"/weighin/manifest/{manifest.name}",
        strategy_path=strategy_path,
        use_path=use_path,
        python_path=(
            *(bind.target for bind in python_path),
            *([_PACKAGES] if installed else []),
            *_importable(job.mounts),
        ),
    )
    binds = [*code, *strategy, *use, *python_path, *installed, *named]
    binds.append(Bind(manifest.resolve(), inside.manifest))
    binds += [
        Bind(Path(library).resolve(), target)
        for library, target in _preloaded(job.cell.environment).items()
    ]
    if job.target:
        inside = replace(inside, target=_WRITTEN)
        binds.append(Bind(Path(job.target).resolve(), _WRITTEN, writable=True))
    binds += _place_checkpoint(checkpoint, inside.checkpoint)
    if library_of(job.cell.model.builder) and not checkpoint.is_dir():
        binds += [
            Bind(file.resolve(), f"{_CHECKPOINT}/{file.name}")
            for file in sorted(root.glob("*.json"))  # from_pretrained reads them
            if file != checkpoint
        ]
    return inside, binds


def environment_inside(environment: dict[str, str]) -> dict[str, str]:
    """Return a cell's environment, in which LD_PRELOAD has the libraries' paths in the container."""
    inside = list(_preloaded(environment).values())
    return environment | ({preload.VARIABLE: ":".join(inside)} if inside else {})


def _preloaded(environment: dict[str, str]) -> dict[str, str]:
    """Return a dict from each library of LD_PRELOAD to its path in the container.

    The library is mounted there, because the image may lack it.
    """
    return {
        library: f"/weighin/preload/{number}/{Path(library).name}"
        for number, library in enumerate(preload.libraries(environment))
    }


def _importable(mounts: tuple[str, ...]) -> list[str]:
    """Return the folders of ``sys.path`` that directly contain a mounted path.

    In the container, such a folder contains only the mounted paths, so it hides no package of the
    image.
    """
    parents = [str(Path(path).parent) for path in mounts]
    return [parent for parent in dict.fromkeys(parents) if parent in sys.path]


def _place_file(path: Path, code: list[Bind], kind: str) -> tuple[str, list[Bind]]:
    """Return the container's path for the file of a strategy or use (``kind``), and its mount.

    There is no mount if one of the mounts ``code`` contains the file.
    """
    for bind in code:
        if path.is_relative_to(bind.source):
            return f"{bind.target}/{path.relative_to(bind.source).as_posix()}", []
    inside = (
        f"/weighin/{kind}/{path.name}"  # mounts only this file, and no other file of its folder
    )
    return inside, [Bind(path, inside)]


def _place_checkpoint(checkpoint: Path, target: str) -> list[Bind]:
    """Return the binds for a checkpoint: a file, a folder, or an index and its shards.

    Download caches consist of symbolic links, whose targets do not exist in the container. Each
    file of a folder with symbolic links therefore gets a mount of its own.
    """
    if not checkpoint.is_dir():
        others = formats.files(checkpoint) if checkpoint.suffix == ".json" else [checkpoint]
        return [Bind(file.resolve(), str(Path(target).with_name(file.name))) for file in others]
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    if not any(path.is_symlink() for path in files):
        return [Bind(checkpoint.resolve(), target)]
    return [
        Bind(file.resolve(), f"{target}/{file.relative_to(checkpoint).as_posix()}")
        for file in files
    ]
