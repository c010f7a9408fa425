"""What may become a baseline, and what is asked before: ``weighin check --update``."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from factories import SCRIPTS, make_cell, make_result
from test_check import run_of, typed
from test_expected import FAILED, WRONG, killed, ok

from weighin.gate import baseline
from weighin.gate.expected import Expectation
from weighin.result import Outcome
from weighin.units import GIB

KILLED = Expectation("baseline", Outcome.OOM_KILLED)


@pytest.mark.parametrize("options", [(), ("--expect-failures",)])
def test_what_is_broken_becomes_no_baseline_and_is_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    run = run_of(tmp_path / "run", ok(), killed(), WRONG, FAILED)
    path = tmp_path / "baseline.yaml"
    assert typed("check", run, "--baseline", path, "--update", *options) == (
        1,
        "cannot make a baseline of failed strategies: lossy: wrong_weights; broken: strategy_failed\n"
        "repair these strategies and measure again, or leave them out of --strategies",
    )
    assert not path.exists()


def test_what_was_killed_becomes_no_baseline_without_a_word(tmp_path: Path) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "base line.yaml"
    assert typed("check", run, "--baseline", path, "--update") == (
        1,
        "cannot make a baseline of outcomes that are not expected: baseline: oom_killed\n"
        f"if these outcomes are intended: weighin check RUN --baseline '{path}' --update --expect-failures",
    )
    assert not path.exists()


def test_expect_failures_writes_what_is_expected_from_then_on(tmp_path: Path) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "baseline.yaml"
    code, text = typed("check", run, "--baseline", path, "--update", "--expect-failures")
    assert code == 0
    assert "+    baseline: oom_killed" in text.splitlines()
    assert baseline.read(path).rules.expected == (KILLED,)
    assert typed("check", run, "--baseline", path)[0] == 0
    code, text = typed("check", run, "--baseline", path, "--update")
    assert code == 0
    assert f"{path} is up to date" in text


def test_what_is_named_with_expect_is_written_without_asking(tmp_path: Path) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "baseline.yaml"
    code, _ = typed("check", run, "--baseline", path, "--update", "--expect", "base*=oom_killed")
    assert code == 0
    assert yaml.safe_load(path.read_text())["measured"]["expect"] == {"base*": "oom_killed"}


def test_a_selector_means_no_series_that_ended_otherwise(tmp_path: Path) -> None:
    other = killed(ram_limit_bytes=4 * GIB)
    saved = make_result(make_cell("baseline", format="sharded"), SCRIPTS["streaming"])
    run, path = run_of(tmp_path / "run", ok("baseline", ram_limit_bytes=None), killed(), other, saved), tmp_path / "b.yaml"  # fmt: skip
    assert typed("check", run, "--baseline", path, "--update", "--expect-failures")[0] == 0
    assert list(yaml.safe_load(path.read_text())["measured"]["expect"]) == [
        "baseline ram=4GiB",
        "gpt2-xl baseline pt float32 cpu cold docker ram=8GiB",
    ]


def test_what_failed_in_two_ways_becomes_no_baseline(tmp_path: Path) -> None:
    late = make_result(make_cell("baseline", repeat=1), outcome=Outcome.TIMEOUT)
    run, path = run_of(tmp_path / "run", ok(), killed(), late), tmp_path / "baseline.yaml"
    code, text = typed("check", run, "--baseline", path, "--update", "--expect-failures")
    assert code == 1
    assert "failed in different ways: baseline: oom_killed 1, timeout 1\n" in text


def test_expect_failures_belongs_to_an_update(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ok())
    assert typed("check", run, "--budget", "peak_rss < 8g", "--expect-failures") == (
        2,
        "--expect-failures has no effect without --update\n"
        "add --update, or name the intended outcomes: --expect baseline=oom_killed",
    )


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1)])
def test_in_a_terminal_it_is_asked(tmp_path: Path, answer: str, code: int) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "baseline.yaml"
    command = [sys.executable, "-m", "weighin", "check", str(run), "--baseline", str(path)]
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        done = subprocess.run(
            [*command, "--update"],
            stdin=theirs,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout.startswith("baseline: oom_killed\n")
    assert "Are these outcomes intended?" in done.stdout + done.stderr
    assert (done.returncode, path.exists()) == (code, code == 0)


OWNED = """\
schema: 1  # ours
expect: {streaming: timeout,  # slow
}
"""


def test_what_is_accepted_stands_below_and_the_owners_part_stays(tmp_path: Path) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "baseline.yaml"
    path.write_text(OWNED)
    assert typed("check", run, "--baseline", path, "--update", "--expect-failures")[0] == 0
    assert path.read_text().startswith(f"{OWNED}# measured")
    assert yaml.safe_load(path.read_text())["measured"]["expect"] == {"baseline": "oom_killed"}
    assert baseline.read(path).accepted == (KILLED,)


def test_what_the_owner_expects_is_not_written_again(tmp_path: Path) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "baseline.yaml"
    path.write_text("schema: 1\nexpect: {baseline: oom_killed}\n")
    arguments = ("--update", "--expect", "baseline=oom_killed")
    assert typed("check", run, "--baseline", path, *arguments)[0] == 0
    assert baseline.read(path).accepted == ()
    assert baseline.read(path).rules.expected == (KILLED,)


def test_what_is_ok_again_is_no_longer_expected(tmp_path: Path) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "baseline.yaml"
    typed("check", run, "--baseline", path, "--update", "--expect-failures")
    better = run_of(tmp_path / "better", ok(), ok("baseline"))
    assert typed("check", better, "--baseline", path, "--update")[0] == 0
    assert baseline.read(path).rules.expected == ()
