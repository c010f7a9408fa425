"""One lock for the machine: for all caches and, as far as permissions allow, for all users."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weighin.errors import ConfigError, HarnessError
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.run import runner

HOLDS = (
    "from weighin.run.runner import only_run\nwith only_run(): print('held', flush=True); input()"
)


def held(path: Path | None, **settings: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock, and return once it does."""
    variables = os.environ | settings | ({LOCK_VARIABLE: str(path)} if path else {})
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_two_caches_share_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(path := tmp_path / "lock"))
    first = held(path, WEIGHIN_CACHE=str(tmp_path / "one"))
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "two"))
    with pytest.raises(HarnessError) as caught, runner.only_run():
        pytest.fail("both measured")
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        f"another run is measuring on this machine (it holds the lock file {path})\nwait for its"
        " end: weighin bench --wait; parallel runs would distort each other's figures"
    )
    first.communicate("\n")
    with runner.only_run():
        pass


def test_a_run_waits_for_another_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    first = held(tmp_path / "lock")
    said = []

    def waiting(text: str) -> None:
        said.append(text)
        first.kill()  # the lock goes with its process

    with runner.only_run(patience_s=30, waiting=waiting):
        pass
    first.communicate()
    lock = tmp_path / "lock"
    assert said == [
        f"waiting for another run on this machine to end (it holds the lock file {lock})"
    ]


def test_the_lock_is_where_every_user_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    (private := tmp_path / "private").mkdir(mode=0o755)
    monkeypatch.setattr(runner, "_FOLDERS", (private, tmp_path / "gone", shared))
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    assert runner.lock_path() == shared / "weighin-measuring.lock"


def test_another_user_can_take_the_lock_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(path := tmp_path / "lock"))
    before = os.umask(0o077)
    try:
        with runner.only_run():
            assert path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
    path.chmod(0o444)  # as it is for who does not own it
    with runner.only_run():
        pass


def test_a_link_in_the_lock_s_place_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    with pytest.raises(ConfigError) as caught, runner.only_run():
        pytest.fail("it was followed")
    assert str(caught.value) == (
        f"cannot open the lock file {tmp_path / 'lock'}: Too many levels of symbolic links\nsee who"
        " owns the lock file (ls -l), or name another lock file: WEIGHIN_LOCK=/path weighin ..."
    )


def test_a_user_s_own_file_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(path := tmp_path / "private"))
    path.touch(0o600)
    with runner.only_run():
        assert path.stat().st_mode & 0o777 == 0o600
