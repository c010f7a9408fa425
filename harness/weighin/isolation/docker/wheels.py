"""Download the wheels that a worker needs, in the same builds as in this environment."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from weighin import child_process
from weighin.errors import IsolationUnavailable
from weighin.units import format_bytes

_SAY_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """The Python and platform that wheels must fit. ``glibc`` is 36 for glibc 2.36."""

    python: str
    machine: str
    glibc: int

    def pip_flags(self, host: "Target | None") -> list[str]:
        """Return pip's flags to fetch wheels for this target.

        ``host`` describes this machine; None if it does not run Linux.
        """
        same_python = host and (self.feature, self.machine) == (host.feature, host.machine)
        if host and same_python and self.glibc >= host.glibc:
            return []
        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, 4, -1)]
        platforms.append(f"manylinux2014_{self.machine}")
        flags = ["--implementation", "cp", "--python-version", self.python]
        return flags + [flag for name in platforms for flag in ("--platform", name)]

    @property
    def feature(self) -> str:
        """The Python version without its last number: "3.11" for Python 3.11.2."""
        return ".".join(self.python.split(".")[:2])

    def own_requirements(self, pins: Iterable[str]) -> list[str]:
        """Return what ``pins`` require under the target's Python, but not under the running Python.

        pip evaluates the conditions of requirements only for the Python that runs pip.
        """
        python = {"python_version": self.feature, "python_full_version": self.python}
        found = set()
        for pin in pins:
            try:
                lines = importlib.metadata.requires(name_of(pin)) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            for each in map(Requirement, lines):
                if each.marker and each.marker.evaluate(python) and not each.marker.evaluate():
                    found.add(f"{each.name}{each.specifier}")
        return sorted(found)


def read_target(words: str) -> Target:
    python, machine, *libc = words.split()
    version = libc[1] if len(libc) > 1 else "2.17"
    return Target(python, machine, int(version.split(".")[1]))


PROBE = (
    "import platform; print(platform.python_version(), platform.machine(), *platform.libc_ver())"
)
"""Code that prints the input of ``read_target``. It runs on every version of Python 3."""


def installed_pins(requirements: Path, packages: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return pins ("torch==2.13.0+cpu") for the installed packages of a requirements file.

    The pins include ``packages`` and all dependencies, so that the image has the versions of this
    environment.
    """
    lines = requirements.read_text().splitlines()
    roots = [*packages, *(line for line in lines if line and not line.startswith("#"))]
    return tuple(sorted(f"{name}=={found.version}" for name, found in installed(roots)))


def installed(
    requirements: Iterable[str], without: Iterable[str] = ()
) -> Iterator[tuple[str, importlib.metadata.Distribution]]:
    """Yield the names and metadata of ``requirements`` and of all that they require, if installed.

    The packages in ``without``, packages that only these require, and extras are left out.
    """
    todo, seen = [*requirements], {*without}
    while todo:
        requirement = todo.pop()
        name = name_of(requirement)
        if name in seen or "extra ==" in requirement:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another platform or Python
            continue
        yield name, distribution
        todo += distribution.requires or []


def name_of(requirement: str) -> str:
    """Return the name of the package in a requirement: "ruamel-yaml" of "ruamel.yaml>=0.18"."""
    return canonicalize_name(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def installed_bytes(pins: tuple[str, ...]) -> int:
    """Return the size in bytes of all files of the packages in ``pins``."""
    size = 0
    for pin in pins:
        try:
            distribution = importlib.metadata.distribution(pin.partition("==")[0])
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in distribution.files or []:
            with contextlib.suppress(OSError):  # a file in the metadata that is missing
                size += Path(str(distribution.locate_file(file))).stat().st_size
    return size


def download(
    pins: tuple[str, ...],
    target: Target,
    folder: Path,
    say: Callable[[str], None],
    packages: tuple[str, ...] = (),
) -> None:
    """Fetch the wheels of ``pins`` for ``target`` into ``folder/wheels``, with this Python's pip.

    ``packages`` are the packages that strategies need. Every 10 s, ``say`` gets a text with the
    size of the fetched files.

    Raises:
        IsolationUnavailable: pip is not installed, or finds no matching wheel.
    """
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    command = [*child_process.module("pip", "download", "--quiet", "--only-binary=:all:")]
    command += ["--disable-pip-version-check", "--constraint", str(constraints)]
    # Name only the packages that weighin itself needs: the target may lack their dependencies.
    names = {"torch", "numpy", "safetensors", *map(name_of, packages)}
    roots = [pin for pin in pins if pin.partition("==")[0] in names]
    roots += target.own_requirements(pins)
    command += ["--dest", str(folder / "wheels"), *target.pip_flags(_host()), *roots]
    (unfinished := folder / "unfinished").mkdir()
    try:
        code, stderr = _run(command, unfinished, lambda: say(_fetched(folder)))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if code:
        raise explain_pip(stderr, pins)


def _run(command: Sequence[str], temporary: Path, tell: Callable[[], None]) -> tuple[int, str]:
    """Run pip with its own temporary folder; return the exit code and the errors that pip printed."""
    with child_process.Child(command, os.environ | {"TMPDIR": str(temporary)}) as pip:
        while True:
            try:
                return pip.wait(_SAY_EVERY_S), pip.stderr_tail.decode(errors="replace")
            except TimeoutError:
                tell()


def _fetched(folder: Path) -> str:
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip has just moved the file
            size += file.stat().st_size if file.is_file() else 0
    return f"fetched {format_bytes(size)} of wheels"


def explain_pip(stderr: str, pins: tuple[str, ...]) -> IsolationUnavailable:
    if "No module named pip" in stderr:
        return IsolationUnavailable(
            "the wheels for the image cannot be fetched: this environment has no pip",
            f"{sys.executable} -m ensurepip",
        )
    torch = next((pin for pin in pins if pin.startswith("torch==")), "")
    build = torch.partition("+")[2]
    index = f"https://download.pytorch.org/whl/{build}" if build else "URL"
    lines = [line for line in stderr.splitlines() if line.strip()] or ["it printed no error"]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return IsolationUnavailable(
        f"pip cannot fetch the wheels for the image: {(errors or lines)[-1].removeprefix('ERROR: ')}",
        f"name the index that torch came from: export PIP_EXTRA_INDEX_URL={index}",
    )


def _host() -> Target:
    words = (platform.python_version(), platform.machine(), *platform.libc_ver())
    return read_target(" ".join(words))
