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
from typed import ROOT

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


def test_every_expression_names_something_that_is_there() -> None:
    text = (ROOT / "action.yml").read_text()
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(ACTION["inputs"])
    ids = {step["id"] for step in STEPS if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.outputs", text)) == ids == {"measure", "check"}


def test_no_expression_is_written_into_a_script() -> None:
    scripts = [step for step in STEPS if "run" in step]
    assert len(scripts) == 5
    assert not [step for step in scripts if "${{" in step["run"] or step["shell"] != "bash"]


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
        self.environment = {
            "PATH": ":".join(map(str, [*programs, "/usr/bin", "/bin"])),
            "HOME": str(folder),
            "WEIGHIN_CACHE": str(cache),
            "RUNNER_TEMP": str(folder / "temp"),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_RUN_ID": "7",
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        }

    def run(self, *words: str, **variables: str) -> int:
        """Run a command; returns its exit code. ``log`` then has what it printed."""
        done = subprocess.run(
            [*self.before, *words],
            env=self.environment | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        self.log = done.stdout + done.stderr
        return done.returncode

    def step(self, name: str, **inputs: str) -> int:
        """Run one step; returns its exit code. ``inputs`` stand for its expressions.

        Other expressions are the inputs of the workflow, or their defaults, and the outputs.
        """
        [step] = [one for one in STEPS if one["name"] == name]
        expressions = step.get("env", {})
        assert set(inputs) <= set(expressions)
        given = {key: self.value(one) for key, one in expressions.items() if key not in inputs}
        shell = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
        code = self.run(*shell, step["run"], **given, **inputs)
        output = Path(self.environment["GITHUB_OUTPUT"])
        if output.exists():
            self.outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        return code

    def value(self, expression: str) -> str:
        """The value of "${{ inputs.NAME }}" or "${{ steps.ID.outputs.NAME }}"."""
        match = re.fullmatch(r"\$\{\{ (inputs|steps)\.(?:\w+\.outputs\.)?(\w+) \}\}", expression)
        assert match, expression
        if match[1] == "steps":
            return self.outputs[match[2]]
        return self.inputs.get(match[2], str(ACTION["inputs"][match[2]].get("default", "")))


@pytest.fixture(name="runner")
def _runner(tmp_path: Path, disk: Path) -> Runner:
    """A runner with this weighin, and with a gh and a pip that reach no network."""
    (tmp_path / "tools").mkdir()
    for name, text in {"gh": GH, "python3": PYTHON}.items():
        (tmp_path / "tools" / name).write_text(text)
        (tmp_path / "tools" / name).chmod(0o755)
    return Runner(tmp_path, disk / "cache", tmp_path / "tools", Path(sys.executable).parent)


def comment(runner: Runner, suite: str, text: str) -> dict[str, Any]:
    """Let the action comment, and return what GitHub then has."""
    store, run = runner.folder / "gh.json", runner.folder / "run"
    if not store.exists():
        store.write_text(json.dumps({"comments": [], "calls": []}))
    run.mkdir(exist_ok=True)
    (run / "check.md").write_text(text)
    inputs = {"RUN": str(run), "REPOSITORY": "me/mine", "NUMBER": "12", "SUITE": suite}
    assert runner.step("Comment", GH_TOKEN="t", **inputs) == 0, runner.log
    return dict(json.loads(store.read_text()))


def test_each_suite_has_one_comment_and_no_other_is_touched(runner: Runner) -> None:
    others = [
        {"id": 1, "body": "weighin: I like it"},
        {"id": 2, "body": "coverage <!-- weighin: a.yaml -->"},
    ]
    (runner.folder / "gh.json").write_text(json.dumps({"comments": others, "calls": []}))
    comment(runner, "a.yaml", "first\n")
    comment(runner, "b.yaml", "of b\n")
    told = comment(runner, "a.yaml", "second\n")
    assert told["comments"] == [
        *others,
        {"id": 102, "body": "<!-- weighin: a.yaml -->\nsecond\n"},
        {"id": 103, "body": "<!-- weighin: b.yaml -->\nof b\n"},
    ]
    methods = [call[2] for call in told["calls"] if call[1] == "--method"]
    assert methods == ["POST", "POST", "PATCH"]


def test_the_name_of_a_suite_cannot_end_the_marker(runner: Runner) -> None:
    [one] = comment(runner, "a --> <b>$(touch x)`touch x`.yaml", "text\n")["comments"]
    assert one["body"] == "<!-- weighin: a -> <b>$(touch x)`touch x`.yaml -->\ntext\n"
    assert not (runner.folder / "x").exists()


def test_the_action_installs_itself_or_what_it_is_told_to(runner: Runner) -> None:
    assert runner.step("Install weighin", PACKAGE="") == 0, runner.log
    assert runner.step("Install weighin", PACKAGE="weighin==0.1.0") == 0, runner.log
    asked = (runner.folder / "pip.txt").read_text().splitlines()
    assert asked == [f"-m pip install {ROOT}", "-m pip install weighin==0.1.0"]
    assert ACTION["inputs"]["package"]["default"] == ""


FAILING = '"""Fail."""\n\ndef load(job):\n    raise KeyError(1)\n'
CHECKS = {
    "failed": ("", "", "::error title=not ok%3A gpt2-tiny failing"),
    "expected": ("timeout_s: 0.001\n", "baseline=timeout", "expected baseline: timeout"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_did_not_end_well_is_named_by_the_check(runner: Runner, name: str) -> None:
    more, expect, said = CHECKS[name]
    (runner.folder / "failing.py").write_text(FAILING)
    suite = "models: gpt2-tiny\nstrategies: [baseline, ./failing.py]\nisolation: process\n"
    (runner.folder / "suite.yaml").write_text(suite + more)
    assert runner.step("Measure", SUITE="suite.yaml") == 0, runner.log
    given = {"RUN": runner.outputs["run"], "BUDGETS": "baseline: load <= 9 s", "EXPECT": expect}
    assert runner.step("Check", BASELINE="", **given) == 0, runner.log
    assert runner.outputs["passed"] == "false"
    assert said in runner.log


def test_a_check_that_cannot_be_made_fails_at_once(runner: Runner) -> None:
    given = {"RUN": str(runner.folder), "BASELINE": "no.yaml", "BUDGETS": "", "EXPECT": ""}
    assert runner.step("Check", **given) == 2
    assert "passed" not in runner.outputs
