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

import images
import known_commands
import leftovers
import pytest
from known_commands import Known
from typed import ROOT, CommandLine, Ended

from weighin.cell import Cell
from weighin.isolation.base import Exit, Streams
from weighin.isolation.docker import DockerIsolation, connect
from weighin.units import MIB

pytestmark = pytest.mark.docker

IN_DOCKER: Final = ("run", "--isolation", "docker", "--out", "out")
SLACK_BYTES: Final = MIB
AMOUNT_BYTES: Final = 256 * MIB
_PATIENCE_S: Final = 60


def run(command: CommandLine, *words: str, options: tuple[str, ...] = (), **how: Any) -> Ended:
    """Run a command in a container that sees this machine's programs."""
    return command.run(*IN_DOCKER, *options, "--", *words, **how)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image with a shell, few programs and a variable."""
    name = f"weighin-test-tools:{os.getpid()}"
    images.make(name, ("sh", "cat", "cut", "env", "sort", "touch"), ENV="OF_IMAGE=1")
    yield name
    images.remove(name)


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
def test_an_exit_code_is_told_from_a_signal(line: str, ended: Exit, tmp_path: Path) -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15):
        pytest.skip("this kernel does not tell SIGKILL from the exit code 137 of another's child")
    cell = Cell.of_command("x", ("sh", "-c", line), "docker")
    with Path(os.devnull).open("r+b") as nothing:
        streams = Streams(*[nothing.fileno()] * 3)
        running = DockerIsolation().start(cell, cell.command, str(tmp_path), streams)
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


@pytest.mark.parametrize("in_image", [False, True])
def test_a_command_sees_its_folder_and_few_variables(
    in_image: bool, image: str, command: CommandLine
) -> None:
    (command.folder / "given").write_text("read me\n")
    (outside := command.folder.parent / "outside").write_text("and me\n")
    script = f"cat given {outside}; echo new > made; touch {outside}; env | cut -d= -f1 | sort"
    of_image = ("--image", image) if in_image else ()
    options = ("--set", f"mounts={outside}", "--env", "MODE=fast", *of_image)
    ended = run(command, "sh", "-c", script, options=options)
    outside.unlink()
    given, *names = ended.out.split("and me\n")
    assert (given, (command.folder / "made").read_text()) == ("read me\n", "new\n")
    assert "Read-only file system" in ended.err
    allowed = {"HOME", "HOSTNAME", "MODE", "PATH", "PWD", "TERM", "WEIGHIN_PHASES"}
    found = set("".join(names).split())
    assert found <= allowed | {"OF_IMAGE"}
    assert "MODE" in found
    assert ("OF_IMAGE" in found) == in_image
    assert (command.folder / "made").stat().st_uid == os.getuid()


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
        words = ("--isolation", "docker", "--no-stacks", "--", "python3", "-c", code)
        assert command.run("run", "--out", out, *words).code == 0
        (found,) = command.records(out)
        needed_bytes, peaks = int(found["ran"]["needed_bytes"]), found["peaks"]
        # Python's own files are charged to the command, too, if they were not cached before.
        above_bytes = peaks["cgroup_bytes"] - needed_bytes
        assert -2 * MIB < above_bytes < peaks["file_sampled_bytes"] + 2 * MIB
        # The command alone: neither the first process nor the shell before it is in the table.
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
    started = command.start(*IN_DOCKER, "--", "python3", "-c", code)
    ready = command.folder / "ready"
    leftovers.wait_until(ready.exists, "the command did not begin", _PATIENCE_S)
    ended = started.end(number)
    assert (ended.code, ended.left) == (number, [])


@pytest.mark.parametrize("out", ["first", "second"])
def test_a_run_that_is_killed_leaves_nothing(out: str, command: CommandLine) -> None:
    """The container ends with the standard input of its first process, and the engine removes it."""
    words = ("--isolation", "docker", "--out", out, "--", "sh", "-c", "touch ready; sleep 1000")
    started = command.start("run", *words)
    ready = command.folder / "ready"
    leftovers.wait_until(ready.exists, "the command did not begin", _PATIENCE_S)
    started.process.kill()
    started.process.communicate()
    pid = started.process.pid
    leftovers.wait_until(lambda: leftovers.containers(pid) == [], "it is there", _PATIENCE_S)


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
    options = ("--set", f"mounts={programs}", "--no-stacks", "--cold", str(file))
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
    options = ("--set", f"mounts={harness}", "--env", f"PYTHONPATH={harness}")
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
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
        self.before = termios.tcgetattr(self.side)
        self.process = subprocess.Popen(
            ("setsid", "--ctty", "--wait", *arguments),
            cwd=command.folder,
            env=environment,
            stdin=self.side,
            stdout=self.side,
            stderr=self.side,
        )

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
    terminal = Terminal(command, *IN_DOCKER, "--", "python3", "-q")
    terminal.wait_for(b">>> ")
    terminal.type(b"import os, time; tuple(os.get_terminal_size())\n")
    terminal.wait_for(b"(101, 33)")
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
    terminal = Terminal(command, *IN_DOCKER, "--", "sh", "-c", line)
    terminal.wait_for(b"begun")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert json.loads((command.folder / "out" / "records.jsonl").read_text())["ran"]["signal"] == 2


def test_an_image_and_a_cgroup_contradict_each_other(command: CommandLine) -> None:
    ended = command.run("run", "--isolation", "cgroup", "--image", "debian", "--", "true")
    assert ended.code == 2
    assert "--image needs --isolation docker" in ended.err


def test_a_command_finds_the_torch_of_this_environment(command: CommandLine) -> None:
    code = "import torch; print(torch.ones(3).sum().item())"
    ended = run(command, sys.executable, "-c", code)
    assert (ended.code, ended.out, ended.left) == (0, "3.0\n", []), ended.err


def test_a_container_that_another_program_kills_is_told_from_a_lack_of_memory(
    command: CommandLine,
) -> None:
    line = "touch ready; sleep 1000"
    started = command.start(*IN_DOCKER, "--", "sh", "-c", line)
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
    words = ("--isolation", "docker", "--out", "out", "--json", "-", "--", "python3", "-c", code)
    ended = command.run("floor", *words)
    assert (ended.code, ended.left) == (0, []), ended.err
    (floor,) = json.loads(ended.out)["floors"]
    assert 100 * MIB < floor["floor_bytes"] < 116 * MIB
