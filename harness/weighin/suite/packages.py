"""Find out which of the packages that strategies need are missing, without importing them.

A strategy declares each package by its name on PyPI, if necessary with a minimum version:
"safetensors>=0.8".
"""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from shlex import quote
from typing import Final

from packaging.utils import canonicalize_name

from weighin import install
from weighin.stream import gguf_files as gguf

OF_FORMAT: Final[Mapping[str, tuple[str, ...]]] = {gguf.NAME: ("gguf", "accelerate")}
"""The packages that transformers imports to load a checkpoint of this format."""


def name_of(requirement: str) -> str:
    """Return the package's name in a requirement: "safetensors" in "safetensors>=0.8"."""
    return re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]


def versions(requirements: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in map(name_of, requirements):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def missing(requirements: Iterable[str]) -> str:
    """Return the missing packages and the command that installs them; empty if no package is missing.

    An example: "needs fastsafetensors: pip install 'weighin[loaders] @ git+URL'".
    """
    absent = [each for each in requirements if not _is_met(each)]
    if not absent:
        return ""
    extras = {each: _extra_with(each) for each in absent}
    others = [quote(each) for each in absent if not extras[each]]
    commands = [f"pip install {' '.join(others)}"] if others else []
    if chosen := sorted(filter(None, set(extras.values()))):
        commands.append(install.command(*chosen, anywhere=True))
    return f"needs {', '.join(absent)}: {'; '.join(commands)}"


def _is_met(requirement: str) -> bool:
    installed = versions([requirement]).get(name_of(requirement))
    least = requirement.partition(">=")[2]
    return installed is not None and _numbers(installed) >= _numbers(least)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _extra_with(requirement: str) -> str:
    """Return weighin's extra with the shortest name that installs a package: "loaders"; else empty."""
    try:
        lines = requires("weighin") or []
    except PackageNotFoundError:  # weighin runs from a folder without being installed
        lines = []
    name = canonicalize_name(name_of(requirement))
    extras = [
        found[1]
        for line in lines
        if canonicalize_name(name_of(line)) == name
        and (found := re.search(r"""extra == ['"]([\w-]+)['"]""", line))
    ]
    return min(extras, key=len, default="")  # larger extras contain the package, too
