"""What a user reads for every input that cannot be used: the cause, the repair, and no more.

Everything is asserted whole. Nothing is left behind: no process, cgroup, container, file or folder.
"""

import re
from pathlib import Path

import pytest
from commands import NOT_LIMITED, CommandLine, Ended

from weighin.cli import app
from weighin.suite.registry import strategies

STRATEGIES = ", ".join(sorted(strategies()))

# Arguments of `weighin`, its exit code, and all that it says; tests/contract has the whole table.
REFUSED: dict[str, tuple[str, int, str]] = {
    "an unknown strategy": (
        "bench gpt2-tiny --strategies streeming",
        2,
        "error: no strategy is called 'streeming'\n"
        f"did you mean 'streaming'? known: {STRATEGIES}; for a file of your own: --strategies ./mine.py\n",
    ),
    "less than no RAM": (
        "bench gpt2-tiny --ram=-5g",
        2,
        "error: --ram: cannot read '-5g' as a size\nwrite a size such as 8GiB, 8g, 6500m or 4096\n",
    ),
    "results where no folder can be": (
        "bench gpt2-tiny --isolation process --out /proc/run",
        2,
        "error: cannot write /proc/run/plan.json: No such file or directory\nfree disk space, or"
        " name a writable folder: weighin bench ... --out FOLDER\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_two_lines(command: CommandLine, name: str) -> None:
    arguments, code, text = REFUSED[name]
    ended = command.run(*arguments.split())
    assert_refused(command, ended, code, text.replace("HERE", str(command.folder)))
    assert [path for path in command.folder.rglob("*") if path.is_file()] == []


def assert_refused(command: CommandLine, ended: Ended, code: int, text: str) -> None:
    assert (ended.code, ended.out, ended.err) == (code, "", text)
    assert ended.left == []
    assert not any(path.name == "plan.json" for path in command.folder.rglob("*"))


def test_more_ram_than_the_machine_has_is_refused(command: CommandLine) -> None:
    ended = command.run("bench", "gpt2-tiny", "--ram", "900t")
    text = re.sub(r"\(\d+\.\d{3} .iB\)", "(ALL)", ended.err)
    assert_refused(
        command,
        Ended(ended.code, ended.out, text, ended.left),
        2,
        "error: --ram 900TiB is more than this machine has (ALL)\n"
        "give a smaller limit, or another device or machine\n",
    )


@pytest.mark.parametrize(
    "isolation",
    [
        pytest.param("cgroup", marks=pytest.mark.cgroup),
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.nightly]),
    ],
)
def test_less_ram_than_an_import_takes_is_refused(command: CommandLine, isolation: str) -> None:
    command.run("bench", "gpt2-tiny", "-s", "baseline", "--isolation", "process", "--out", "warm")
    ended = command.run(
        *("bench", "gpt2-tiny", "-s", "baseline", "--ram", "80m"),
        *("--isolation", isolation, "--out", "run"),
    )
    assert re.sub(r"\d+\.\d{3} MiB", "N MiB", ended.err) == (
        "importing torch, to measure the memory that the import"
        " needs\nerror: --ram 80MiB is less than `import torch` alone needs here (N MiB)\ngive at"
        " least N MiB plus the size of the weights\n"
    )
    assert (ended.code, ended.out, ended.left) == (2, "", [])
    assert not (command.folder / "run").exists()


@pytest.mark.cgroup
def test_a_limit_that_nothing_would_hold_is_refused(command: CommandLine) -> None:
    ended = command.run(
        *("bench", "gpt2-tiny", "--ram", "1g", "--isolation", "process"),
        DOCKER_HOST="unix:///nonexistent",
    )
    assert_refused(
        command,
        ended,
        3,
        "error: --isolation process cannot enforce a RAM limit\nuse --isolation auto; without a"
        " RAM limit, these work: weighin recommend, predict, and bench without --ram\n",
    )


@pytest.mark.cgroup
def test_no_engine_is_an_error_where_docker_was_asked_for(command: CommandLine) -> None:
    ended = command.run(
        *("bench", "gpt2-tiny", "--ram", "1g", "--isolation", "docker"),
        DOCKER_HOST="unix:///nonexistent",
    )
    assert_refused(
        command,
        ended,
        3,
        "error: no Docker engine answers at unix:///nonexistent: No such file or directory\nsudo"
        " systemctl start docker, or set DOCKER_HOST; for permission: sudo usermod -aG docker $USER, and log in again, or"
        " use --isolation auto; without a RAM limit, these work: weighin recommend, predict, and bench without --ram\n",
    )


def test_a_cache_that_cannot_be_written_is_named(command: CommandLine) -> None:
    ended = command.run(
        "bench", "gpt2-tiny", "--isolation", "process", WEIGHIN_CACHE="/proc/nothing"
    )
    assert_refused(
        command,
        ended,
        2,
        f"{NOT_LIMITED}error: cannot write to the cache /proc/nothing: No such file or directory\n"
        "choose another folder: WEIGHIN_CACHE=/path weighin ...\n",
    )


def test_a_file_where_results_shall_go_stays(command: CommandLine) -> None:
    (command.folder / "taken").write_text("mine")
    for out, why in (("taken", "File exists"), ("taken/run", "Not a directory")):
        ended = command.run("bench", "gpt2-tiny", "--isolation", "process", "--out", out)
        assert_refused(
            command,
            ended,
            2,
            f"error: cannot write {out}/plan.json: {why}\nfree disk space, or name a writable"
            " folder: weighin bench ... --out FOLDER\n",
        )
    assert (command.folder / "taken").read_text() == "mine"


def test_a_run_that_is_there_is_not_written_over(command: CommandLine) -> None:
    run = command.folder / "my run"
    arguments = (
        "bench",
        "gpt2-tiny",
        "-s",
        "baseline",
        "--isolation",
        "process",
        "--out",
        run.name,
    )
    assert command.run(*arguments).code == 0
    records = (run / "records.jsonl").read_bytes()
    ended = command.run(*arguments)
    assert (ended.code, ended.out, ended.left) == (2, "", [])
    assert ended.err == (
        "error: my run already contains a run\n"
        "to resume that run: weighin bench --resume 'my run'; for a new run, name another folder with --out\n"
    )
    assert (run / "records.jsonl").read_bytes() == records


@pytest.mark.root
def test_a_full_disk_is_found_before_anything_is_written(
    command: CommandLine,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (full := small / "full").write_bytes(bytes(1_200_000))
    monkeypatch.setenv("WEIGHIN_CACHE", str(small))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(command.folder)
    monkeypatch.setattr(
        "sys.argv", ["weighin", "bench", "gpt2-tiny", "--isolation", "process", "--out", "run"]
    )
    with pytest.raises(SystemExit) as caught:
        app.main()
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    assert re.sub(r"\d+\.\d+ ([MK]iB)", r"N \1", printed.err) == (
        f"{NOT_LIMITED}making the checkpoint of gpt2-tiny\nerror: the pt checkpoint of gpt2-tiny"
        f" needs N MiB, but only N KiB are free in {small}\nput the cache on another disk:"
        " WEIGHIN_CACHE=/path weighin ..., or empty the cache: weighin cache clear\n"
    )
    assert not (command.folder / "run").exists()
    made = {path for path in small.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert {path.name for path in made - {full}} <= {"plans.sha256"}


def test_a_strategy_that_crashes_is_a_result_and_exits_with_5(command: CommandLine) -> None:
    (command.folder / "crashing.py").write_text(
        '"""Crash in a phase."""\n'
        "import os, signal\n"
        "def load(job):\n"
        "    with job.phase('read'):\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    ended = command.run(
        *("bench", "gpt2-tiny", "-s", "./crashing.py", "--isolation", "process", "--out", "run")
    )
    assert (ended.code, ended.left) == (5, [])
    assert ended.err.splitlines()[-1] == (
        "error: crashing: strategy_failed: the measured process was ended by SIGSEGV in phase 'read'"
    )
    (line,) = (line for line in ended.err.splitlines() if line.startswith("gpt2-tiny crashing"))
    assert re.sub(r"peak RSS \S+ MiB", "peak RSS N MiB", line) == (
        "gpt2-tiny crashing     no limit   strategy_failed  peak RSS N MiB"
        "  the measured process was ended by SIGSEGV in phase 'read'"
    )
