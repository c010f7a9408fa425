"""docs/ci.md, followed word by word in a repository that is not ours: files, commands, the action's steps.

The clone of weighin cannot be seen: an empty file system lies over its folder. Weighin comes from its
wheel, and the packages that it needs are those of the tests.
"""

import re
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import wheels
import yaml
from test_action import Runner

pytestmark = [pytest.mark.root, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text()
HIDDEN = 'mount --bind "$0" "$1" && mount -t tmpfs none "$2" && shift 2 && exec "$@"'
LOADER = ".github/my_loader.py"
WORKFLOW = ".github/workflows/memory.yaml"
BASELINE = ".github/weighin-baseline.json"


def files() -> dict[str, str]:
    """The files of the page: blocks whose first line is a comment with a path."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+/\S+)\n(.*?)```", PAGE, re.DOTALL)
    return dict(blocks)


def commands() -> list[str]:
    """The commands of the step that measures for the first time."""
    [block] = re.findall(r"\*\*3\. .*?```\n(.*?)```", PAGE, re.DOTALL)
    return [line.partition(" #")[0].strip() for line in block.splitlines()]


def inputs() -> dict[str, str]:
    """The inputs that the page's workflow gives to the action, on a pull request."""
    job: dict[str, Any] = yaml.safe_load(files()[WORKFLOW])["jobs"]["memory"]
    given: dict[str, str]
    [given] = [step["with"] for step in job["steps"] if "OWNER/weighin" in step.get("uses", "")]
    assert given["update"] == "${{ github.event_name == 'workflow_dispatch' }}"
    return given | {"update": "false"}


@pytest.fixture(scope="module", name="runner")
def _runner(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Runner:
    """A runner in a repository with the page's files, with weighin as the action installs it."""
    folder = tmp_path_factory.mktemp("foreign")
    packages = folder / "packages"
    packages.mkdir()
    python = wheels.empty(folder / "env", packages, with_pip=True)
    repository = folder / "repository"
    for name, text in files().items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    before = ("unshare", "--mount", "bash", "-c", HIDDEN)
    seen = (sysconfig.get_path("purelib"), str(packages), str(ROOT))
    runner = Runner(repository, folder / "cache", python.parent, before=(*before, *seen))
    runner.environment |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "RUNNER_TEMP": str(folder)}
    runner.environment |= {"TMPDIR": str(tmp_path_factory.mktemp("temporary")), "COLUMNS": "100"}
    runner.environment["WEIGHIN_LOCK"] = str(folder / "lock")
    assert runner.step("Install weighin", PACKAGE=str(wheel)) == 0, runner.log
    runner.inputs = inputs()
    return runner


def typed(runner: Runner, line: str) -> tuple[int, str]:
    """Type a command in the repository; return its exit code and what it prints."""
    done = subprocess.run(
        [*runner.before, *shlex.split(line)],
        env=runner.environment,
        cwd=runner.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(name="wasteful")
def _wasteful(runner: Runner) -> Any:
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


def test_the_clone_is_out_of_sight(runner: Runner) -> None:
    code, text = typed(runner, f"ls -A {ROOT}")
    assert (code, text) == (0, "")
    code, text = typed(runner, "python -c 'import weighin; print(weighin.__file__)'")
    assert text.startswith(runner.environment["PATH"].split("/bin:")[0]), text


def test_the_first_measurement_passes(runner: Runner) -> None:
    bench, check = commands()
    code, text = typed(runner, bench)
    assert code == 0, text
    code, text = typed(runner, check)
    assert (code, text.splitlines()[-1]) == (0, "gate passed: 1 within budget"), text


@pytest.mark.nightly  # by day in the action
def test_a_wasteful_loader_is_over_the_budget(runner: Runner, wasteful: None) -> None:
    bench, check = (line.replace("results/first", "results/worse") for line in commands())
    assert typed(runner, bench)[0] == 0
    code, text = typed(runner, check)
    assert (code, text.splitlines()[-1]) == (1, "gate failed: 1 over budget"), text


def test_the_action_gives_the_first_baseline_then_passes(runner: Runner) -> None:
    assert checked(runner) == "false"
    assert (
        "::error title=baseline::take weighin-baseline.json from the artifact of this run, and commit it"
        f" as {BASELINE}"
    ) in runner.log
    made = Path(runner.outputs["run"]) / "weighin-baseline.json"
    (runner.folder / BASELINE).write_text(made.read_text())
    assert checked(runner) == "true"
    assert "::error" not in runner.log


def test_the_action_fails_for_a_wasteful_loader_until_it_is_accepted(
    runner: Runner, wasteful: None
) -> None:
    assert checked(runner) == "false"
    assert (
        "::error file=.github/weighin-baseline.json,title=regressed%3A mine my_loader" in runner.log
    )
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
def test_weights_of_its_own(runner: Runner) -> None:
    suite = runner.folder / ".github" / "weighin.yaml"
    weights = "tests/weights.pt"
    (runner.folder / "tests").mkdir(exist_ok=True)
    made = (
        "import torch; from mypackage.nets import build;"
        f" torch.save(build(2048, 8).state_dict(), {weights!r})"
    )
    code, text = typed(runner, f"python -c {shlex.quote(made)}")
    assert code == 0, text
    own = yaml.safe_load(suite.read_text())
    own["models"][0]["checkpoint"] = weights
    suite.with_name("own.yaml").write_text(yaml.safe_dump(own))
    code, text = typed(runner, "weighin bench --suite .github/own.yaml --out results/own")
    assert code == 0, text
    assert '"ok"' in (runner.folder / "results" / "own" / "records.jsonl").read_text()


@pytest.mark.nightly
def test_the_pytest_example_passes_with_a_torch_that_is_larger_than_the_model(
    runner: Runner,
) -> None:
    [text] = re.findall(r"## In pytest\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    text += (
        "\n\ndef test_the_import_is_large(weighin):\n    run = weighin.measure(build, 1, depth=1)\n"
    )
    text += "    assert run.baseline.rss_bytes > 512 * 2**20\n"
    (runner.folder / "test_memory.py").write_text(text)
    [site] = (runner.folder.parent / "env" / "lib").glob("*/site-packages")
    (site / "large.py").write_text("libraries = b'x' * (512 * 2**20)\n")
    (site / "large.pth").write_text("import large\n")  # as much as a CUDA build of torch
    code, said = typed(
        runner, "python -m pytest -q -p no:cacheprovider --weighin-isolation process test_memory.py"
    )
    (site / "large.pth").unlink()
    assert (code, said.splitlines()[-1].split(" in ")[0]) == (0, "4 passed"), said


def test_the_page_names_the_inputs_of_the_action() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    [section] = re.findall(r"^## GitHub\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert set(action["inputs"]) <= {*inputs(), *re.findall(r"`(\w+)`", section)}
