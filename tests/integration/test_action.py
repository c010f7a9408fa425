"""action.yml: its shape, and its shell steps run one after the other as a runner would, in a clean
environment, with this weighin on the PATH.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GH = f"""#!{sys.executable}
# GitHub's comments on one pull request, as `gh api` tells and changes them.
import json, os, sys
from pathlib import Path
store = Path(os.environ["HOME"], "gh.json")
told = json.loads(store.read_text())
_, *arguments = sys.argv
told["calls"].append(arguments)
body = next((Path(one.removeprefix("body=@")).read_text() for one in arguments if one.startswith("body=@")), None)
assert os.environ["GH_TOKEN"] and arguments[0] == "api"
if "PATCH" in arguments:
    [place] = [one for one in arguments if one.startswith("repos/me/mine/issues/comments/")]
    [one] = [one for one in told["comments"] if str(one["id"]) == place.rpartition("/")[2]]
    one["body"] = body
elif "POST" in arguments:
    assert "repos/me/mine/issues/12/comments" in arguments
    told["comments"].append({{"id": 100 + len(told["comments"]), "body": body}})
else:
    assert arguments == ["api", "--paginate", "repos/me/mine/issues/12/comments", "--jq",
                         ".[] | select(.body | startswith(env.MARKER)) | .id"]
    for one in told["comments"]:
        if one["body"].startswith(os.environ["MARKER"]):
            print(one["id"])
store.write_text(json.dumps(told))
"""
PYTHON = """#!/bin/sh
# pip, which notes what it is asked for: an index cannot be reached in a test
printf "%s\\n" "$*" >> "$HOME/pip.txt"
"""
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
    """Runs the action's shell steps with the variables that GitHub sets, and nothing else.

    ``programs`` are the folders of the PATH, and ``before`` is a command that starts each step.
    """

    def __init__(
        self, folder: Path, cache: Path, *programs: Path, before: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.before = before
        self.inputs: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.log = ""
        path = ":".join(map(str, [*programs, "/usr/bin", "/bin"]))
        self.environment = {
            "PATH": path,
            "HOME": str(folder),
            "WEIGHIN_CACHE": str(cache),
            "RUNNER_TEMP": str(folder / "temp"),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_RUN_ID": "7",
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        }

    def install_tools(self) -> None:
        """Put a gh and a pip that reach no network before the other programs."""
        tools = self.folder / "tools"
        tools.mkdir()
        for name, text in {"gh": GH, "python3": PYTHON}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.say(self.folder / "gh.json", [])
        self.environment["PATH"] = f"{tools}:{self.environment['PATH']}"

    @staticmethod
    def say(path: Path, comments: list[dict[str, Any]]) -> None:
        path.write_text(json.dumps({"comments": comments, "calls": []}))

    def comments(self) -> dict[int, str]:
        """The bodies of the pull request's comments, by their ids."""
        told = json.loads((self.folder / "gh.json").read_text())
        return {one["id"]: one["body"] for one in told["comments"]}

    def calls(self) -> list[list[str]]:
        """How gh was called, without options of how to show the answer."""
        calls: list[list[str]] = json.loads((self.folder / "gh.json").read_text())["calls"]
        return calls

    def installs(self) -> list[str]:
        """What pip was asked for."""
        return (self.folder / "pip.txt").read_text().splitlines()

    def step(self, name: str, **inputs: str) -> int:
        """Run one step; returns its exit code. ``inputs`` stand for its expressions.

        Other expressions are the inputs of the workflow, or their defaults, and the outputs.
        """
        [step] = [one for one in STEPS if one["name"] == name]
        expressions = step.get("env", {})
        assert set(inputs) <= set(expressions)
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            [*self.before, *command],
            env=self.environment
            | {key: self.value(text) for key, text in expressions.items() if key not in inputs}
            | inputs,
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

    def value(self, expression: str) -> str:
        """The value of "${{ inputs.NAME }}" or "${{ steps.ID.outputs.NAME }}"."""
        match = re.fullmatch(r"\$\{\{ (inputs|steps)\.(?:\w+\.outputs\.)?(\w+) \}\}", expression)
        assert match, expression
        if match[1] == "steps":
            return self.outputs[match[2]]
        return self.inputs.get(match[2], str(ACTION["inputs"][match[2]].get("default", "")))


@pytest.fixture(name="runner")
def _runner(tmp_path: Path, disk: Path) -> Runner:
    (tmp_path / "suite.yaml").write_text(SUITE)
    runner = Runner(tmp_path, disk / "cache", Path(sys.executable).parent)
    runner.install_tools()
    return runner


def test_the_steps_of_a_pull_request_that_passes_and_of_one_that_does_not(runner: Runner) -> None:
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


def comment(runner: Runner, suite: str, text: str) -> None:
    run = runner.folder / "run"
    run.mkdir(exist_ok=True)
    (run / "check.md").write_text(text)
    inputs = {"RUN": str(run), "REPOSITORY": "me/mine", "NUMBER": "12", "SUITE": suite}
    assert runner.step("Comment", GH_TOKEN="t", **inputs) == 0, runner.log


def test_each_suite_has_one_comment_and_no_other_is_touched(runner: Runner) -> None:
    others = [
        {"id": 1, "body": "weighin: I like it"},
        {"id": 2, "body": "coverage <!-- weighin: a.yaml -->"},
    ]
    runner.say(runner.folder / "gh.json", others)
    comment(runner, "a.yaml", "first\n")
    comment(runner, "b.yaml", "of b\n")
    comment(runner, "a.yaml", "second\n")
    assert runner.comments() == {
        1: "weighin: I like it",
        2: "coverage <!-- weighin: a.yaml -->",
        102: "<!-- weighin: a.yaml -->\nsecond\n",
        103: "<!-- weighin: b.yaml -->\nof b\n",
    }
    assert [call[2] for call in runner.calls() if call[1] == "--method"] == [
        "POST",
        "POST",
        "PATCH",
    ]


def test_the_name_of_a_suite_cannot_end_the_marker(runner: Runner) -> None:
    comment(runner, "a --> <b>$(touch x)`touch x`.yaml", "text\n")
    [body] = runner.comments().values()
    assert body == "<!-- weighin: a -> <b>$(touch x)`touch x`.yaml -->\ntext\n"
    assert not (runner.folder / "x").exists()


def test_the_action_installs_itself_or_what_it_is_told_to(runner: Runner) -> None:
    assert runner.step("Install weighin", PACKAGE="") == 0, runner.log
    assert runner.step("Install weighin", PACKAGE="weighin==0.1.0") == 0, runner.log
    assert runner.installs() == [f"-m pip install {ROOT}", "-m pip install weighin==0.1.0"]
    assert ACTION["inputs"]["package"]["default"] == ""


def test_what_the_action_and_its_example_use_is_pinned_by_commit() -> None:
    used = [
        line.split("uses:")[1].strip()
        for page in ("action.yml", "docs/ci.md")
        for line in (ROOT / page).read_text().splitlines()
        if "uses:" in line and "OWNER/weighin@COMMIT" not in line
    ]
    assert len(used) == 3
    for one in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} +# v\d+\.\d+\.\d+", one)


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
