"""Find the installed package of a model's module, if the image lacks this package.

The image contains torch, numpy, safetensors and their dependencies. A package without compiled code
runs in any environment, so that its folder is mounted, together with the packages that it requires.
Compiled code is built for one Python and one C library, and is not mounted.
"""

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from weighin.cell import Job
from weighin.errors import ConfigError
from weighin.isolation.docker import wheels
from weighin.suite import user_code
from weighin.suite.registry import data_folder

_COMPILED: Final = (".so", ".pyd", ".dylib")


@dataclass(frozen=True, slots=True)
class Lacking:
    """The installed packages to mount (``paths``), and a line of text for each package (``notes``).

    A required package with compiled code is not mounted; its line says so.
    """

    paths: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def lacking(job: Job) -> Lacking:
    """Return the packages that a job's model needs and that the image lacks, if installed here.

    The result is empty if the model's module is part of weighin or of the image, lies in a folder
    of ``job.python_path`` or in ``job.mounts``, or does not exist here.

    Raises:
        ConfigError: the package of the model's module contains compiled code.
    """
    return _lacking(job.cell.model.builder, job.python_path, job.mounts)


@lru_cache
def _lacking(builder: str, python_path: tuple[str, ...], mounts: tuple[str, ...]) -> Lacking:
    if user_code.is_ours(builder) or user_code.file_of(builder, python_path):
        return Lacking()
    top = builder.partition(":")[0].partition(".")[0]
    if top in sys.stdlib_module_names or not (place := _place(top)) or str(place) in mounts:
        return Lacking()
    in_image = {pin.partition("==")[0] for pin in _image_pins()}
    names = {
        canonicalize_name(name) for name in importlib.metadata.packages_distributions().get(top, ())
    }
    if names & in_image:
        return Lacking()
    if compiled := _compiled(place):
        raise ConfigError(
            f"builder {builder!r}: the Docker image has no package {top!r}, which is not mounted because"
            f" it contains compiled code, built for this machine's Python: {compiled}",
            "measure the builder outside of Docker: --isolation cgroup; or, if the image's Python"
            f" can import the package, mount the package: --mount {place}",
        )
    paths, lines = [place], [f"mounting {place} read-only: the image has no package {top}"]
    for normal, distribution in wheels.installed(names, in_image):
        name = distribution.metadata["Name"]
        found = [path for path in _files(distribution) if path != place]
        if any(map(_compiled, found)):
            lines.append(f"not mounting {name}, which the image lacks: it contains compiled code")
            continue
        paths += found
        if normal not in names:
            lines.append(f"mounting {name} read-only: {top} requires it, and the image lacks it")
    return Lacking(tuple(dict.fromkeys(paths)), tuple(lines))


@lru_cache
def _image_pins() -> tuple[str, ...]:
    return wheels.installed_pins(data_folder("docker") / "requirements.txt")


def _place(top: str) -> Path | None:
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin and spec.has_location else None


def _files(distribution: importlib.metadata.Distribution) -> list[Path]:
    tops = dict.fromkeys(file.parts[0] for file in distribution.files or [] if file.parts)
    root = Path(str(distribution.locate_file("")))
    return [
        (root / top).resolve()
        for top in tops
        if top not in ("..", "__pycache__") and not top.endswith(".pth") and (root / top).exists()
    ]


def _compiled(path: Path) -> Path | None:
    files = path.rglob("*") if path.is_dir() else [path]
    return next((file for file in files if file.suffix in _COMPILED), None)
