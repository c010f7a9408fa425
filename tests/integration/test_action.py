"""action.yml: its shape, and its shell steps run one after the other as a runner would, in a clean
environment, with this weighin on the PATH.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
SUITE = "models: gpt2-tiny\nstrategies: [baseline, streaming]\nisolation: process\n"


def test_every_expression_names_something_that_is_there() -> None:
    text = (ROOT / "action.yml").read_text()
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(ACTION["inputs"])
    ids = {step["id"] for step in STEPS if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.outputs", text)) == ids == {"measure", "check"}


def test_no_expression_is_written_into_a_script() -> None:
    scripts = [step["run"] for step in STEPS if "run" in step]
    assert len(scripts) == 5
    assert not [script for script in scripts if "${{" in script]
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)


class Runner:
    """Runs the action's shell steps with the variables that GitHub sets, and nothing else."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.outputs: dict[str, str] = {}
        self.log = ""
        tools = folder / "tools"
        tools.mkdir()
        gh = tools / "gh"  # notes how it is called, and what it would send
        gh.write_text(
            '#!/bin/sh\nprintf "%s\\n" "$@" > "$HOME/gh.txt"\ncat "$7" > "$HOME/comment.md"\n'
        )
        gh.chmod(0o755)
        self.environment = {
            "PATH": f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder),
            "WEIGHIN_CACHE": str(cache),
            "RUNNER_TEMP": str(folder / "temp"),
            "GITHUB_RUN_ID": "7",
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        }

    def step(self, name: str, **inputs: str) -> int:
        """Run one step; returns its exit code. ``inputs`` stand for its expressions."""
        [step] = [one for one in STEPS if one["name"] == name]
        assert set(inputs) == set(step.get("env", {}))
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            command,
            env=self.environment | inputs,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        self.log = done.stdout + done.stderr
        output = Path(self.environment["GITHUB_OUTPUT"])
        if output.exists():
            self.outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        return done.returncode


@pytest.fixture(name="runner")
def _runner(tmp_path: Path, disk: Path) -> Runner:
    (tmp_path / "suite.yaml").write_text(SUITE)
    return Runner(tmp_path, disk / "cache")


def test_the_steps_of_a_pull_request_that_passes_and_of_one_that_does_not(runner: Runner) -> None:
    assert runner.step("Install weighin", PACKAGE="weighin") == 0, runner.log
    assert runner.step("Measure", SUITE="suite.yaml") == 0, runner.log
    run = Path(runner.outputs["run"])
    assert (run / "report.html").exists()
    update = ["weighin", "check", str(run), "--baseline", "baseline.yaml", "--update"]
    subprocess.run(
        update, env=runner.environment, cwd=runner.folder, check=True, capture_output=True
    )

    assert (
        runner.step("Check", RUN=str(run), BASELINE="baseline.yaml", BUDGETS="", EXPECT="") == 0
    ), runner.log
    assert runner.outputs["passed"] == "true"
    assert "::error" not in runner.log

    budgets = "peak_rss <= 100 GiB\n\nanon <= 1MiB\n"
    assert runner.step("Check", RUN=str(run), BASELINE="", BUDGETS=budgets, EXPECT="") == 0, (
        runner.log
    )
    assert runner.outputs["passed"] == "false"
    assert runner.log.count("::error title=over budget%3A gpt2-tiny") == 2
    summary = (runner.folder / "summary.md").read_text()
    assert summary.endswith((run / "check.md").read_text())
    assert {"check.md", "check.xml", "check.json"} <= {path.name for path in run.iterdir()}
    assert runner.step("Fail where the gate did") == 1

    assert (
        runner.step("Comment", GH_TOKEN="t", RUN=str(run), REPOSITORY="me/mine", NUMBER="12") == 0
    )
    assert (runner.folder / "gh.txt").read_text().split() == [
        "pr", "comment", "12", "--repo", "me/mine", "--body-file", str(run / "check.md"),
        "--edit-last", "--create-if-none",
    ]  # fmt: skip
    assert (runner.folder / "comment.md").read_text() == (run / "check.md").read_text()


def test_a_strategy_that_fails_is_named_by_the_check_and_not_lost_by_the_measuring(
    runner: Runner,
) -> None:
    (runner.folder / "failing.py").write_text(
        '"""Fail."""\n\ndef load(job):\n    raise KeyError(1)\n'
    )
    (runner.folder / "suite.yaml").write_text(SUITE.replace("streaming", "./failing.py"))
    assert runner.step("Measure", SUITE="suite.yaml") == 0, runner.log
    run = runner.outputs["run"]
    budgets = "baseline: peak_rss <= 100 GiB"
    assert runner.step("Check", RUN=run, BASELINE="", BUDGETS=budgets, EXPECT="") == 0, runner.log
    assert runner.outputs["passed"] == "false"
    assert "::error title=not ok%3A gpt2-tiny failing" in runner.log


def test_what_is_expected_reaches_the_check(runner: Runner) -> None:
    (runner.folder / "suite.yaml").write_text(f"{SUITE}timeout_s: 0.001\n")
    assert runner.step("Measure", SUITE="suite.yaml") == 0, runner.log
    run = runner.outputs["run"]
    assert runner.step("Check", RUN=run, BASELINE="", BUDGETS="load <= 9 s", EXPECT="") == 0
    assert runner.outputs["passed"] == "false"
    expect = "baseline=timeout,streaming=timeout"
    assert runner.step("Check", RUN=run, BASELINE="", BUDGETS="load <= 9 s", EXPECT=expect) == 0
    assert "expected baseline: timeout" in runner.log


def test_a_check_that_cannot_be_made_fails_at_once(runner: Runner) -> None:
    (runner.folder / "empty").mkdir()
    assert (
        runner.step(
            "Check", RUN=str(runner.folder / "empty"), BASELINE="no.yaml", BUDGETS="", EXPECT=""
        )
        == 2
    )
    assert "passed" not in runner.outputs
