"""A command in a container, as far as it needs no engine: its keeper, its streams, its settings."""

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_docker_engine import RUNC, RefusingEngine
from test_docker_stream import frame

from weighin.cell import Cell
from weighin.errors import ConfigError, HarnessError, IsolationUnavailable
from weighin.isolation.base import Exit, Streams
from weighin.isolation.docker import command_start, isolation, keeper
from weighin.isolation.docker.attachment import Attachment, Standard
from weighin.isolation.docker.isolation import DockerIsolation
from weighin.isolation.docker.stream import STDERR, STDOUT
from weighin.units import MIB

CELL = Cell.of_command("serve", ("serve", "model"), "docker")


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        (b"0\n", Exit(0)),
        (b"3\n", Exit(3)),
        (b"127\n", Exit(127)),
        (b"137\n", Exit(137)),
        (b"Killed\n137\n", Exit(None, signal=9)),
        (b"Segmentation fault (core dumped)\n139\n", Exit(None, signal=11)),
        (b"sh: line 1: 7 Killed  ( echo >&8; read )\n137\n", Exit(None, signal=9)),
        (b"130\n", Exit(None, signal=2)),
        (b"141\n", Exit(None, signal=13)),
        (b"143\n", Exit(None, signal=15)),
        (b"", None),
        (b"Killed\n", None),
    ],
)
def test_an_exit_code_is_told_from_a_signal(said: bytes, ended: Exit | None) -> None:
    assert keeper.parse(said) == ended


GLIBC = """\
\tlinux-vdso.so.1 (0x00007f8eb1856000)
\tlibtinfo.so.6 => /lib/libtinfo.so.6 (0x00007f8eb1640000)
\tlibc.so.6 => /lib/libc-2.31.so (0x00007f8eb1640000)
\t/lib64/ld-linux.so.2 (0x00007f8eb1858000)
"""
MUSL = """\
\t/lib/ld-musl-x86_64.so.1 (0x7f5e)
\tlibc.musl-x86_64.so.1 => /lib/ld-musl-x86_64.so.1 (0x7f5e)
"""


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (GLIBC, ["ld-linux.so.2", "sh", "libtinfo.so.6", "libc.so.6"]),
        (MUSL, ["ld-musl-x86_64.so.1", "sh", "libc.musl-x86_64.so.1"]),
        ("\tnot a dynamic executable\n", ["sh"]),
    ],
)
def test_the_files_of_a_shell(listed: str, names: list[str]) -> None:
    assert list(keeper.parse_ldd(listed, Path("/bin/dash"))) == names


@pytest.fixture
def kept() -> Iterator[keeper.Keeper]:
    one = keeper.Keeper()
    yield one
    one.close()


def test_a_command_stands_after_the_entrypoint_of_its_image(
    kept: keeper.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("SECRET", "of this machine")
    cell = replace(CELL, environment={"MODE": "fast"})
    start, variables = command_start.settings({"Entrypoint": ["/entry", "-x"]}, cell, kept)
    assert start[-5:] == ["--", "/entry", "-x", "serve", "model"]
    assert variables == ["TERM=xterm", "MODE=fast"]


def test_a_library_that_an_image_preloads_is_for_the_command_only(
    kept: keeper.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    image = {"Entrypoint": None, "Env": ["PATH=/bin", "LD_PRELOAD=/usr/lib/libtcmalloc.so"]}
    start, variables = command_start.settings(image, CELL, kept)
    assert start[-4:] == ["LD_PRELOAD=/usr/lib/libtcmalloc.so", "--", "serve", "model"]
    assert variables == ["LD_PRELOAD"]  # without a value: removes it from those of the image


def test_a_container_sees_the_folder_and_further_paths_read_only(
    kept: keeper.Keeper, tmp_path: Path
) -> None:
    (folder := tmp_path / "work").mkdir()
    (tmp_path / "data").write_text("")
    (tmp_path / "link").symlink_to("data")
    data = str(tmp_path / "data")
    found = command_start.binds(str(folder), [data, f"{tmp_path}/link", data], kept)
    assert [(str(each.source), each.target, each.writable) for each in found[:3]] == [
        (data, data, False),
        (data, f"{tmp_path}/link", False),
        (str(folder), str(folder), True),
    ]
    assert {each.target for each in found[3:]} >= {"/weighin/keeper", "/weighin/shell/sh"}
    assert not any(each.writable for each in found[4:])


def test_paths_that_cannot_be_mounted(kept: keeper.Keeper, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the current folder / cannot be mounted"):
        command_start.binds("/", [], kept)
    with pytest.raises(ConfigError, match=f"--mount {tmp_path}/no: there is no such file"):
        command_start.binds(str(tmp_path), [f"{tmp_path}/no"], kept)


class Wires:
    """An attachment, the engine's end of its stream, and pipes in place of standard streams."""

    def __init__(self) -> None:
        self.engine, ours = socket.socketpair()
        self.engine.settimeout(10)
        stdin, self.keys = os.pipe()
        self.out, stdout = os.pipe()
        self.err, stderr = os.pipe()
        standard = Standard(Streams(stdin, stdout, stderr))
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.attachment = Attachment(ours, standard, resize=lambda _rows, _columns: None)
        self.signals: list[int] = []
        self.attachment.interrupted = self.signals.append
        self.attachment.begin()

    def say(self, *parts: tuple[int, bytes]) -> None:
        self.engine.sendall(b"".join(frame(*part) for part in parts))

    def end(self) -> tuple[bytes, bytes]:
        """Finish the attachment, and return what it wrote to standard output and error."""
        self.attachment.finish()
        self.attachment.close()
        self.attachment.close()
        self.engine.close()
        os.close(self.keys)
        return _rest(self.out), _rest(self.err)


def _rest(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


@pytest.mark.parametrize("cut", range(19))
def test_output_ends_at_the_mark_however_it_is_split(cut: int) -> None:
    wires = Wires()
    mark = wires.attachment.mark
    wires.say((STDERR, b"noise"), (STDOUT, b"one\n" + mark[:cut]), (STDOUT, mark[cut:]))
    wires.say((STDERR, mark))
    assert wires.end() == (b"one\n", b"noise")


def test_bytes_that_begin_like_the_mark_are_passed_on() -> None:
    wires = Wires()
    mark = wires.attachment.mark
    wires.say((STDOUT, b"odd" + mark[:1]), (STDOUT, mark[:4]), (STDOUT, mark[:2]))
    wires.engine.close()  # as if the keeper had been killed, before it wrote the mark
    assert wires.end() == (b"odd" + mark[:1] + mark[:4] + mark[:2], b"")


def test_input_is_passed_on_with_its_end() -> None:
    wires = Wires()
    os.write(wires.keys, b"typed\n")
    assert wires.engine.recv(100) == b"typed\n"
    os.dup2(os.open(os.devnull, os.O_RDONLY), wires.keys)  # the end of the pipe
    assert wires.engine.recv(100) == b""
    wires.engine.close()
    assert wires.end() == (b"", b"")


def test_output_that_nobody_reads_is_a_broken_pipe_for_the_command() -> None:
    wires = Wires()
    os.close(wires.out)
    wires.say((STDOUT, b"y\n"), (STDERR, b"still heard"))
    wires.say((STDOUT, wires.attachment.mark), (STDERR, wires.attachment.mark))
    wires.out = os.open(os.devnull, os.O_RDONLY)
    assert wires.end() == (b"", b"still heard")
    assert wires.signals == [signal.SIGPIPE]


class Engine(RefusingEngine):
    """An engine that makes a container; if it starts, its first process has this pid."""

    def __init__(self, reason: str = "", *, pid: int = 0, running: bool = True) -> None:
        super().__init__(reason)
        self._state = {"Pid": pid, "Running": running, "OOMKilled": False}

    def inspect_image(self, _: str) -> dict[str, Any]:
        return {"Config": {"Entrypoint": None, "Env": None}}

    def inspect_container(self, _: str) -> dict[str, Any]:
        return {"State": self._state}

    def start(self, container: str) -> None:
        if self._reason:
            super().start(container)


def started(
    engine: Engine, limit_bytes: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr(isolation, "connect", lambda: engine)
    monkeypatch.setattr(isolation, "find_image", lambda *_, **__: "sha256:x")
    cell = replace(CELL, ram_limit_bytes=limit_bytes)
    with Path(os.devnull).open("r+b") as nothing:
        streams = Streams(*[nothing.fileno()] * 3)
        return DockerIsolation(image="some:image").start_command(cell, str(folder), streams)


def test_a_command_whose_limit_kills_the_container_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(f"{RUNC} container init was OOM-killed (memory limit too low?): unknown")
    running = started(engine, 6 * MIB, tmp_path, monkeypatch)
    assert running.wait(0)
    assert running.reap() == Exit(None, signal=9, oom_killed=True)
    assert (running.cgroup, list(running.members())) == (None, [])
    assert (
        running.unseen
        == "the kernel killed the container at its RAM limit, before the command started"
    )
    running.close()
    assert len(engine.removed) == 1


@pytest.mark.parametrize(
    ("engine", "limit_bytes", "words"),
    [
        (
            Engine("Minimum memory limit allowed is 6MB"),
            4 * MIB,
            "the Docker engine refuses so small a RAM limit: Minimum memory limit allowed is 6MB\n"
            "give a larger --ram, or use --isolation cgroup",
        ),
        (
            Engine(pid=os.getpid()),  # a process, but none of the container
            None,
            "weighin needs a Docker engine on this machine: the processes of the current Docker"
            " engine are not visible here\nrun weighin on the engine's machine, unset DOCKER_HOST,"
            " or use --isolation cgroup or process",
        ),
        (
            Engine(running=False),
            None,
            "weighin's shell, which starts the command in the container, did not start in this image\n"
            "see whether the command starts without weighin: docker run IMAGE COMMAND; or name"
            " another image: --image IMAGE",
        ),
    ],
)
def test_a_container_that_does_not_start_is_an_error_and_leaves_nothing(
    engine: Engine,
    limit_bytes: int | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(IsolationUnavailable) as caught:
        started(engine, limit_bytes, tmp_path, monkeypatch)
    assert str(caught.value) == words
    assert len(engine.removed) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_image_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_docker_engine import NoImages

    monkeypatch.setattr(isolation, "connect", NoImages)
    with pytest.raises(HarnessError) as caught:
        DockerIsolation(image="some:image").prepare()
    assert str(caught.value) == (
        "the image some:image does not exist here and cannot be pulled from a registry: Get https://registry-1.docker.io/v2/: no such host\n"
        "choose an image that `docker images` lists: --image IMAGE; or leave --image out for"
        " weighin's own image"
    )
