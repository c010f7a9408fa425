"""What a container sees of this machine: the code, one strategy and one checkpoint, all read only.

A save also gets the empty folder that it writes to.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import weighin
from weighin.cell import Job
from weighin.suite.registry import data_folder

CODE: Final = "/weighin/code"
_WRITTEN: Final = "/weighin/written"


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of this machine, and where the container has it."""

    source: Path
    target: str
    writable: bool = False


def place(job: Job) -> tuple[Job, list[Bind]]:
    """Return the job with the paths that hold inside the container, and the binds that they need."""
    code = [
        Bind(Path(weighin.__file__).resolve().parent, f"{CODE}/weighin"),
        Bind(data_folder("strategies").resolve(), f"{CODE}/strategies"),
    ]
    strategy_path, strategy = _place_strategy(Path(job.strategy_path).resolve(), code)
    python_path = [
        Bind(Path(folder).resolve(), f"/weighin/path/{number}")
        for number, folder in enumerate(job.python_path)
    ]
    checkpoint = Path(job.checkpoint)
    manifest = Path(job.manifest)
    inside = replace(
        job,
        checkpoint=f"/weighin/checkpoint/{checkpoint.name}",
        manifest=f"/weighin/manifest/{manifest.name}",
        strategy_path=strategy_path,
        python_path=tuple(bind.target for bind in python_path),
    )
    binds = [*code, *strategy, *python_path, Bind(manifest.resolve(), inside.manifest)]
    if job.target:
        inside = replace(inside, target=_WRITTEN)
        binds.append(Bind(Path(job.target).resolve(), _WRITTEN, writable=True))
    return inside, binds + _place_checkpoint(checkpoint, inside.checkpoint)


def _place_strategy(path: Path, code: list[Bind]) -> tuple[str, list[Bind]]:
    """Return where the strategy's file is inside, and the bind that this needs beside the code."""
    for bind in code:
        if path.is_relative_to(bind.source):
            return f"{bind.target}/{path.relative_to(bind.source).as_posix()}", []
    inside = (
        f"/weighin/strategy/{path.name}"  # the file alone: what lies beside it is not our affair
    )
    return inside, [Bind(path, inside)]


def _place_checkpoint(checkpoint: Path, target: str) -> list[Bind]:
    """Return the binds for a file or a folder.

    A folder that links to files elsewhere, as download caches do, is given file by file: its
    links would lead nowhere inside.
    """
    if not checkpoint.is_dir():
        return [Bind(checkpoint.resolve(), target)]
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    if not any(path.is_symlink() for path in files):
        return [Bind(checkpoint.resolve(), target)]
    return [
        Bind(file.resolve(), f"{target}/{file.relative_to(checkpoint).as_posix()}")
        for file in files
    ]
