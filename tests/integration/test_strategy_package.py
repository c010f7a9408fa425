"""A strategy that another package provides: installed beside weighin, listed, measured and checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import wheels

from weighin.suite.registry import data_folder

PROJECT = """
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
RUN = ("bench", "gpt2-tiny", "--strategies", "their_mmap")


@dataclass(frozen=True, slots=True)
class Installed:
    """weighin and the package in an environment, and a folder to run commands in."""

    python: Path
    folder: Path

    def weighin(self, *arguments: str) -> CompletedProcess[str]:
        cache = str(self.folder / "cache")
        command = [str(self.python), "-m", "weighin", *arguments]
        return wheels.run(command, self.folder, WEIGHIN_CACHE=cache)

    def check(self, budget: str) -> CompletedProcess[str]:
        return self.weighin("check", "run", "--budget", budget)

    def outcome(self, run: str) -> tuple[str, str]:
        (line,) = (self.folder / run / "records.jsonl").read_text().splitlines()
        record = json.loads(line)
        return record["cell"]["strategy"], record["outcome"]


@pytest.fixture(scope="module")
def installed(wheel: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    project = tmp_path_factory.mktemp("project")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "their_loaders").mkdir()
    strategy = (data_folder("strategies") / "mmap_assign.py").read_text()
    (project / "their_loaders" / "their_mmap.py").write_text(strategy)
    theirs = wheels.build(project, tmp_path_factory.mktemp("their wheel"))
    python = wheels.install(tmp_path_factory.mktemp("environment"), wheel, theirs)
    folder = disk / "strategy package"
    folder.mkdir()
    return Installed(python, folder)


def test_the_strategy_is_listed(installed: Installed) -> None:
    listed = installed.weighin("list", "strategies", "--json", "-")
    assert listed.returncode == 0, listed.stderr
    strategies = {one["name"]: one for one in json.loads(listed.stdout)["strategies"]}
    path = Path(strategies["their_mmap"]["path"])
    assert path.is_relative_to(installed.python.parents[1])  # the wheel's, not the project's
    assert strategies["their_mmap"]["formats"] == strategies["mmap_assign"]["formats"]


def test_the_strategy_is_measured_and_checked(installed: Installed) -> None:
    measured = installed.weighin(*RUN, "--isolation", "process", "--out", "run")
    assert measured.returncode == 0, measured.stderr
    assert installed.outcome("run") == ("their_mmap", "ok")

    kept = installed.check("peak_rss <= 4 GiB")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    broken = installed.check("peak_rss <= 1 MiB")  # torch alone needs more
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert "their_mmap" in broken.stdout


@pytest.mark.docker
def test_the_strategy_is_measured_in_a_container(installed: Installed) -> None:
    measured = installed.weighin(*RUN, "--isolation", "docker", "--out", "contained")
    assert measured.returncode == 0, measured.stderr
    assert installed.outcome("contained") == ("their_mmap", "ok")
