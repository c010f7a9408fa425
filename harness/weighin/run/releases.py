"""Install other releases of packages, each choice in an environment of its own: ``bench --with transformers==4.57.1``.

An environment is an entry of weighin's cache::

    $WEIGHIN_CACHE/environments/transformers==4.57.1-1f2e3d4c/
        packages.json    what was asked for, and the versions that were installed: the environment is complete
        packages/        a virtual environment: links to this Python's torch and numpy, and to weighin's running
                         code; what was asked for, and what it needs, as the installer resolves it

Only the measured process runs there. It needs torch, the standard library and the strategy's packages; weighin's
own packages are not in it.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Final

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from weighin.cell import LATEST
from weighin.checkpoint import temporary_folders
from weighin.checkpoint.child import Report
from weighin.child_process import Child, last_line, printed_lines
from weighin.errors import ConfigError
from weighin.files import object_in, write_text
from weighin.install import requirements_in
from weighin.units import format_bytes

MARKER: Final = "packages"
_TEMPORARY: Final = ".making-"
_UNREACHABLE: Final = re.compile(
    "Failed to establish|NameResolution|Temporary failure|Connection refused|dns error"
)


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete environment, with the versions of all packages that were installed in it."""

    folder: Path
    versions: Mapping[str, str]
    asked: tuple[str, ...]

    @property
    def python(self) -> str:
        return str(self.folder / MARKER / "bin/python")

    @property
    def chosen(self) -> dict[str, str]:
        """The versions of the packages that were asked for, by the choice and by the strategy."""
        return {name: self.versions[name] for name in self.asked if name in self.versions}


def ensure(choice: str, needed: Sequence[str], report: Report) -> Environment:
    """Return the environment of ``choice`` for a strategy that needs the packages ``needed``; make it if it is missing.

    A choice of exact versions is installed once; for any other, each run asks for the newest releases. If a
    release cannot be installed or imported, ConfigError has the last line that the installer or Python printed.
    """
    given = [] if choice == LATEST else requirements_in(choice)
    named = {canonicalize_name(Requirement(one).name) for one in given}
    also = [one for one in map(Requirement, needed) if canonicalize_name(one.name) not in named]
    given += [one.name if choice == LATEST else str(one) for one in also]
    names = tuple(canonicalize_name(Requirement(one).name) for one in given)
    linked = dict(_linked(named))
    limits = sorted(f"{name}==={one.version}" for name, one in linked.items())
    ours = Path(__file__).resolve().parents[1]
    about = [sys.version, sys.prefix, str(ours), *sorted(map(str, default_environment().values()))]
    request = {"packages": sorted(given), "linked": limits, "python": about}
    root = temporary_folders.folder() / temporary_folders.ENVIRONMENTS
    exact = re.compile("==[^*]+$")  # one release, and no pattern of several
    is_exact = choice != LATEST and all(map(exact.search, requirements_in(choice)))
    for marker in sorted(root.glob(f"[!.]*/{MARKER}.json")) if is_exact else ():
        if (stored := object_in(marker)).get("request") == request:
            os.utime(marker)  # the time of this use
            return Environment(marker.parent, stored["versions"], names)
    report(f"installing {', '.join(given)}", None)
    with temporary_folders.own_folder(root, _TEMPORARY) as making:
        venv = making / MARKER
        _run((sys.executable, "-m", "venv", "--without-pip", str(venv)), choice)
        site = next((venv / "lib").glob("python*")) / "site-packages"
        for one in linked.values():
            for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(one.locate_file(top))).resolve())
        (code := venv / "code").mkdir()
        (code / "weighin").symlink_to(ours)
        (file := venv / "linked.txt").write_text("\n".join(limits))
        _run((*_installer(venv / "bin/python"), "--constraint", str(file), *given), choice)
        found = {
            str(canonicalize_name(one.name)): one
            for one in metadata.distributions(path=[str(site)])
        }
        own = {name: one.version for name, one in found.items() if name not in linked}
        for asked in (found[name] for name in names if name in found):
            files = asked.files or ()
            able = [one.parts[0] for one in files if one.parts[1:] == ("__init__.py",)]
            line = f"import {min(able, default='sys')}"
            _run((str(venv / "bin/python"), "-c", line), choice, "import")
        digits = sha256(json.dumps([request, own], sort_keys=True).encode()).hexdigest()
        entry = root / f"{re.sub(r'[^A-Za-z0-9._=,-]', '_', choice)[:80]}-{digits[:8]}"
        write_text(making / f"{MARKER}.json", json.dumps({"request": request, "versions": own}))
        try:
            making.rename(entry)
        except OSError:
            if not entry.is_dir():  # else it was made before, or by another process meanwhile
                raise
    size = sum(one.lstat().st_size for one in entry.rglob("*"))
    report(f"installed {', '.join(given)}: {format_bytes(size)} in {entry}", None)
    return Environment(entry, own, names)


def between(package: str, first: str, last: str) -> list[str]:
    """Return the releases of a package in the index from ``first`` to ``last`` ("": the newest), in their order."""
    if find_spec("pip") is None:
        raise ConfigError("weighin bisect needs pip, to list the releases", "python -m ensurepip")
    command = (sys.executable, "-m", "pip", "index", "versions", package)
    printed = _run((*command, "--disable-pip-version-check"), package, "find")
    listed = re.search(r"^Available versions: (.*)$", printed, re.MULTILINE)
    every = sorted(map(Version, listed[1].split(", "))) if listed else []
    try:
        ends = Version(first), Version(last) if last else max(every, default=Version("0"))
    except InvalidVersion as error:
        raise ConfigError(f"--from and --to: {error}", "write them as in 4.57.1") from None
    chosen = [one for one in every if ends[0] <= one <= ends[1]]
    if len(chosen) < 2:
        newest = f"; its newest is {every[-1]}" if every else ""
        raise ConfigError(
            f"the index has fewer than two releases of {package} from {first}{last and f' to {last}'}{newest}",
            f"choose an earlier --from{last and ' or a later --to'}",
        )
    return [str(one) for one in chosen]


def _linked(named: Collection[str]) -> Iterator[tuple[str, metadata.Distribution]]:
    """Yield torch, numpy and the packages that they need, except those that were asked for."""
    wanted, seen = ["torch", "numpy"], set[str](named)
    while wanted:
        if (name := canonicalize_name(wanted.pop())) in seen:
            continue
        seen.add(name)
        with suppress(metadata.PackageNotFoundError):
            found = metadata.distribution(name)
            yield name, found
            needs = map(Requirement, found.requires or ())
            wanted += [
                one.name for one in needs if not one.marker or one.marker.evaluate({"extra": ""})
            ]


def _installer(python: Path) -> tuple[str, ...]:
    if uv := shutil.which("uv"):
        return (uv, "pip", "install", "--python", str(python))
    if find_spec("pip") is None:
        raise ConfigError("--with needs uv or pip", "install one of them: python -m ensurepip")
    quiet = ("--no-input", "--disable-pip-version-check", "--retries", "1")
    return (sys.executable, "-m", "pip", "--python", str(python), "install", *quiet)


def _run(command: Sequence[str], choice: str, verb: str = "install") -> str:
    """Run a command to its end, and return what it printed; ConfigError with its last line, if it fails."""
    with Child(command, os.environ) as child:  # Ctrl-C ends it, with all that it started
        code, printed = child.wait(inf), child.printed
    text = "\n".join(printed_lines(printed))
    if not code:
        return text
    if _UNREACHABLE.search(text):
        raise ConfigError(
            f"cannot {verb} {choice}: the package index cannot be reached",
            "connect this machine to the index, or name another one: PIP_INDEX_URL=URL weighin ...",
        )
    why = re.sub(r"^(ERROR|cause): ", "", last_line(printed)).rstrip(".")  # of pip, or of uv
    raise ConfigError(f"cannot {verb} {choice}: {why}")
