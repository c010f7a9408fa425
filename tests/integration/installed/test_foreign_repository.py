"""docs/ci.md, followed word by word in a repository that is not ours: files, commands, the action's steps.

The clone of weighin cannot be seen: an empty file system lies over its folder. Weighin comes from its
wheel, and the packages that it needs are those of the tests.
"""

import re
import shlex
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_action import ACTION, Runner
from typed import ROOT
from wheels import environment

pytestmark = [pytest.mark.root, pytest.mark.slow]

PAGE = (ROOT / "docs" / "ci.md").read_text()
HIDDEN = 'mount --bind "$0" "$1" && mount -t tmpfs none "$2" && shift 2 && exec "$@"'
LOADER = ".github/my_loader.py"
WORKFLOW = ".github/workflows/memory.yaml"
BASELINE = ".github/weighin-baseline.json"


def blocks(pattern: str) -> list[Any]:
    """Return the blocks of code of the page, where the pattern names what is before each."""
    return re.findall(rf"{pattern}\n(.*?)```", PAGE, re.DOTALL)


FILES: dict[str, str] = dict(blocks(r"```(?:python|yaml)\n# (\S+/\S+)"))
"""The files of the page: blocks whose first line is a comment with a path."""


def inputs() -> dict[str, str]:
    """The inputs that the page's workflow gives to the action, on a pull request."""
    job: dict[str, Any] = yaml.safe_load(FILES[WORKFLOW])["jobs"]["memory"]
    given: dict[str, str]
    [given] = [step["with"] for step in job["steps"] if "OWNER/weighin" in step.get("uses", "")]
    assert given["update"] == "${{ github.event_name == 'workflow_dispatch' }}"
    return given | {"update": "false"}


@pytest.fixture(scope="module", name="runner")
def _runner(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Runner:
    """A runner in a repository with the page's files, with weighin as the action installs it."""
    folder = tmp_path_factory.mktemp("foreign")
    (packages := folder / "packages").mkdir()
    python = environment(folder / "env", packages, with_pip=True)
    repository = folder / "repository"
    for name, text in FILES.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    before = ("unshare", "--mount", "bash", "-c", HIDDEN)
    seen = (sysconfig.get_path("purelib"), str(packages), str(ROOT))
    runner = Runner(repository, folder / "cache", python.parent, before=(*before, *seen))
    runner.environment |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "RUNNER_TEMP": str(folder)}
    runner.environment |= {"TMPDIR": str(tmp_path_factory.mktemp("temporary")), "COLUMNS": "100"}
    runner.environment["WEIGHIN_LOCK"] = str(folder / "lock")
    assert runner.step("Install weighin", PACKAGE=str(wheel)) == 0, runner.log
    assert (runner.run("ls", "-A", str(ROOT)), runner.log) == (0, "")
    assert typed(runner, "python -c 'import weighin; print(weighin.__file__)'") == 0
    assert runner.log.startswith(f"{folder}/env/"), runner.log
    runner.inputs = inputs()
    return runner


def typed(runner: Runner, line: str) -> int:
    """Type a command in the repository; return its exit code."""
    return runner.run(*shlex.split(line))


@pytest.fixture(name="wasteful")
def _wasteful(runner: Runner) -> Iterator[None]:
    """The page's loader as the page makes it worse."""
    loader = runner.folder / LOADER
    good = loader.read_text()
    bad = good.replace(", mmap=True", "").replace(", assign=True", "")
    assert bad != good
    loader.write_text(bad)
    yield
    loader.write_text(good)


def checked(runner: Runner, **changes: str) -> str:
    """Measure, check, and return the output "passed"."""
    assert runner.step("Measure") == 0, runner.log
    runner.inputs = inputs() | changes
    assert runner.step("Check") == 0, runner.log
    return runner.outputs["passed"]


def test_the_first_measurement_passes(runner: Runner) -> None:
    [block] = blocks(r"\*\*3\. .*?```")
    bench, check = [line.partition(" #")[0].strip() for line in block.splitlines()]
    assert typed(runner, bench) == 0, runner.log
    assert typed(runner, check) == 0, runner.log
    assert runner.log.splitlines()[-1] == "gate passed: 1 within budget"


def test_the_action_gives_the_first_baseline_then_passes(runner: Runner) -> None:
    assert checked(runner) == "false"
    assert (
        "::error title=baseline::take weighin-baseline.json from the artifact of this run, and commit it"
        f" as {BASELINE}"
    ) in runner.log
    run = Path(runner.outputs["run"])
    (runner.folder / BASELINE).write_text((run / "weighin-baseline.json").read_text())
    assert checked(runner) == "true"
    assert "::error" not in runner.log
    run = Path(runner.outputs["run"])
    assert {"report.html", "check.md", "check.xml", "check.json"} <= {
        one.name for one in run.iterdir()
    }
    summary = Path(runner.environment["GITHUB_STEP_SUMMARY"]).read_text()
    assert summary.endswith((run / "check.md").read_text())


def test_the_action_fails_for_a_wasteful_loader_until_it_is_accepted(
    runner: Runner, wasteful: None
) -> None:
    assert checked(runner) == "false"
    assert f"::error file={BASELINE},title=regressed%3A mine my_loader" in runner.log
    assert re.search(r"above_import: .*; grew in phase read by 1[23]\d\.\d MiB", runner.log), (
        runner.log
    )
    assert "title=over budget%3A mine my_loader" in runner.log
    assert runner.step("Fail where the gate did") == 1
    assert checked(runner, update="true", budgets="") == "true"
    assert "::notice title=baseline::take weighin-baseline.json from the artifact" in runner.log
    made = Path(runner.outputs["run"]) / "weighin-baseline.json"
    assert made.read_text() != (runner.folder / BASELINE).read_text()


@pytest.mark.nightly
def test_the_pytest_example_passes(runner: Runner) -> None:
    [text] = blocks(r"## In pytest\n.*?```python")
    (runner.folder / "test_memory.py").write_text(text)
    pytest_ = "python -m pytest -q -p no:cacheprovider --weighin-isolation process test_memory.py"
    code = typed(runner, pytest_)
    assert (code, runner.log.splitlines()[-1].split(" in ")[0]) == (0, "3 passed"), runner.log


def test_the_weekly_job_measures_the_page_s_suite_of_pinned_and_newest_releases() -> None:
    workflow: dict[str, Any] = yaml.safe_load(FILES[".github/workflows/releases.yaml"])
    steps = workflow["jobs"]["releases"]["steps"]
    [given] = [step["with"] for step in steps if "OWNER/weighin" in step.get("uses", "")]
    assert set(given) <= set(ACTION["inputs"])
    assert yaml.safe_load(FILES[given["suite"]])["with"] == ["pinned", "latest"]


def test_the_page_names_the_inputs_of_the_action() -> None:
    [section] = re.findall(r"^## GitHub\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert set(ACTION["inputs"]) <= {*inputs(), *re.findall(r"`(\w+)`", section)}
