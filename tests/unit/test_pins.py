"""constraints.txt names versions that every Python can install that requires-python promises.

Each package says itself which Pythons it supports. Of a package that this environment has, its own
metadata are read, without a network; the others are looked up in pip's index, whose pages are small:
no package is downloaded.
"""

import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from nightly import nightly
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11.0", "3.11.2", "3.12.0", "3.13.0")  # 3.11.2 is Debian 12's


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def installed(name: str, version: str) -> metadata.Distribution | None:
    """Return the package in this environment, if it is there in the version of the pin."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return found if found.version.partition("+")[0] == version else None


def offered(name: str, python: str) -> list[str]:
    """Return the versions of a package for which the index has a wheel for this Python."""
    asked = [sys.executable, "-m", "pip", "index", "versions", name, "--only-binary=:all:"]
    answer = subprocess.run(
        [*asked, f"--python-version={python}"], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("Available")]
    return [version.partition("+")[0] for version in line.split(": ")[1].split(", ")]


def test_an_installed_pin_supports_every_promised_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {kind.rpartition(" ")[2] for kind in project["classifiers"] if ":: 3." in kind}
    assert {python.rpartition(".")[0] for python in PYTHONS} == named
    found = [each for pin in pins().items() if (each := installed(*pin))]
    needs = {each.name: (each.metadata.get_all("Requires-Python") or [""])[0] for each in found}
    needs["weighin"] = project["requires-python"]
    assert len(needs) > 60
    assert [
        one for one in needs.items() for python in PYTHONS if python not in SpecifierSet(one[1])
    ] == []


@pytest.mark.index
@pytest.mark.slow
@pytest.mark.parametrize("python", nightly(*PYTHONS))  # by day, `make setup` asks for one of them
def test_the_index_has_every_other_pin_for_every_python(python: str) -> None:
    asked = {
        name: version
        for name, version in pins().items()
        if name.startswith("torch") or not installed(name, version)
    }
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(asked, pool.map(lambda name: offered(name, python), asked), strict=True))
    assert {name for name, version in asked.items() if version not in answers[name]} == set()
