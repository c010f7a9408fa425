"""Which code was measured, the commit of the folder that a run was started in; and how far a disk reads ahead."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import git

from weighin import __version__
from weighin.probes import environment
from weighin.units import KIB


@pytest.fixture
def tree(here: Path) -> Path:
    git(here, "init", "--quiet")
    (here / "loader.py").write_text("first")
    git(here, "add", "loader.py")
    git(here, "commit", "--quiet", "--message", "first")
    return here


def test_the_commit_of_the_folder_that_a_run_is_started_in(tree: Path) -> None:
    commit = git(tree, "rev-parse", "HEAD")
    clean = {"weighin": __version__, "git_commit": commit, "git_dirty": False}
    assert environment.code() == clean
    (tree / "results.csv").write_text("not tracked")
    assert environment.code() == clean
    (tree / "loader.py").write_text("second")
    assert environment.code() == clean | {"git_dirty": True}


def fsmonitor(tree: Path, program: str) -> None:
    git(tree, "config", "core.fsmonitor", program)


def clean_filter(tree: Path, program: str) -> None:
    git(tree, "config", "filter.a=b.clean", program)
    (tree / ".gitattributes").write_text("* filter=a=b")


def filter_of_an_included_file(tree: Path, program: str) -> None:
    git(tree, "config", "--file", ".git/more", "filter.mine.clean", program)
    git(tree, "config", "include.path", "more")
    (tree / ".gitattributes").write_text("* filter=mine")


def monitor_of_a_submodule(tree: Path, program: str) -> None:
    git(tree, "clone", "--quiet", ".", "inner")
    git(tree, "add", "inner")
    fsmonitor(tree / "inner", program)
    clean_filter(tree / "inner", program)
    (tree / "inner" / "loader.py").write_text("other")


def server_of_missing_objects(tree: Path, program: str) -> None:
    for setting in (
        f"remote.far.url {tree}",
        f"remote.far.uploadpack {program}",
        "remote.far.promisor true",
        "extensions.partialClone far",
        "core.repositoryFormatVersion 1",
    ):
        git(tree, "config", *setting.split())
    kept = git(tree, "rev-parse", "HEAD")
    for path in (tree / ".git/objects").glob("??/*"):
        if path.parent.name + path.name != kept:
            path.unlink()


NAMES = (fsmonitor, clean_filter, filter_of_an_included_file, monitor_of_a_submodule, server_of_missing_objects)  # fmt: skip


@pytest.mark.parametrize("names", NAMES)
def test_no_program_of_a_work_tree_is_run(tree: Path, names: Callable[[Path, str], None]) -> None:
    program = tree / "program"
    program.write_text(f"#!/bin/sh\ntouch {tree / 'EXECUTED'}\nexit 1\n")
    program.chmod(0o755)
    commit = git(tree, "rev-parse", "HEAD")
    names(tree, str(program))
    (tree / "loader.py").write_text("other")
    assert not (tree / "EXECUTED").exists()
    assert environment.code()["git_commit"] == commit
    assert not (tree / "EXECUTED").exists()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("class/bdi/{}/read_ahead_kb", 8192 * KIB),
        ("dev/block/{}/queue/read_ahead_kb", 8192 * KIB),
        ("devices/disk/queue/read_ahead_kb", 8192 * KIB),
        ("nowhere", 128 * KIB),
    ],
    ids=["device or network", "disk", "partition of a disk", "not told"],
)
def test_how_far_the_disk_of_a_folder_reads_ahead(
    tmp_path: Path, setting: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    number, sysfs = f"{os.major(device)}:{os.minor(device)}", tmp_path / "sys"
    if setting.startswith("devices"):
        (sysfs / "devices/disk/part1").mkdir(parents=True)
        (sysfs / "dev/block").mkdir(parents=True)
        (sysfs / "dev/block" / number).symlink_to(sysfs / "devices/disk/part1")
    file = sysfs / setting.format(number)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("8192\n")
    monkeypatch.setattr(environment, "_SYSFS", sysfs)
    assert environment.read_ahead_bytes(tmp_path / "not/made yet") == expected


def test_only_variables_that_change_figures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    changing = {
        "GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_CONF", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
        "PYTHONDEVMODE", "PYTHONMALLOC", "PYTHONOPTIMIZE",
    }  # fmt: skip
    secrets = {"HF_TOKEN": "secret", "OMP_TOKEN": "secret", "TORCH_URL": f"https://a:hf_{'secret' * 3}"}  # fmt: skip
    for name, value in (dict.fromkeys(changing, "3") | secrets).items():
        monkeypatch.setenv(name, value)
    machine = environment.machine()
    assert {name for name, value in machine["settings"].items() if value == "3"} >= changing
    assert machine["settings"]["TORCH_URL"] == "https://a:hf_***"
    assert "thp" in machine
    assert "secret" not in str(machine | environment.code())


def test_the_digest_includes_a_users_own_files(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    mine.write_text("def load(job): ...\n")
    other.write_text("def use(model): ...\n")
    digests = {environment.code_digest(*own) for own in ((), (mine,), (mine, other))}
    assert len(digests) == 3
    with pytest.raises(FileNotFoundError):
        environment.code_digest(tmp_path / "gone.py")
