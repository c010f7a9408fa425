"""``weighin run -- COMMAND`` is transparent: signals, descriptors, scripts, folders and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIGNALS = ("QUIT", "USR1", "USR2", "ALRM", "INT", "TSTP", "CONT", "WINCH", "TERM", "HUP")
# What the program that runs the tests ignores, such as SIGINT in a script's background, is as by default.
WEIGHIN = ("env", "--default-signal", sys.executable, "-P", "-m", "weighin")
TRAPS = (
    "import signal, sys, time\n"
    f"for name in {SIGNALS!r}:\n"
    "    signal.signal(getattr(signal, 'SIG' + name), lambda n, _: print(signal.Signals(n).name, flush=True))\n"
    "print('up', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture(params=["process", pytest.param("cgroup", marks=pytest.mark.cgroup)])
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(
    disk: Path, tmp_path: Path, isolation: str
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def start(
        *arguments: str, options: tuple[str, ...] = (), **how: Any
    ) -> subprocess.CompletedProcess[str]:
        command = (
            *WEIGHIN,
            "run",
            "--isolation",
            isolation,
            "--no-stacks",
            *options,
            "--",
            *arguments,
        )
        how = {"cwd": tmp_path, "timeout": 120, **how}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            **how,
        )

    return start


def test_each_signal_that_weighin_gets_reaches_the_command_once(
    tmp_path: Path, isolation: str
) -> None:
    command = (
        *WEIGHIN,
        "run",
        "--isolation",
        isolation,
        "--no-stacks",
        "--",
        sys.executable,
        "-c",
        TRAPS,
    )
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        time.sleep(0.5)  # weighin listens from the command's start on
        for name in SIGNALS:
            process.send_signal(getattr(signal, f"SIG{name}"))
            assert process.stdout.readline() == f"SIG{name}\n"
            if name == "TSTP":  # weighin stops with its command, as the shell expects
                os.waitpid(process.pid, os.WUNTRACED)
                os.kill(process.pid, signal.SIGCONT)
                assert process.stdout.readline() == "SIGCONT\n"
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(60) == 0


def test_a_signal_of_the_terminal_arrives_once(tmp_path: Path, isolation: str) -> None:
    parent, child = os.openpty()
    command = (
        *WEIGHIN,
        "run",
        "--isolation",
        isolation,
        "--no-stacks",
        "--",
        sys.executable,
        "-c",
        TRAPS,
    )
    with subprocess.Popen(
        (WEIGHIN[0], WEIGHIN[1], "setsid", "--ctty", "--wait", *command[2:]),
        cwd=tmp_path,
        stdin=child,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        time.sleep(0.5)
        for key, name in ((b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")):
            os.write(parent, key)
            assert process.stdout.readline() == f"{name}\n"
        termios.tcsetwinsize(parent, (30, 90))
        assert process.stdout.readline() == "SIGWINCH\n"
        os.write(parent, b"\x04")  # the end of its input
        assert process.stdout.read() == ""
        assert process.wait(60) == 0
    os.close(parent)
    os.close(child)


def test_an_ignored_signal_stays_ignored(run: Callable[..., Any]) -> None:
    script = (
        "trap '' INT HUP QUIT USR1; exec "
        + " ".join(WEIGHIN[2:])
        + " run --no-stacks -- grep SigIgn /proc/self/status"
    )
    plain = "trap '' INT HUP QUIT USR1; exec grep SigIgn /proc/self/status"
    (weighed, plainly) = (run("sh", "-c", line).stdout for line in (script, plain))
    assert weighed == plainly != ""


def test_the_command_gets_descriptors_above_2(tmp_path: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("the file\n")
    file = os.open(tmp_path / "file", os.O_RDONLY)
    assert run("cat", f"/dev/fd/{file}", pass_fds=(file,)).stdout == "the file\n"
    os.close(file)


def test_makes_in_it_share_the_jobs_of_the_make_around(tmp_path: Path, isolation: str) -> None:
    line = " ".join((*WEIGHIN, "run", "--isolation", isolation, "--no-stacks"))
    wait = (
        "touch $@; until [ -e a ] && [ -e b ]; do sleep 0.01; done"  # for one that runs beside it
    )
    (tmp_path / "Makefile").write_text(
        f"all: ; +{line} -- $(MAKE) both\nboth: a b\na b: ; {wait}\n"
    )
    done = subprocess.run(
        ("make", "-j2"), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "jobserver" not in done.stderr


def test_what_the_kernel_cannot_start_is_refused(tmp_path: Path, run: Callable[..., Any]) -> None:
    (script := tmp_path / "script").write_text("echo no first line\n")
    script.chmod(0o755)
    assert "Exec format error" in run("./script").stderr


@pytest.mark.parametrize("code", [0, 3, 126, 127])
def test_a_closed_standard_error_changes_no_exit_code(run: Callable[..., Any], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    line = (
        *WEIGHIN,
        "run",
        "--isolation",
        "process",
        "--no-stacks",
        "--",
        "sh",
        "-c",
        f"exit {code}",
    )
    done = run("bash", "-c", f'"$@" 2>&{writing}', "sh", *line, pass_fds=(writing,))
    assert done.returncode == code
    os.close(writing)


def test_a_deleted_folder_does_not_stop_the_command(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    line = " ".join(WEIGHIN)
    done = run(
        "sh",
        "-c",
        f"mkdir gone; cd gone; rmdir ../gone; {line} run --no-stacks --isolation process -- echo hello",
    )
    assert (done.stdout, done.returncode) == ("hello\n", 0)
    report = next(line for line in done.stderr.splitlines() if "weighin report" in line)
    assert Path(report.rpartition(" ")[2], "records.jsonl").exists()


@pytest.mark.root
def test_a_read_only_folder_does_not_stop_the_command(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    (folder := tmp_path / "kept").mkdir()
    line = " ".join(WEIGHIN)
    mounted = f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}; cd {folder}"
    inner = f"{mounted}; {line} run --no-stacks --isolation process -- echo hello"
    done = run("unshare", "--mount", "sh", "-c", inner)
    assert (done.stdout, done.returncode) == ("hello\n", 0)
    assert "weighin report /" in done.stderr


@pytest.mark.cgroup
@pytest.mark.root
def test_a_time_out_ends_a_command_that_is_stopped(run: Callable[..., Any], isolation: str) -> None:
    done = run("sh", "-c", "kill -STOP $$", options=("--timeout", "1"))
    assert done.returncode == 137
    assert "Still running after 1 s" in done.stderr


ENDS_WELL = "{ trap 'kill $!; exit 0' INT TERM HUP; sleep 60 & wait; }"


def ended_after_the_first(
    folder: Path, number: signal.Signals, isolation: str, second: str = "exec sleep 60"
) -> list[int]:
    """Send a signal to weighin in the second of three repeats; return the repeats with a record."""
    script = f"echo x >> {folder}/started; [ $(wc -l < {folder}/started) -eq 2 ] && {second}; true"
    common = ("run", "--isolation", isolation, "--no-stacks")
    line = (*WEIGHIN, *common, "--out", "s", "--repeats", "3", "--", "sh", "-c", script)
    with subprocess.Popen(
        line,
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (folder / "started").exists() or len((folder / "started").read_text()) < 4:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.stderr
        assert "resume it: weighin run --resume s" in process.stderr.read()
        assert process.wait() == 130
    return repeats(folder / "s")


def repeats(run: Path) -> list[int]:
    lines = (run / "records.jsonl").read_text().splitlines()
    return [json.loads(line)["cell"]["repeat"] for line in lines]


@pytest.mark.parametrize(
    ("number", "second"),
    [
        *((number, "exec sleep 60") for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
        (signal.SIGTERM, ENDS_WELL),
    ],
)
def test_a_repeat_that_a_signal_broke_off_is_measured_again(
    tmp_path: Path, isolation: str, number: signal.Signals, second: str
) -> None:
    assert ended_after_the_first(tmp_path, number, isolation, second) == [0]
    again = (*WEIGHIN, "run", "--resume", "s")
    subprocess.run(again, cwd=tmp_path, check=True, capture_output=True)
    assert repeats(tmp_path / "s") == [0, 1, 2]


def test_of_two_runs_in_one_folder_the_second_is_refused(tmp_path: Path, isolation: str) -> None:
    line = (*WEIGHIN, "run", "--isolation", isolation, "--out", "same", "--repeats", "2", "--")
    both = [
        subprocess.Popen((*line, "sleep", "1"), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    assert sum("error: same already contains a run" in text for text in errors) == 1
    assert repeats(tmp_path / "same") == [0, 1]


def test_of_two_resumes_of_one_run_the_second_is_refused(tmp_path: Path, isolation: str) -> None:
    ended_after_the_first(tmp_path, signal.SIGTERM, isolation)
    (tmp_path / "started").write_text("x\n")  # so that the next repeat sleeps
    again = (*WEIGHIN, "run", "--resume", "s")
    how: dict[str, Any] = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(again, **how) as first:
        while len((tmp_path / "started").read_text()) < 4:
            time.sleep(0.05)
        second = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)
        first.send_signal(signal.SIGTERM)
    assert second.returncode == 4
    assert "error: another process runs the plan in s\n" in second.stderr


def test_every_reader_tells_of_two_records_of_one_cell(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    run("true", options=("--out", "twice"))
    records = tmp_path / "twice" / "records.jsonl"
    records.write_text(2 * records.read_text())
    readers = ("report", "check --budget anon<=1GiB", "compare twice", "history", "run --resume")
    for verb in (f"{reader} twice".split() for reader in readers):
        done = subprocess.run(
            (*WEIGHIN, *verb), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        words = " ".join((done.stdout + done.stderr).split())
        assert "several records of one cell" in words
