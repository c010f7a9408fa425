"""The built wheel in a fresh environment, beside another package that provides a strategy.

It has one import name, which harms no project's own packages, and brings its data and manual page.
"""

import json
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from typed import ROOT
from wheels import build, environment, run

from weighin.suite.registry import data_folder

THEIR_PACKAGES = ("harness", "strategies", "docker", "configs")
THEIR_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "their-loaders"
version = "1.0"

[project.entry-points."weighin.strategies"]
their_mmap = "their_loaders.their_mmap"

[tool.hatch.build.targets.wheel]
packages = ["their_loaders"]
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """weighin and their package in an environment, and a folder to run commands in."""

    python: Path
    folder: Path

    def weighin(self, line: str) -> CompletedProcess[str]:
        words = [str(self.python), "-m", "weighin", *line.split()]
        return run(words, self.folder, WEIGHIN_CACHE=str(self.folder / "cache"))

    def listed(self, kind: str) -> dict[str, Any]:
        done = self.weighin(f"list {kind} --json -")
        assert done.returncode == 0, done.stderr
        return {one["name"]: one for one in json.loads(done.stdout)[kind]}


@pytest.fixture(scope="module")
def installed(wheel: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    project = tmp_path_factory.mktemp("project")
    (project / "pyproject.toml").write_text(THEIR_PROJECT)
    (project / "their_loaders").mkdir()
    strategy = (data_folder("strategies") / "mmap_assign.py").read_text()
    (project / "their_loaders" / "their_mmap.py").write_text(strategy)
    theirs = build(project, tmp_path_factory.mktemp("their wheel"))
    packages = Path(sysconfig.get_path("purelib"))
    python = environment(tmp_path_factory.mktemp("environment"), packages)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel, theirs], check=True)
    (folder := disk / "installed").mkdir()
    return Installed(python, folder)


def test_the_wheel_brings_one_import_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = [name for name in names if ".data/data/share/man/" not in name]  # no import finds these
    tops = {name.partition("/")[0] for name in files}
    others = (".dist-info", ".data")  # nothing that can be imported
    assert {name for name in tops if not name.endswith(others)} == {"weighin"}


@pytest.mark.parametrize("how", [["-m", "pytest"], ["-c", "import pytest; pytest.console_main()"]])
def test_a_project_with_packages_of_the_same_names_runs_its_tests(
    installed: Installed, tmp_path: Path, how: list[str]
) -> None:
    for name in THEIR_PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"OWNER = 'their {name}'\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_theirs.py").write_text(
        f"import {', '.join(THEIR_PACKAGES)}\n"
        "def test_theirs(weighin):\n"
        f"    for one in ({', '.join(THEIR_PACKAGES)}):\n"
        "        assert one.OWNER == f'their {one.__name__}'\n"
        "    assert weighin.measure\n"
    )
    done = run([str(installed.python), *how, "-q", "-p", "no:cacheprovider"], tmp_path)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_load_streaming_is_there_and_harness_is_not(installed: Installed, tmp_path: Path) -> None:
    code = "import weighin; print(weighin.load_streaming.__name__, weighin.__file__)"
    done = run([str(installed.python), "-c", code], tmp_path)
    assert done.stdout.startswith("load_streaming "), done.stderr
    assert str(installed.python.parents[1]) in done.stdout  # the wheel's, not this checkout's
    gone = run([str(installed.python), "-c", "import harness"], tmp_path)
    assert "No module named 'harness'" in gone.stderr


def test_strategies_models_suites_and_the_manual_page_are_in_the_wheel(
    installed: Installed,
) -> None:
    place = installed.python.parents[1]
    assert "gpt2-xl" in installed.listed("models")
    strategies = installed.listed("strategies")
    assert strategies["their_mmap"]["formats"] == strategies["mmap_assign"]["formats"]
    paths = [strategies[name]["path"] for name in ("their_mmap", "streaming")]
    paths += [installed.listed("suites")["ci"]["path"]]
    assert all(Path(path).is_relative_to(place) for path in paths)
    ended = installed.weighin("bench --suite ci --out /proc/run")
    assert ended.returncode == 2
    assert "error: cannot write /proc/run/plan.json" in ended.stderr  # so the suite was read
    page = place / "share" / "man" / "man1" / "weighin.1"
    assert page.read_text() == (ROOT / "docs" / "weighin.1").read_text()


@pytest.mark.parametrize("isolation", ["process", pytest.param("docker", marks=pytest.mark.docker)])
def test_a_strategy_of_another_package_is_measured_and_checked(
    installed: Installed, isolation: str
) -> None:
    cells = f"gpt2-tiny -s their_mmap --isolation {isolation}"
    measured = installed.weighin(f"bench {cells} --out {isolation}")
    assert measured.returncode == 0, measured.stderr
    record = json.loads((installed.folder / isolation / "records.jsonl").read_text())
    assert (record["cell"]["strategy"], record["outcome"]) == ("their_mmap", "ok")
    checked = installed.weighin(f"check {isolation} --budget peak_rss<=1MiB")
    assert checked.returncode == 1, checked.stdout + checked.stderr  # torch alone needs more
    assert "their_mmap" in checked.stdout
