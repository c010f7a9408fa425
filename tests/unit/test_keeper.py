"""The keeper of a container: what its shell and this process say to each other through the pipes.

A test plays the shell, because the shell's script would end all processes of this user.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighin.isolation.base import Exit
from weighin.isolation.docker import keeper
from weighin.isolation.docker.keeper import SHELL, Keeper


class Shell:
    """The container's side of a keeper's pipes, and a process that stands for the shell."""

    def __init__(self, kept: Keeper) -> None:
        self.folder = kept.binds()[0].source
        self._hold, self._life, self._told = (
            os.open(self.folder / name, flags)
            for name, flags in (("hold", os.O_RDONLY), ("life", os.O_RDONLY), ("told", os.O_WRONLY))
        )
        self.process = subprocess.Popen(["sleep", "60"])

    def says(self, text: bytes) -> None:
        os.write(self._told, text)

    def hears(self) -> bytes:
        return os.read(self._hold, 100)

    def must_live(self) -> bool:
        """Tell whether the pipe is open with whose end the shell kills the command."""
        os.set_blocking(self._life, False)
        try:
            return os.read(self._life, 1) != b""
        except BlockingIOError:
            return True

    def ends(self) -> None:
        self.process.kill()
        self.process.wait()
        for name in ("_hold", "_life", "_told"):
            if (descriptor := getattr(self, name)) >= 0:
                os.close(descriptor)
                setattr(self, name, -1)


@pytest.fixture
def kept() -> Iterator[Keeper]:
    kept = Keeper()
    yield kept
    kept.close()


@pytest.fixture
def shell(kept: Keeper) -> Iterator[Shell]:
    shell = Shell(kept)
    yield shell
    shell.ends()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_child_tells_its_pid_and_waits_until_it_may_go(
    kept: Keeper, shell: Shell, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:  # before Linux 5.3
        monkeypatch.setattr(keeper, "open_process", lambda _: None)
    assert (shell.folder / "start").read_text().startswith("exec ")
    shell.says(b"7\n")
    assert kept.wait_for_child(shell.process.pid, 10) == 7
    assert not shell.folder.exists()  # the pipes have no names any more
    kept.go()
    assert shell.hears() == b"\n"


@pytest.mark.parametrize(
    ("said", "pid"), [((b"12", b"3\n"), 123), ((b"sh: no such file\n",), None), ((), None)]
)
def test_a_keeper_that_does_not_tell_a_pid_has_no_child(
    kept: Keeper, shell: Shell, said: tuple[bytes, ...], pid: int | None
) -> None:
    for part in said:
        shell.says(part)
    assert kept.wait_for_child(shell.process.pid, 0.05) == pid


def test_a_keeper_that_ends_before_its_child_starts_is_not_waited_for(
    kept: Keeper, shell: Shell
) -> None:
    shell.process.kill()
    assert kept.wait_for_child(shell.process.pid, 60) is None


def test_a_shell_that_closes_its_pipe_is_not_waited_for(kept: Keeper, shell: Shell) -> None:
    sleeper = shell.process.pid
    os.close(shell._told)
    shell._told = -1
    assert kept.wait_for_child(sleeper, 60) is None


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        (b"0\n", Exit(0)),
        (b"128\n", Exit(128)),
        (b"129\n", Exit(129)),
        (b"Hangup\n129\n", Exit(None, signal=signal.SIGHUP)),
        (b"Killed\n137\n", Exit(None, signal=signal.SIGKILL)),
        (b"", None),
    ],
)
def test_the_shell_tells_how_the_command_ended(
    kept: Keeper, shell: Shell, said: bytes, ended: Exit | None
) -> None:
    shell.says(b"7\n")
    kept.wait_for_child(shell.process.pid, 10)
    shell.says(said[:2])
    shell.says(said[2:])
    shell.ends()
    assert kept.exit(60) == ended


def test_an_exit_code_that_came_with_the_pid_is_kept(kept: Keeper, shell: Shell) -> None:
    shell.says(b"7\n3\n")
    assert kept.wait_for_child(shell.process.pid, 10) == 7
    assert kept.exit(0) == Exit(3)


def test_a_command_whose_exit_is_not_told_in_time(kept: Keeper, shell: Shell) -> None:
    shell.says(b"7\n")
    kept.wait_for_child(shell.process.pid, 10)
    assert kept.exit(0.05) is None


def test_the_shell_writes_the_mark_after_the_output(kept: Keeper, shell: Shell) -> None:
    shell.says(b"7\n")
    kept.wait_for_child(shell.process.pid, 10)
    kept.end_output(b"mark")
    assert shell.hears() == b"mark\n"
    shell.ends()
    kept.end_output(b"mark")  # the shell was killed: nothing to do


def descriptors() -> int:
    """Return how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.usefixtures("no_garbage")
def test_an_end_of_the_keeper_is_seen_by_its_shell_and_leaves_nothing() -> None:
    before = descriptors()
    kept = Keeper()
    shell = Shell(kept)
    shell.says(b"7\n")
    kept.wait_for_child(shell.process.pid, 10)
    assert shell.must_live()
    kept.close()
    kept.close()
    assert not shell.must_live()
    assert shell.hears() == b""
    shell.ends()
    assert descriptors() == before


def test_an_end_before_the_container_starts_removes_the_pipes(kept: Keeper) -> None:
    folder = kept.binds()[0].source
    assert {path.name for path in folder.iterdir()} == {"hold", "life", "told", "start"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_fifo()} == {0o600}
    kept.close()
    assert not folder.exists()


@pytest.mark.usefixtures("no_garbage")
def test_a_keeper_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, opened = descriptors(), os.open

    def refuses(path: str, flags: int, **options: int) -> int:
        if path.endswith("/told"):
            raise OSError(24, "Too many open files")
        return opened(path, flags, **options)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(os, "open", refuses)
        Keeper()
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


def test_a_shell_starts_with_its_own_loader_and_libraries(kept: Keeper) -> None:
    pipes, *files = kept.binds()
    assert pipes.writable
    assert not any(file.writable for file in files)
    assert "/weighin/shell/sh" in [file.target for file in files]
    assert SHELL.resolve() in [file.source for file in files]
    loader = files[0].target
    started = (
        [loader, "--library-path", "/weighin/shell", files[1].target] if files[1:] else [loader]
    )
    assert kept.command(["serve", "model"], {"LD_PRELOAD": "x.so"}) == [
        *started, "/weighin/keeper/start", "LD_PRELOAD=x.so", "--", "serve", "model",
    ]  # fmt: skip
