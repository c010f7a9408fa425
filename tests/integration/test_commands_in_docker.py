"""``weighin run`` in containers: the command's streams and end, and nothing left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import images
import known_commands
import leftovers
import pytest
from known_commands import within
from on_terminals import talk
from typed import ROOT, CommandLine, Ended, Started, words

from weighin.isolation.docker import connect
from weighin.units import MIB

pytestmark = pytest.mark.docker

IN_DOCKER: Final = "run --isolation docker --out out"


def run(command: CommandLine, *program: str, options: str = "", **how: Any) -> Ended:
    """Run a command in a container that sees this machine's programs."""
    return command.run(f"{IN_DOCKER} {options} --", *program, **how)


def begun(command: CommandLine, *program: str) -> Started:
    """Start a command that makes a file ``ready``, and return when it is there."""
    started = command.start(f"{IN_DOCKER} --", *program)
    leftovers.wait_until((command.folder / "ready").exists, "the command did not begin")
    return started


TELLS_137 = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
"""Older kernels do not tell SIGKILL from the exit code 137 of another's child."""
ENDS = [
    ("echo hello", 0, None, "hello\n", ""),
    ("echo to err >&2; printf part; exit 3", 3, None, "part", "to err\n"),
    ("kill -TERM $$", 143, 15, "", ""),
    ("exit 137", 137, None, "", ""),
    ("kill -KILL $$", 137, 9, "", ""),
    ("kill -SEGV $$", 139, 11, "", ""),
    ("no-such-program", 127, None, "", "no-such-program"),
    (f"{sys.executable} -c 'import torch; print(torch.ones(3).sum().item())'", 0, None, "3.0\n", ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "killed", "out", "err"), ENDS)
def test_output_and_exit_code_are_those_of_the_command(
    line: str, code: int, killed: int | None, out: str, err: str, command: CommandLine
) -> None:
    ended = run(command, *(("sh", "-c", line) if " " in line else (line,)))
    assert (ended.code, ended.out, ended.left) == (code, out, [])
    assert err in ended.err
    found = command.record("out")
    assert found["outcome"] == ("ok" if code == 0 else "command_failed")
    assert found["ran"]["signal"] == killed or (code == 137 and not TELLS_137)


def test_input_is_piped_through_to_its_end(command: CommandLine) -> None:
    script = """head -c 3000000 /dev/zero | exec "$@" """
    ended = run(command, "wc", "-c", before=("sh", "-c", script, "sh"))
    assert (ended.code, ended.out, ended.left) == (0, "3000000\n", [])


def test_output_that_nobody_reads_ends_the_command(command: CommandLine) -> None:
    script = """trap '' PIPE; "$@" | head -n 1"""
    ended = run(command, "yes", before=("bash", "-c", script, "sh"))
    assert (ended.out, ended.left) == ("y\n", [])
    assert command.record("out")["ran"]["signal"] == signal.SIGPIPE


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image with a shell, few programs and a variable."""
    name = f"weighin-test-tools:{os.getpid()}"
    images.make(name, ("sh", "cat", "cut", "env", "sort", "touch"), ENV="OF_IMAGE=1")
    yield name
    images.remove(name)


@pytest.mark.parametrize("in_image", [False, True])
def test_a_command_sees_its_folder_and_few_variables(
    in_image: bool, image: str, command: CommandLine, tmp_path: Path
) -> None:
    (command.folder / "given").write_text("read me\n")
    (outside := tmp_path / "outside").write_text("and me\n")
    script = f"cat given {outside}; echo new > made; touch {outside}; env | cut -d= -f1 | sort"
    of_image = f"--image {image}" if in_image else ""
    options = f"--set mounts={outside} --env MODE=fast {of_image}"
    ended = run(command, "sh", "-c", script, options=options)
    given, names = ended.out.split("and me\n")
    assert (given, (command.folder / "made").read_text()) == ("read me\n", "new\n")
    assert "Read-only file system" in ended.err
    allowed = {"HOME", "HOSTNAME", "MODE", "PATH", "PWD", "TERM", "WEIGHIN_PHASES", "OF_IMAGE"}
    assert set(names.split()) <= allowed
    assert "MODE" in names.split()
    assert ("OF_IMAGE" in names.split()) == in_image
    assert (command.folder / "made").stat().st_uid == os.getuid()


TAKES = f'python3 -c "x = bytearray({256 * MIB})"'
STOPPED = {
    "above its limit": ("--ram 64m", f"exec {TAKES}", 137, "", "oom_killed", []),
    "a child above it": ("--ram 64m", f"{TAKES}; echo went on", 1, "went on\n", "oom_killed", []),
    "late": ("--timeout 0.5", "sleep 1000 & wait", 137, "", "timeout", None),
    "leaves a process": ("", "sleep 1000 & echo begun", 0, "begun\n", "ok", ["sleep 1000"]),
}


@pytest.mark.parametrize("name", STOPPED)
def test_what_is_killed_or_left_is_named(name: str, command: CommandLine) -> None:
    options, line, code, out, outcome, left = STOPPED[name]
    ended = run(command, "sh", "-c", line, options=options)
    assert (ended.code, ended.out, ended.left) == (code, out, []), ended.err
    found = command.record("out")
    assert found["outcome"] == outcome
    assert found["ran"]["ended"] == left or left is None
    if outcome == "oom_killed":
        assert (found["oom_kills"], found["ran"]["survived"]) == (1, code == 1)
        assert 63 * MIB < found["peaks"]["cgroup_bytes"] <= 64 * MIB


CATCHING = """
import signal, sys, time
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda number, _: sys.exit(number))
open("ready", "w").close()
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command(number: signal.Signals, command: CommandLine) -> None:
    ended = begun(command, "python3", "-c", CATCHING).end(number)
    assert (ended.code, ended.left) == (number, [])


SLEEPING = ("sh", "-c", "touch ready; sleep 1000")


def test_a_run_that_is_killed_leaves_nothing(command: CommandLine) -> None:
    """The container ends with the standard input of its first process, and the engine removes it."""
    process = begun(command, *SLEEPING).process
    process.kill()
    leftovers.wait_until(lambda: leftovers.containers(process.pid) == [], "it is there")


def test_a_container_that_another_program_kills_is_told_from_a_lack_of_memory(
    command: CommandLine,
) -> None:
    started = begun(command, *SLEEPING)
    (container,) = leftovers.containers(started.process.pid)
    subprocess.run(("docker", "kill", container), check=True, capture_output=True)
    ended = started.end()
    assert (ended.code, ended.left) == (137, [])
    found = command.record("out")
    assert (found["outcome"], found["ran"]["signal"]) == ("command_failed", signal.SIGKILL)
    lost = "the container was killed with its command, so the last counters are lost"
    assert lost in found["warnings"]


@pytest.fixture(scope="module")
def bare_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with one static file, which is its entrypoint, and without a shell."""
    folder = tmp_path_factory.mktemp("image")
    source = known_commands.PROGRAMS / "spend.c"
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
def test_an_image_without_a_shell(bare_image: str, command: CommandLine) -> None:
    ended = command.run(f"run --image {bare_image} --out out -- 256 1")
    assert (ended.code, ended.left) == (0, []), ended.err
    found = command.record("out")
    for figure in (found["peaks"]["cgroup_bytes"], found["ran"]["needed_bytes"]):
        assert within(figure, 320 * MIB)  # as spend.c says
    # The command alone: the first process of the container is not in the table.
    assert len(found["ran"]["processes"]) == 1
    ended = command.run(f"run --image {bare_image} --ram 100m --out limited -- 256 20")
    assert (ended.code, ended.left) == (137, [])
    assert command.record("limited")["outcome"] == "oom_killed"


def test_phases_of_a_program_in_a_container(command: CommandLine) -> None:
    code = "import weighin\nwith weighin.phase('read'): pass\nwith weighin.phase('rest'): pass"
    harness = ROOT / "harness"
    options = f"--set mounts={harness} --env PYTHONPATH={harness}"
    ended = run(command, "python3", "-c", code, options=options)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert [each["name"] for each in command.record("out")["phases"]] == ["read", "rest"]


def test_an_interactive_program_on_a_terminal(command: CommandLine) -> None:
    """Python's prompt edits lines, Ctrl-C reaches it and not weighin, and the size is right."""
    typed = [
        (">>> ", "import os, time; tuple(os.get_terminal_size())\n"),
        # A signal just before a long sleep would be seen at its end.
        ("(101, 33)", "print('it ' + 'waits'); [time.sleep(0.1) for _ in iter(int, 1)]\n"),
        ("it waits", "\x03"),
        ("KeyboardInterrupt", "exit(4)\n"),
    ]
    session = talk(command, *words(f"{IN_DOCKER} -- python3 -q"), typed=typed, size=(33, 101))
    assert (session.code, session.restored) == (4, True), session.screen


def test_ctrl_c_ends_a_program_on_a_terminal(command: CommandLine) -> None:
    # A dash that is about to start a child forgets a Ctrl-C, hence "exec".
    line = words(f"{IN_DOCKER} -- sh -c", "echo be''gun; exec sleep 1000")
    session = talk(command, *line, typed=[("begun", "\x03")])
    assert (session.code, session.restored) == (130, True), session.screen
    assert command.record("out")["ran"]["signal"] == signal.SIGINT


def test_the_floor_of_a_command_in_a_container(command: CommandLine) -> None:
    code = f"x = bytearray({100 * MIB})"
    line = "floor --isolation docker --out out --json - -- python3 -c"
    ended = command.run(line, code)
    assert (ended.code, ended.left) == (0, []), ended.err
    (floor,) = json.loads(ended.out)["floors"]
    assert 100 * MIB < floor["floor_bytes"] < 116 * MIB
