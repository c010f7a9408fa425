"""``weighin run`` runs a command of any kind as it runs without weighin, and keeps a record of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leftovers
import on_terminals
import pytest
from again import KILLED_ELSEWHERE, tried_again
from nightly import nightly
from typed import ROOT, CommandLine, free_port

from weighin.program_phases import VARIABLE

KINDS = ROOT / "tests" / "commands" / "kinds"
OUT = "out"
REVERSE = "import sys; print(sys.stdin.read()[::-1]); print('seen', file=sys.stderr); sys.exit(3)"


@pytest.fixture(params=["process", pytest.param("cgroup", marks=pytest.mark.cgroup)])
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a user sees of a command. ``code`` is the shell's: 128 and the signal's number."""

    out: str
    err: str
    code: int


def plainly(command: CommandLine, *arguments: str, typed: str = "") -> Seen:
    """Run a command without weighin, and see that it leaves no cgroup."""
    process = subprocess.Popen(
        arguments,
        cwd=command.folder,
        env=command.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(typed, timeout=120)
    assert leftovers.groups(process.pid) == []
    code = process.returncode
    return Seen(out, err, code if code >= 0 else 128 - code)


def weighed(command: CommandLine, isolation: str, *arguments: str, typed: str = "") -> Seen:
    """Run a command with weighin; its own lines on standard error are left out."""
    found = plainly(command, *weighin(isolation), *arguments, typed=typed)
    own = "".join(
        line for line in found.err.splitlines(keepends=True) if not line.startswith("weighin: ")
    )
    return Seen(found.out, own, found.code)


def weighin(isolation: str, *options: str) -> tuple[str, ...]:
    run = (sys.executable, "-P", "-m", "weighin", "run", "--isolation", isolation, "--out", OUT)
    return (*run, "--no-stacks", *options, "--")


def record(command: CommandLine) -> dict[str, Any]:
    """Return the only record; no process may be left of the run."""
    (found,) = command.records(OUT)
    assert found["cell"]["operation"] == "command"
    assert found["ran"]["pid"] > 0
    assert leftovers.processes(str(command.cache)) == []
    return found


CODES = {
    "success": ("true",),
    "three": ("sh", "-c", "echo out; echo err >&2; exit 3"),
    "kill": ("sh", "-c", "kill -KILL $$"),
    "137": ("sh", "-c", "exit 137"),
    "hangup": ("sh", "-c", "kill -HUP $$"),
    "python": (sys.executable, "-c", REVERSE),
    "pipeline": ("sh", "-c", "yes | head -n 100000 | tr y z | wc -c; cat"),
    "broken pipe": ("bash", "-c", "set -o pipefail; yes | head -n 1"),
}


@tried_again(KILLED_ELSEWHERE)
@pytest.mark.parametrize("kind", CODES)
def test_a_command_has_its_own_output_input_and_exit_code(
    command: CommandLine, isolation: str, kind: str
) -> None:
    shutil.rmtree(command.folder / OUT, ignore_errors=True)  # of a try before
    arguments = CODES[kind]
    plain = plainly(command, *arguments, typed="typed\n")
    assert weighed(command, isolation, *arguments, typed="typed\n") == plain
    found = record(command)
    assert found["exit_code"] == plain.code
    assert found["outcome"] == ("command_failed" if plain.code else "ok")


def test_a_command_finds_around_it_what_it_finds_without_weighin(
    command: CommandLine, isolation: str
) -> None:
    arguments = (sys.executable, str(KINDS / "around.py"))
    plain = json.loads(plainly(command, *arguments).out)
    ours = json.loads(weighed(command, isolation, *arguments).out)
    assert Path(ours["environment"].pop(VARIABLE)).name == "phases"
    assert ("WEIGHIN_WORKER" in ours["environment"]) == (isolation == "process")
    ours["environment"].pop("WEIGHIN_WORKER", None)
    assert ours == plain
    record(command)


def test_variables_with_odd_names_and_values_arrive(command: CommandLine, isolation: str) -> None:
    odd = {"odd.name": "1", "lines": "a\nb", "empty": "", "bytes": os.fsdecode(b"\xff")}
    arguments = ("env", "-0")
    environment = command.environment | odd
    environment.pop("PWD", None)
    texts = [
        subprocess.run(
            line, cwd=command.folder, env=environment, capture_output=True, check=True
        ).stdout
        for line in (arguments, (*weighin(isolation), *arguments))
    ]
    plain, ours = (sorted(text.rstrip(b"\0").split(b"\0")) for text in texts)
    added = (VARIABLE.encode(), b"WEIGHIN_WORKER=")
    assert [each for each in ours if not each.startswith(added)] == plain


def test_a_run_of_pytest_is_as_without_weighin(command: CommandLine, isolation: str) -> None:
    flags = ("-q", "-p", "no:cacheprovider", "-c", os.devnull)
    arguments = (sys.executable, "-m", "pytest", *flags, str(KINDS / "tests_of_a_user.py"))
    plain, ours = plainly(command, *arguments), weighed(command, isolation, *arguments)
    timeless = [re.sub(r" in [\d.]+s", "", each.out) for each in (plain, ours)]
    assert (plain.code, ours.code) == (1, 1)
    assert timeless[0] == timeless[1]
    assert "1 failed, 1 passed" in timeless[1]
    assert record(command)["ran"]["needed_bytes"] > 0


@pytest.mark.cgroup
def test_a_script_that_uses_transformers_is_as_without_weighin(command: CommandLine) -> None:
    arguments = (sys.executable, "-W", "ignore", str(KINDS / "pretrained.py"), "model")
    plain, ours = plainly(command, *arguments), weighed(command, "cgroup", *arguments)
    assert plain.code == 0, plain.err
    assert (ours.out, ours.code) == (plain.out, plain.code)
    assert record(command)["outcome"] == "ok"


@pytest.mark.compiler
def test_a_native_program_is_as_without_weighin(
    command: CommandLine, isolation: str, programs: Path
) -> None:
    arguments = (str(programs / "child"), "64", "2000")
    assert (
        weighed(command, isolation, *arguments) == plainly(command, *arguments) == Seen("", "", 0)
    )
    commands = [each["command"] for each in record(command)["ran"]["processes"]]
    assert "child of 64 2000" in commands


@pytest.mark.parametrize(
    "isolation", [pytest.param("cgroup", marks=pytest.mark.cgroup), *nightly("process")]
)
def test_four_ranks_of_torchrun_are_as_without_weighin(
    command: CommandLine, isolation: str
) -> None:
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    arguments = ("env", "OMP_NUM_THREADS=1", sys.executable, *ranks, str(KINDS / "ranks.py"))
    ours = weighed(command, isolation, *arguments)
    assert (ours.out, ours.code) == ("4 ranks, sum 6.0\n", 0), ours.err
    found = record(command)
    assert found["outcome"] == "ok"
    ranked = [each for each in found["ran"]["processes"] if "ranks.py" in each["command"]]
    assert len(ranked) >= 4


def test_a_server_answers_and_sigterm_ends_it(command: CommandLine, isolation: str) -> None:
    port = free_port()
    process = subprocess.Popen(
        (*weighin(isolation), sys.executable, str(KINDS / "server.py"), str(port)),
        cwd=command.folder,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answer() -> str:
        with suppress(OSError), straight.open(f"http://127.0.0.1:{port}", timeout=5) as page:
            return str(page.read().decode())
        return ""

    leftovers.wait_until(lambda: answer() == "ready\n", "the server does not answer", 60)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("closed\n", 0), err
    assert record(command)["exit_code"] == 0


def test_a_daemon_of_a_script_is_ended_and_named(command: CommandLine, isolation: str) -> None:
    script = "setsid sleep 4321 </dev/null >/dev/null 2>&1 & echo started"
    start = time.monotonic()
    ours = weighed(command, isolation, "sh", "-c", script)
    assert (ours.out, ours.code) == ("started\n", 0)
    assert time.monotonic() - start < 30
    assert record(command)["ran"]["ended"] == ["sleep 4321"]


INTERACTIVE = (
    (">>> ", "import sys; sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty()\n"),
    (">>> ", "import os; os.getpgrp() == os.tcgetpgrp(0)\n"),
    (">>> ", "sys.exit(3)\n"),
)


def test_an_interactive_python_has_its_terminal(command: CommandLine, isolation: str) -> None:
    arguments = (sys.executable, "-q")
    variables = command.environment | {"PYTHONSTARTUP": ""}
    plain = on_terminals.converse(arguments, INTERACTIVE, command.folder, variables)
    ours = on_terminals.converse(
        (*weighin(isolation), *arguments), INTERACTIVE, command.folder, variables
    )
    assert "(True, True, True)" in plain.screen
    assert (plain.code, ours.code) == (3, 3)
    assert ours.screen.startswith(plain.screen)
    assert ours.screen.removeprefix(plain.screen).startswith("weighin: ")
    assert record(command)["exit_code"] == 3


CATCHING = """
import sys, time
try:
    print("waiting", flush=True)
    for _ in range(600):  # a signal just before a long sleep would be seen at its end
        time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(5)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((sys.executable, "-c", CATCHING), 5),
        (("sh", "-c", "echo waiting; exec sleep 60"), 130),
    ],
    ids=["caught", "not caught"],
)
def test_ctrl_c_reaches_the_command_and_leaves_a_record(
    command: CommandLine, isolation: str, arguments: tuple[str, ...], code: int
) -> None:
    session = on_terminals.converse(
        (*weighin(isolation), *arguments),
        [("waiting", "\x03")],
        command.folder,
        command.environment,
    )
    assert session.code == code, session.screen
    assert "Traceback" not in session.screen
    assert ("interrupted" in session.screen) == (code == 5)
    assert record(command)["exit_code"] == code


def test_a_command_that_does_not_exist_leaves_an_error_and_no_record(
    command: CommandLine, isolation: str
) -> None:
    ended = plainly(command, *weighin(isolation), "no-such-program", "--flag")
    assert ended.out == ""
    assert "there is no program 'no-such-program'" in ended.err
    assert "Traceback" not in ended.err
    assert ended.code == 2
    assert command.records(OUT) == []
