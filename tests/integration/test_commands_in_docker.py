"""``weighin run`` in containers: the command's streams and end, known amounts, and nothing left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import known_commands
import leftovers
import pytest
from commands import ROOT, CommandLine, Ended
from known_commands import Known

from weighin.cell import Cell
from weighin.isolation.base import Exit, Streams
from weighin.isolation.docker import keeper
from weighin.isolation.docker.engine import connect
from weighin.isolation.docker.image import BASE_VARIABLE, DEFAULT_BASE
from weighin.isolation.docker.isolation import DockerIsolation
from weighin.units import MIB

pytestmark = pytest.mark.docker

IMAGE: Final = os.environ.get(BASE_VARIABLE) or DEFAULT_BASE
SLACK_BYTES: Final = MIB
AMOUNT_BYTES: Final = 256 * MIB
_PATIENCE_S: Final = 60


def run(command: CommandLine, *words: str, options: tuple[str, ...] = (), **how: Any) -> Ended:
    """Run a command in the base image, whose sh and python3 are enough for the tests."""
    return command.run("run", "--image", IMAGE, "--out", "out", *options, "--", *words, **how)


def record(command: CommandLine) -> dict[str, Any]:
    (one,) = command.records("out")
    return one


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (("echo", "hello"), 0, "hello\n", ""),
        (("sh", "-c", "echo to err >&2; printf part; exit 3"), 3, "part", "to err\n"),
        (("sh", "-c", "kill -TERM $$"), 143, "", ""),
        (("sh", "-c", "exit 137"), 137, "", ""),
        (("no-such-program",), 127, "", "no-such-program"),
    ],
)
def test_output_and_exit_code_are_those_of_the_command(
    words: tuple[str, ...], code: int, out: str, err: str, command: CommandLine
) -> None:
    ended = run(command, *words)
    assert (ended.code, ended.out, ended.left) == (code, out, [])
    assert err in ended.err
    found = record(command)
    assert found["outcome"] == ("ok" if code == 0 else "command_failed")
    assert found["ran"]["signal"] == (15 if code == 143 else None)  # 137 was an exit, not a kill


@pytest.mark.parametrize("shell", ["/bin/dash", "/bin/bash"])
@pytest.mark.parametrize(
    ("line", "ended"),
    [
        ("exit 3", Exit(3)),
        ("exit 137", Exit(137)),
        ("kill -KILL $$", Exit(None, signal=9)),
        ("kill -SEGV $$", Exit(None, signal=11)),
        ("kill -PIPE $$", Exit(None, signal=13)),
    ],
)
def test_every_shell_of_this_machine_tells_an_exit_code_from_a_signal(
    line: str, ended: Exit, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "SHELL", Path(shell))
    isolation = DockerIsolation(image=IMAGE)
    cell = Cell.of_command("x", ("sh", "-c", line), "docker")
    with Path(os.devnull).open("r+b") as nothing:
        running = isolation.start_command(cell, str(tmp_path), Streams(*[nothing.fileno()] * 3))
    try:
        assert running.wait(_PATIENCE_S)
        assert running.reap() == ended
    finally:
        running.close()


def test_input_is_piped_through_to_its_end(command: CommandLine) -> None:
    script = """head -c 3000000 /dev/zero | exec "$@" """
    ended = run(command, "wc", "-c", before=("sh", "-c", script, "sh"))
    assert (ended.code, ended.out, ended.left) == (0, "3000000\n", [])


def test_output_that_nobody_reads_ends_the_command(command: CommandLine) -> None:
    script = """trap '' PIPE; "$@" | head -n 1"""
    ended = run(command, "yes", before=("bash", "-c", script, "sh"))
    assert (ended.out, ended.left) == ("y\n", [])
    assert record(command)["ran"]["signal"] == signal.SIGPIPE


def test_a_command_sees_its_folder_and_few_variables(command: CommandLine) -> None:
    (command.folder / "given").write_text("read me\n")
    (outside := command.folder.parent / "outside").write_text("and me\n")
    script = f"cat given {outside}; echo new > made; touch {outside}; env | cut -d= -f1 | sort"
    options = ("--mount", str(outside), "--env", "MODE=fast")
    ended = run(command, "sh", "-c", script, options=options)
    outside.unlink()
    given, *names = ended.out.split("and me\n")
    assert (given, (command.folder / "made").read_text()) == ("read me\n", "new\n")
    assert "Read-only file system" in ended.err
    allowed = {"HOME", "HOSTNAME", "MODE", "PATH", "PWD", "TERM", "WEIGHIN_PHASES"}
    of_image = {line.split("=")[0] for line in _config()["Env"] or []}
    assert set("".join(names).split()) <= allowed | of_image
    assert "MODE" in names[0]
    assert (command.folder / "made").stat().st_uid == os.getuid()


def _config() -> dict[str, Any]:
    return dict(connect().inspect_image(IMAGE)["Config"])  # type: ignore[no-untyped-call]


def test_a_command_above_its_limit_is_killed_and_named(command: CommandLine) -> None:
    code = f"x = bytearray({AMOUNT_BYTES})"
    ended = run(command, "python3", "-c", code, options=("--ram", "64m"))
    assert (ended.code, ended.out, ended.left) == (137, "", [])
    found = record(command)
    assert found["outcome"] == "oom_killed"
    assert found["oom_kills"] == 1
    assert 63 * MIB < found["peaks"]["cgroup_bytes"] <= 64 * MIB


def test_a_child_that_is_killed_makes_the_command_oom_killed(command: CommandLine) -> None:
    line = f"python3 -c 'x = bytearray({AMOUNT_BYTES})'; echo went on"
    ended = run(command, "sh", "-c", line, options=("--ram", "64m"))
    assert (ended.code, ended.out, ended.left) == (1, "went on\n", [])
    found = record(command)
    assert (found["outcome"], found["ran"]["survived"]) == ("oom_killed", True)


def test_the_peak_of_a_known_amount(command: CommandLine) -> None:
    def peak(amount_bytes: int, out: str) -> int:
        code = f"import time; x = bytearray({amount_bytes}); time.sleep(1)"
        words = ("--image", IMAGE, "--out", out, "--no-stacks", "--", "python3", "-c", code)
        assert command.run("run", *words).code == 0
        (found,) = command.records(out)
        needed_bytes, peaks = int(found["ran"]["needed_bytes"]), found["peaks"]
        # Python's own files are charged to the command, too, if they were not cached before.
        above_bytes = peaks["cgroup_bytes"] - needed_bytes
        assert -2 * MIB < above_bytes < peaks["file_sampled_bytes"] + 2 * MIB
        # The command alone: neither the keeper nor the child before it is in the table.
        assert [each["command"].split()[0] for each in found["ran"]["processes"]] == ["python3"]
        return needed_bytes

    taken = peak(AMOUNT_BYTES, "with") - peak(0, "without")
    assert taken == pytest.approx(AMOUNT_BYTES, abs=AMOUNT_BYTES // 100 + SLACK_BYTES)


def test_a_command_that_is_late_is_killed(command: CommandLine) -> None:
    ended = run(command, "sh", "-c", "sleep 1000 & wait", options=("--timeout", "0.5"))
    assert (ended.code, ended.left) == (137, []), ended.err
    assert record(command)["outcome"] == "timeout"


def test_processes_that_a_command_leaves_are_ended_and_named(command: CommandLine) -> None:
    ended = run(command, "sh", "-c", "sleep 1000 & echo begun")
    assert (ended.code, ended.out, ended.left) == (0, "begun\n", [])
    assert record(command)["ran"]["ended"] == ["sleep 1000"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command(number: signal.Signals, command: CommandLine) -> None:
    code = (
        "import signal, sys, time\n"
        "for each in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(each, lambda number, _: sys.exit(number))\n"
        "open('ready', 'w').close()\n"
        "time.sleep(1000)"
    )
    words = ("run", "--image", IMAGE, "--out", "out", "--", "python3", "-c", code)
    started = command.start(*words)
    ready = command.folder / "ready"
    leftovers.wait_until(ready.exists, "the command did not begin", _PATIENCE_S)
    ended = started.end(number)
    assert (ended.code, ended.left) == (number, [])


def test_a_run_that_is_killed_leaves_a_container_that_the_next_run_removes(
    command: CommandLine,
) -> None:
    started = command.start("run", "--image", IMAGE, "--", "sh", "-c", "touch ready; sleep 1000")
    ready = command.folder / "ready"
    leftovers.wait_until(ready.exists, "the command did not begin", _PATIENCE_S)
    started.process.kill()
    started.process.communicate()
    # The command ends with the pipe of its parent, and its container is no longer in use.
    leftovers.wait_until(lambda: not _running(started.process.pid), "it runs", _PATIENCE_S)
    assert len(leftovers.containers(started.process.pid)) == 1
    assert run(command, "true").code == 0
    assert leftovers.containers(started.process.pid) == []


def _running(owner: int) -> list[dict[str, Any]]:
    every = connect().containers(filters={"label": "weighin.owner"})
    return [one for one in every if one["Labels"]["weighin.owner"].startswith(f"{owner}-")]


@pytest.fixture(scope="module")
def bare_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with one static file, which is its entrypoint, and without a shell."""
    folder = tmp_path_factory.mktemp("image")
    source = ROOT / "tests" / "commands" / "programs" / "spend.c"
    compiler = ("gcc", "-std=gnu11", "-O2", "-static", "-o", str(folder / "spend"), str(source))
    subprocess.run(compiler, check=True)
    lines = ("FROM scratch", "COPY spend /spend", 'ENTRYPOINT ["/spend"]')
    (folder / "Dockerfile").write_text("\n".join((*lines, "ENV PATH=/ LD_PRELOAD=/none.so\n")))
    client, tag = connect(), f"weighin-test-bare:{os.getpid()}"
    for event in client.build(path=str(folder), tag=tag, rm=True, decode=True):
        assert "error" not in event, event
    yield tag
    client.remove_image(tag)
    client.close()


@pytest.mark.compiler
@pytest.mark.parametrize("ms", [1, 20, 200])
def test_an_image_without_a_shell(ms: int, bare_image: str, command: CommandLine) -> None:
    words = ("run", "--image", bare_image, "--out", "out", "--", "256", str(ms))
    ended = command.run(*words)
    assert (ended.code, ended.left) == (0, []), ended.err
    known = 320 * MIB  # as spend.c says
    found = record(command)
    for figure in (found["peaks"]["cgroup_bytes"], found["ran"]["needed_bytes"]):
        assert figure == pytest.approx(known, abs=known // 100 + SLACK_BYTES)


@pytest.mark.compiler
def test_an_image_without_a_shell_under_a_limit(bare_image: str, command: CommandLine) -> None:
    words = ("run", "--image", bare_image, "--ram", "100m", "--out", "out", "--", "256", "20")
    ended = command.run(*words)
    assert (ended.code, ended.left) == (137, [])
    assert record(command)["outcome"] == "oom_killed"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return known_commands.build(tmp_path_factory.mktemp("programs"))


@pytest.mark.compiler
@pytest.mark.parametrize("known", known_commands.KNOWN, ids=lambda known: known.id)
def test_known_amounts(known: Known, programs: Path, command: CommandLine) -> None:
    """The peak has page cache too: that of a file that was read nowhere before."""
    (file := command.folder / "file").write_bytes(bytes(known_commands.FILE_BYTES))
    options = ("--mount", str(programs), "--no-stacks", "--cold", str(file))
    os.sync()
    ended = run(command, *known.command(programs, file), options=options)
    assert (ended.code, ended.left) == (0, []), ended.err
    found = record(command)
    peak_bytes = known.needed_bytes + known.file_bytes
    expected = {"cgroup_bytes": peak_bytes, "needed_bytes": known.needed_bytes}
    measured = {
        "cgroup_bytes": found["peaks"]["cgroup_bytes"],
        "needed_bytes": found["ran"]["needed_bytes"],
    }
    assert measured == {
        name: pytest.approx(bytes_, abs=bytes_ // 100 + SLACK_BYTES)
        for name, bytes_ in expected.items()
    }


def test_phases_of_a_program_in_a_container(command: CommandLine) -> None:
    code = (
        "import time, weighin\n"
        "with weighin.phase('read'):\n"
        f"    x = bytearray({AMOUNT_BYTES}); time.sleep(0.05)\n"
        "del x\n"
        "with weighin.phase('rest'): time.sleep(0.05)"
    )
    harness = str(ROOT / "harness")
    options = ("--mount", harness, "--env", f"PYTHONPATH={harness}")
    ended = run(command, "python3", "-c", code, options=options)
    assert (ended.code, ended.left) == (0, []), ended.err
    phases = {each["name"]: each for each in record(command)["phases"]}
    assert list(phases) == ["read", "rest"]


class Terminal:
    """``weighin run`` on a pseudo-terminal, as a user types it."""

    def __init__(self, command: CommandLine, *words: str) -> None:
        self.folder, self.shown = command.folder, b""
        arguments = (sys.executable, "-P", "-m", "weighin", *words)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "harness"), "TERM": "dumb"}
        self.parent, self.side = pty.openpty()
        self.resize(33, 101)
        self.before = termios.tcgetattr(self.side)
        self.process = subprocess.Popen(
            ("setsid", "--ctty", "--wait", *arguments),
            cwd=command.folder,
            env=environment,
            stdin=self.side,
            stdout=self.side,
            stderr=self.side,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, text: bytes) -> None:
        """Read until ``text`` was shown, and forget what was shown up to its end."""
        deadline = time.monotonic() + _PATIENCE_S
        os.set_blocking(self.parent, False)
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            try:
                self.shown += os.read(self.parent, 4096)
            except BlockingIOError:
                time.sleep(0.01)
        self.shown = self.shown.partition(text)[2]

    def type(self, text: bytes) -> None:
        os.write(self.parent, text)

    def end(self) -> int:
        code = self.process.wait(_PATIENCE_S)
        assert termios.tcgetattr(self.side) == self.before  # no longer raw
        os.close(self.parent)
        os.close(self.side)
        return code


def test_an_interactive_program_on_a_terminal(command: CommandLine) -> None:
    """Python's prompt edits lines, Ctrl-C reaches it and not weighin, and the size is right."""
    terminal = Terminal(command, "run", "--image", IMAGE, "--", "python3", "-q")
    terminal.wait_for(b">>> ")
    terminal.type(b"import os, time; tuple(os.get_terminal_size())\n")
    terminal.wait_for(b"(101, 33)")
    terminal.resize(20, 77)
    wait = b"while os.get_terminal_size() != (77, 20): time.sleep(0.1)\n\n"
    terminal.type(wait + b"'it ' + 'has the size'\n")
    terminal.wait_for(b"'it has the size'")
    terminal.type(b"time.sleep(1000)\n")
    terminal.wait_for(b"sleep(1000)")
    time.sleep(0.5)
    terminal.type(b"\x03")
    terminal.wait_for(b"KeyboardInterrupt")
    terminal.type(b"exit(4)\n")
    assert terminal.end() == 4


def test_ctrl_c_ends_a_program_on_a_terminal(command: CommandLine) -> None:
    # A dash that is about to start a child forgets a Ctrl-C, hence "exec".
    line = "echo be''gun; exec sleep 1000"
    terminal = Terminal(command, "run", "--image", IMAGE, "--out", "out", "--", "sh", "-c", line)
    terminal.wait_for(b"begun")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert json.loads((command.folder / "out" / "records.jsonl").read_text())["ran"]["signal"] == 2


def test_an_image_and_a_cgroup_contradict_each_other(command: CommandLine) -> None:
    ended = command.run("run", "--isolation", "cgroup", "--image", IMAGE, "--", "true")
    assert ended.code == 2
    assert (
        f"--image {IMAGE} needs --isolation docker, but the command line has --isolation cgroup"
        in ended.err
    )


def test_the_image_of_weighin_has_torch(command: CommandLine, tmp_path: Path) -> None:
    code = "import torch; print(torch.ones(3).sum().item())"
    ended = command.run("run", "--isolation", "docker", "--", "python", "-c", code)
    assert (ended.code, ended.out, ended.left) == (0, "3.0\n", []), ended.err


def test_a_container_that_another_program_kills_is_told_from_a_lack_of_memory(
    command: CommandLine,
) -> None:
    line = "touch ready; sleep 1000"
    started = command.start("run", "--image", IMAGE, "--out", "out", "--", "sh", "-c", line)
    ready = command.folder / "ready"
    leftovers.wait_until(ready.exists, "the command did not begin", _PATIENCE_S)
    (container,) = _running(started.process.pid)
    connect().kill(container["Id"])
    ended = started.end()
    assert (ended.code, ended.left) == (137, [])
    found = record(command)
    assert (found["outcome"], found["ran"]["signal"]) == ("command_failed", signal.SIGKILL)
    lost = "the container was killed with its command, so the last counters are lost"
    assert lost in found["warnings"]


def test_the_floor_of_a_command_in_a_container(command: CommandLine) -> None:
    code = f"x = bytearray({100 * MIB})"
    words = ("floor", "--image", IMAGE, "--out", "out", "--json", "-", "--", "python3", "-c", code)
    ended = command.run(*words)
    assert (ended.code, ended.left) == (0, []), ended.err
    (floor,) = json.loads(ended.out)["floors"]
    assert 100 * MIB < floor["floor_bytes"] < 116 * MIB
