"""``weighin run`` runs a command of any kind as it runs without weighin, and keeps a record of it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import leftovers
import pytest
from again import KILLED_ELSEWHERE, tried_again
from on_terminals import talk
from typed import ROOT, CommandLine, Started, words

from weighin.program_phases import VARIABLE

KINDS = ROOT / "tests" / "commands" / "kinds"
OUT = "out"
PYTHON = sys.executable
REVERSE = "import sys; print(sys.stdin.read()[::-1]); print('seen', file=sys.stderr); sys.exit(3)"
BYTES = """
import os, sys
print("terminals:", *(os.isatty(number) for number in range(3)), flush=True)
for step in range(5):
    print(f"\\rstep {step}", end="", file=sys.stderr, flush=True)
print(file=sys.stderr, flush=True)
sys.stdout.buffer.write(bytes(range(256)) * 4)
"""
STEPS = r"^step \d"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)


@pytest.fixture(params=["process", pytest.param("cgroup", marks=pytest.mark.cgroup)])
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a user sees of a command. ``code`` is the shell's: 128 and the signal's number."""

    out: str
    err: str
    code: int


def plainly(command: CommandLine, *arguments: str, given: str = "") -> Seen:
    """Run a command without weighin, and see that it leaves no cgroup. Times of pytest are masked."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    how = pipes | {"cwd": command.folder, "env": command.environment}
    process = subprocess.Popen(arguments, **how)
    both = process.communicate(given.encode(), timeout=120)
    out, err = (re.sub(r" in [\d.]+s", "", text.decode("latin-1")) for text in both)
    assert leftovers.groups(process.pid) == []
    code = process.returncode
    return Seen(out, err, code if code >= 0 else 128 - code)


def weighed(
    command: CommandLine,
    isolation: str,
    *arguments: str,
    before: tuple[str, ...] = (),
    given: str = "",
    mark: str = "",
) -> Seen:
    """Run a command with weighin; its own lines on standard error are left out."""
    found = plainly(command, *before, *weighin(isolation, mark), *arguments, given=given)
    lines = found.err.splitlines(keepends=True)
    own = "".join(line for line in lines if not line.startswith("weighin: "))
    said = [line for line in lines if line.startswith("weighin: ")]
    assert said[0].startswith("weighin: The command ended well.") == (found.code == 0)
    assert said[-1] == f"weighin: weighin report {OUT}\n"
    return Seen(found.out, own, found.code)


def weighin(isolation: str, mark: str = "") -> tuple[str, ...]:
    marks = f"--mark {shlex.quote(mark)} " if mark else ""
    return words(f"run --isolation {isolation} --out {OUT} --no-stacks {marks}--")


def record(command: CommandLine) -> dict[str, Any]:
    """Return the only record; no process may be left of the run."""
    found = command.record(OUT)
    assert found["cell"]["operation"] == "command"
    assert found["ran"]["pid"] > 0
    assert leftovers.processes(str(command.cache)) == []
    return found


# Each is run as it is, and with weighin.
RUN = {
    "success": ("true",),
    "three": ("sh", "-c", "echo out; echo err >&2; exit 3"),
    "kill": ("sh", "-c", "kill -KILL $$"),
    "137": ("sh", "-c", "exit 137"),
    "hangup": ("sh", "-c", "kill -HUP $$"),
    "python": (PYTHON, "-c", REVERSE),
    "bytes": (PYTHON, "-c", BYTES),
    "pipeline": ("sh", "-c", "yes | head -n 100000 | tr y z | wc -c; cat"),
    "broken pipe": ("bash", "-c", "set -o pipefail; yes | head -n 1"),
    "pytest": (PYTHON, *PYTEST, str(KINDS / "tests_of_a_user.py")),
    "ignored signals": ("grep", "SigIgn", "/proc/self/status"),
    "descriptors above 2": ("cat", "/dev/fd/7"),
}
BEFORE = {
    "ignored signals": ("sh", "-c", """trap '' INT HUP QUIT USR1; exec "$@" """, "sh"),
    "descriptors above 2": ("sh", "-c", 'exec "$@" 7< /etc/passwd', "sh"),
}
"""What starts the command, or weighin."""


@tried_again(KILLED_ELSEWHERE)
@pytest.mark.parametrize("kind", RUN)
def test_a_command_has_its_own_output_input_and_exit_code(
    command: CommandLine, isolation: str, kind: str
) -> None:
    rmtree(command.folder / OUT, ignore_errors=True)  # of a try before
    before, given = BEFORE.get(kind, ()), "typed\n"
    plain = plainly(command, *before, *RUN[kind], given=given)
    assert weighed(command, isolation, *RUN[kind], before=before, given=given) == plain
    found = record(command)
    assert found["exit_code"] == plain.code
    assert found["outcome"] == ("command_failed" if plain.code else "ok")
    assert "1 failed, 1 passed" in plain.out or kind != "pytest"


MARKS = pytest.mark.parametrize("mark", ["", STEPS], ids=["plain", "marked"])


def test_with_a_mark_every_byte_is_the_commands(command: CommandLine) -> None:
    plain = plainly(command, *RUN["bytes"])
    assert weighed(command, "process", *RUN["bytes"], mark=STEPS) == plain


@MARKS
def test_on_a_terminal_every_byte_is_the_commands(command: CommandLine, mark: str) -> None:
    alone = talk(command, *RUN["bytes"]).screen
    assert "terminals: True True True" in alone
    ours = talk(command, *weighin("process", mark), *RUN["bytes"])
    assert ours.screen.startswith(alone)
    texts = [each["text"] for each in record(command)["ran"]["marks"]]
    assert texts == [f"step {step}" for step in range(5) if mark]


@MARKS
def test_a_command_whose_reader_leaves_ends_as_without_weighin(
    command: CommandLine, mark: str
) -> None:
    yes = shlex.join((*weighin("process", mark), "yes"))
    line = f'trap "" PIPE; {yes} | head -n 1; exit "${{PIPESTATUS[0]}}"'
    assert plainly(command, "bash", "-c", line).code == 128 + signal.SIGPIPE


def test_a_mark_has_the_time_of_its_line_on_the_clock_of_the_samples(command: CommandLine) -> None:
    code = (
        "import time\n"
        "time.sleep(1); print('small', flush=True)\n"
        "held = bytearray(200 << 20); time.sleep(1); print('large', flush=True); time.sleep(1)"
    )
    assert weighed(command, "process", PYTHON, "-c", code, mark="small|large").code == 0
    small, large = record(command)["ran"]["marks"]
    assert [small["text"], large["text"]] == ["small", "large"]
    held = [(row["t_ns"], row["anon_bytes"]) for row in command.samples(OUT)]
    before = [size for t_ns, size in held if t_ns <= small["t_ns"]]
    at_large = [size for t_ns, size in held if abs(t_ns - large["t_ns"]) <= 900_000_000]
    assert max(before) < 100 << 20
    assert max(at_large) >= 200 << 20


@pytest.mark.cgroup
def test_a_kill_is_said_in_words_on_standard_error_and_in_the_json(command: CommandLine) -> None:
    takes = "taken = bytes(10) * 40 * 1024**2"  # 400 MiB at once
    ended = command.run(
        "run --isolation cgroup --ram 200m --no-stacks --out kill --json kill.json --",
        *(PYTHON, "-c", takes),
    )
    assert (ended.code, ended.out) == (137, "")
    killed, held, path = ended.err.splitlines()
    assert killed.startswith("weighin: The kernel killed python")
    assert killed.endswith("the command reached its RAM limit of 200 MiB.")
    assert re.fullmatch(
        r"weighin: The command had (19\d|200) MiB of anonymous memory, not counting page cache,"
        r" and tried to allocate more\.",
        held,
    )
    assert path == "weighin: weighin report kill"
    answer = json.loads((command.folder / "kill.json").read_text())["answer"]
    assert [f"weighin: {line}" for line in answer] == [killed, held]


def test_a_command_finds_around_it_what_it_finds_without_weighin(
    command: CommandLine, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"odd.name": "1", "lines": "a\nb", "empty": "", "bytes": os.fsdecode(b"\xff")}
    for name, value in odd.items():
        monkeypatch.setenv(name, value)
    arguments = (PYTHON, str(KINDS / "around.py"))
    plain = json.loads(plainly(command, *arguments).out)
    ours = json.loads(weighed(command, isolation, *arguments).out)
    assert Path(ours["environment"].pop(VARIABLE)).name == "phases"
    assert ("WEIGHIN_WORKER" in ours["environment"]) == (isolation == "process")
    ours["environment"].pop("WEIGHIN_WORKER", None)
    assert ours == plain
    assert odd.items() <= ours["environment"].items()
    record(command)


@pytest.mark.cgroup
def test_four_ranks_of_torchrun_are_as_without_weighin(command: CommandLine) -> None:
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    arguments = ("env", "OMP_NUM_THREADS=1", PYTHON, *ranks, str(KINDS / "ranks.py"))
    ours = weighed(command, "cgroup", *arguments)
    assert (ours.out, ours.code) == ("4 ranks, sum 6.0\n", 0), ours.err
    found = record(command)
    assert found["outcome"] == "ok"
    assert sum("ranks.py" in each["command"] for each in found["ran"]["processes"]) >= 4


def test_a_daemon_of_a_script_is_ended_and_named(command: CommandLine, isolation: str) -> None:
    script = "setsid sleep 4321 </dev/null >/dev/null 2>&1 & echo started"
    ours = weighed(command, isolation, "sh", "-c", script)
    assert (ours.out, ours.code) == ("started\n", 0)
    assert record(command)["ran"]["ended"] == ["sleep 4321"]


INTERACTIVE = (
    (">>> ", "import sys; sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty()\n"),
    (">>> ", "import os; os.getpgrp() == os.tcgetpgrp(0)\n"),
    (">>> ", "sys.exit(3)\n"),
)


def test_an_interactive_python_has_its_terminal(command: CommandLine, isolation: str) -> None:
    python = ("env", "PYTHONSTARTUP=", PYTHON, "-q")
    plain = talk(command, *python, typed=INTERACTIVE)
    ours = talk(command, *weighin(isolation), *python, typed=INTERACTIVE)
    assert "(True, True, True)" in plain.screen
    assert (plain.code, ours.code) == (3, 3)
    assert ours.screen.startswith(plain.screen)
    assert ours.screen.removeprefix(plain.screen).startswith("weighin: ")
    assert record(command)["exit_code"] == 3


def test_ctrl_c_ends_the_command_and_leaves_a_record(command: CommandLine, isolation: str) -> None:
    waiting = (*weighin(isolation), "sh", "-c", "echo waiting; exec sleep 60")
    ended = talk(command, *waiting, typed=[("waiting", "\x03")])
    assert ended.code == 130, ended.screen
    assert "Traceback" not in ended.screen
    assert record(command)["exit_code"] == 130


# What the program that runs the tests ignores, such as SIGINT in a script's background, is as by default.
DEFAULT = ("env", "--default-signal")
SIGNALS = ("QUIT", "USR1", "USR2", "ALRM", "INT", "TSTP", "CONT", "WINCH", "TERM", "HUP")
TRAPS = f"""
import os, signal, sys
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)  # which gets a byte of two signals, too, that Python tells once
for name in {SIGNALS!r}:
    signal.signal(getattr(signal, "SIG" + name), lambda *_: None)
print("up", flush=True)
while True:
    for number in os.read(read, 100):
        print(signal.Signals(number).name, flush=True)
        if signal.Signals(number).name == sys.argv[1]:
            sys.exit(5)
"""
"""It prints the name of each signal that it gets, and ends with the one that its argument names."""


def test_each_signal_that_weighin_gets_reaches_the_command_once(
    command: CommandLine, isolation: str
) -> None:
    line = f"""run --isolation {isolation} --no-stacks -- sh -c 'exec "$@" > seen' sh"""
    started = command.start(line, PYTHON, "-c", TRAPS, "SIGHUP", before=DEFAULT)
    expected, stat = ["up"], Path(f"/proc/{started.process.pid}/stat")

    def arrives(*names: str) -> None:
        expected.extend(names)
        file = command.folder / "seen"
        leftovers.wait_until(
            lambda: file.exists() and file.read_text().split() == expected, f"no {names} alone"
        )

    arrives()
    for name in SIGNALS:
        started.process.send_signal(getattr(signal, f"SIG{name}"))
        arrives(f"SIG{name}")
        if name == "TSTP":  # weighin stops with its command, as the shell expects
            leftovers.wait_until(lambda: ") T " in stat.read_text(), "weighin goes on")
            started.process.send_signal(signal.SIGCONT)
            arrives("SIGCONT")
    assert (started.end().code, (command.folder / "seen").read_text().split()) == (5, expected)


def test_a_signal_of_the_terminal_arrives_once(command: CommandLine, isolation: str) -> None:
    """Several times, because two that arrive at the same moment count as one."""
    traps = (*DEFAULT, *weighin(isolation), PYTHON, "-c", TRAPS, "SIGWINCH")
    to_each = (("SIGINT", "\x03"),) * 4
    typed = (("up", "\x03"), *to_each, ("SIGINT", "\x1c"), ("SIGQUIT", (30, 90)))
    ended = talk(command, *traps, typed=typed)
    assert ended.code == record(command)["exit_code"] == 5
    assert [ended.screen.count(f"SIG{name}") for name in ("INT", "QUIT", "WINCH")] == [5, 1, 1]


SIZES = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
shown = None
while shown != (8, 9):
    if (size := tuple(os.get_terminal_size(1))) == shown:
        signal.sigwait([signal.SIGWINCH])
    else:
        shown = size
        print("size", *shown, flush=True)
"""


@MARKS
def test_a_command_gets_each_size_of_the_terminal(command: CommandLine, mark: str) -> None:
    sizes = [(24, 80), (30, 90), (40, 70), (20, 60), (9, 8)]
    typed = [(f"size {columns} {lines}\r", new) for (lines, columns), new in pairwise(sizes)]
    ended = talk(command, *weighin("process", mark), PYTHON, "-c", SIZES, typed=typed)
    assert re.findall(r"size (\d+) (\d+)", ended.screen) == [(str(b), str(a)) for a, b in sizes]
    assert ended.code == 0


def test_makes_in_it_share_the_jobs_of_the_make_around(
    command: CommandLine, isolation: str
) -> None:
    # Each waits for the one that runs beside it.
    wait = "touch $@; until [ -e a ] && [ -e b ]; do sleep 0.01; done"
    (command.folder / "Makefile").write_text(
        f"all: ; +{shlex.join(weighin(isolation))} $(MAKE) both\nboth: a b\na b: ; {wait}\n"
    )
    ended = plainly(command, "make", "-j2")
    assert ended.code == 0, ended.err
    assert "jobserver" not in ended.err


def test_what_the_kernel_cannot_start_is_refused(command: CommandLine, isolation: str) -> None:
    (script := command.folder / "script").write_text("echo no first line\n")
    script.chmod(0o755)
    assert "Exec format error" in plainly(command, *weighin(isolation), "./script").err


def test_a_closed_standard_error_changes_no_exit_code(command: CommandLine) -> None:
    closing = (
        "import os, signal, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 2);"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    for code in (0, 3, 126, 127):
        rmtree(command.folder / OUT, ignore_errors=True)
        ends = (*weighin("process"), "sh", "-c", f"exit {code}")
        assert plainly(command, PYTHON, "-c", closing, *ends).code == code


FOLDERS = [
    pytest.param(("sh", "-c"), "mkdir gone; cd gone; rmdir ../gone", id="deleted"),
    pytest.param(
        ("unshare", "--mount", "sh", "-c"), 'mount --bind "$PWD" "$PWD"; mount -o remount,bind,ro "$PWD"; cd "$PWD"',
        marks=pytest.mark.root, id="read-only",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shell", "script"), FOLDERS)
def test_a_folder_that_cannot_be_written_does_not_stop_the_command(
    command: CommandLine, tmp_path: Path, shell: tuple[str, ...], script: str
) -> None:
    before, line = (*shell, f'{script}; exec "$@"', "sh"), "--isolation process -- echo hello"
    ended = command.run(f"run --no-stacks {line}", before=before, TMPDIR=str(tmp_path))
    assert (ended.out, ended.code) == ("hello\n", 0), ended.err
    report = next(line for line in ended.err.splitlines() if "weighin report" in line)
    assert Path(report.rpartition(" ")[2], "records.jsonl").exists()


@pytest.mark.cgroup
@pytest.mark.root
def test_a_time_out_ends_a_command_that_is_stopped(command: CommandLine, isolation: str) -> None:
    stops = "--no-stacks --timeout 1 -- sh -c 'kill -STOP $$'"
    ended = command.run(f"run --isolation {isolation} {stops}")
    assert ended.code == 137
    assert "Still running after 1 s" in ended.err


ENDS_WELL = "{ trap 'kill $!; exit 0' INT TERM HUP; sleep 60 & wait; }"


def ended_in_the_second(
    command: CommandLine, number: signal.Signals, isolation: str, second: str = "exec sleep 60"
) -> None:
    """Send a signal to weighin in the second of three repeats."""
    script = f"echo x >> started; [ $(wc -l < started) -eq 2 ] && {second}; true"
    line = f"run --isolation {isolation} --no-stacks --out {OUT} --repeats 3 -- sh -c"
    started = command.start(line, script, before=DEFAULT)
    wait_for_repeats(command, 2)
    started.process.send_signal(number)
    ended = started.end()
    assert f"resume it: weighin run --resume {OUT}" in ended.err
    assert ended.code == 130


def wait_for_repeats(command: CommandLine, count: int) -> None:
    file = command.folder / "started"
    leftovers.wait_until(
        lambda: file.exists() and len(file.read_text().split()) == count, f"no {count} repeats"
    )


def repeats(command: CommandLine) -> list[int]:
    return [record["cell"]["repeat"] for record in command.records(OUT)]


@pytest.mark.parametrize(
    ("number", "isolation", "second"),
    [
        (signal.SIGINT, "process", "exec sleep 60"),
        (signal.SIGHUP, "process", "exec sleep 60"),
        pytest.param(signal.SIGTERM, "cgroup", ENDS_WELL, marks=pytest.mark.cgroup),
    ],
)
def test_a_repeat_that_a_signal_broke_off_is_measured_again(
    command: CommandLine, number: signal.Signals, isolation: str, second: str
) -> None:
    ended_in_the_second(command, number, isolation, second)
    assert repeats(command) == [0]
    assert command.run(f"run --resume {OUT}").code == 0
    assert repeats(command) == [0, 1, 2]


def test_of_two_runs_in_one_folder_the_second_is_refused(command: CommandLine) -> None:
    line = f"run --isolation process --out {OUT} --repeats 2 -- sleep 0.2"
    both = [started.end() for started in (command.start(line), command.start(line))]
    assert sorted(ended.code for ended in both) == [0, 2]
    assert sum(f"error: {OUT} already contains a run" in ended.err for ended in both) == 1
    assert repeats(command) == [0, 1]


def test_of_two_resumes_of_one_run_the_second_is_refused(command: CommandLine) -> None:
    ended_in_the_second(command, signal.SIGTERM, "process")
    (command.folder / "started").write_text("x\n")  # so that the next repeat sleeps
    first = command.start(f"run --resume {OUT}")
    wait_for_repeats(command, 2)
    second = command.run(f"run --resume {OUT}")
    first.end(signal.SIGTERM)
    assert second.code == 4
    assert f"error: another process runs the plan in {OUT}\n" in second.err


@pytest.mark.parametrize(
    "remover",
    ["run --out next -- true", pytest.param("doctor", marks=[pytest.mark.slow, pytest.mark.nightly])],
)  # fmt: skip
def test_the_temporary_folder_of_a_killed_run_is_removed(
    command: CommandLine, tmp_path: Path, remover: str
) -> None:
    def start(out: str) -> tuple[Started, Path]:
        before = set(tmp_path.iterdir())
        line = f"run --isolation process --no-stacks --out {out} -- sh -c"
        script = f"touch {out}.on; exec sleep 300"
        started = command.start(line, script, TMPDIR=str(tmp_path))
        leftovers.wait_until((command.folder / f"{out}.on").exists, "the command did not start")
        (folder,) = set(tmp_path.iterdir()) - before
        return started, folder

    (theirs := tmp_path / "theirs").mkdir()  # of another program
    running, kept = start("running")
    killed, gone = start("killed")
    killed.end(signal.SIGKILL)
    ended = command.run(remover, TMPDIR=str(tmp_path))
    assert ended.code == 0
    assert set(tmp_path.iterdir()) == {kept, theirs}
    assert remover != "doctor" or f"removed:folder{gone}" in "".join(ended.out.split())
    assert running.end(signal.SIGTERM).left == []
    assert list(tmp_path.iterdir()) == [theirs]


SHOWN = {
    "report run": ("reading run", "computing the table", "writing the report of run"),
    "check run --budget 'ready <= 60min'": ("reading run", "comparing the figures"),
    "compare run run": ("comparing the figures of 2 runs",),
    "history .": ("reading the runs in .",),
}


@pytest.mark.parametrize("line", SHOWN)
def test_a_verb_that_reads_runs_shows_its_steps_on_a_terminal_alone(
    command: CommandLine, line: str
) -> None:
    copytree(ROOT / "results/published/gpt2-xl-16GiB", command.folder / "run")
    ended = talk(command, "env", "TERM=xterm", "NO_COLOR=", *words(line))
    assert ended.code == 0
    assert [step for step in SHOWN[line] if step not in ended.screen] == []
    in_pipe = command.run(line, TERM="xterm").err
    assert [step for step in SHOWN[line] if step in in_pipe] == []
