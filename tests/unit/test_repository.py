"""The files that a repository has beside its code, and its code as text, keep to what they say."""

import ast
import os
import re
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from weighin import __version__

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
USE = ("bench", "floor", "peers", "report", "check", "recommend", "doctor")
OURS = "harness|strategies|configs|docker|docs|results|tests|benchmarks|pages"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def pinned(name: str, version: str) -> bool:
    return f"{name}=={version}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_every_action_is_pinned_to_one_commit_everywhere() -> None:
    commits: dict[str, set[str]] = {}
    for page in (ROOT / "action.yml", ROOT / "docs" / "ci.md", *WORKFLOWS):
        for line in page.read_text().splitlines():
            _, found, used = line.partition("uses:")
            if not found or used.strip() == "./" or "OWNER/weighin@COMMIT" in used:
                continue
            match = re.fullmatch(r" (actions/[a-z-]+)@([0-9a-f]{40} +# v\d+\.\d+\.\d+)", used)
            assert match, f"{page.name}: {line}"
            commits.setdefault(match[1], set()).add(" ".join(match[2].split()))
    assert {name: len(found) for name, found in commits.items()} == {
        "actions/checkout": 1, "actions/setup-python": 1, "actions/upload-artifact": 1,
    }  # fmt: skip


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_an_end(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"]["contents"] == "read"
    assert "pull_request_target" not in str(workflow[True])  # YAML reads the key `on` as true
    most_minutes = 360 if path.stem == "nightly" else 60
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= most_minutes
        commands = [step["run"] for step in job["steps"] if "run" in step]
        commands += job.get("strategy", {}).get("matrix", {}).get("command", [])
        targets = [one.split()[1] for one in commands if one.startswith("make ")]
        assert set(targets) <= set(
            re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        )


def test_every_file_and_heading_that_a_guide_names_is_there() -> None:
    for page in ("CONTRIBUTING.md", "SECURITY.md"):
        text = (ROOT / page).read_text()
        named = re.findall(rf"`((?:{OURS})/[\w./-]+)`", text)
        links = re.findall(r"\]\(((?!https:)[^)#]*)(?:#([\w-]+))?\)", text)
        paths = [*named, *(path for path, _ in links)]
        assert [one for one in paths if "NAME" not in one and not (ROOT / one).exists()] == []
        for path, anchor in links:
            if anchor:
                linked = (ROOT / (path or page)).read_text()
                headings = re.findall(r"^#+ (.+)$", linked, re.MULTILINE)
                assert anchor in {one.lower().replace(" ", "-") for one in headings}


def test_the_newest_version_of_the_changelog_is_the_packages_and_the_citations() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert newest
    citation = read(ROOT / "CITATION.cff")
    assert newest[1] == __version__ == citation["version"]
    assert date.fromisoformat(newest[2]) == citation["date-released"]


def test_the_commit_hooks_have_the_versions_of_make_lint() -> None:
    ruff, local = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert pinned("ruff", ruff["rev"].removeprefix("v"))
    assert [hook["entry"] for hook in local["hooks"]] == [".venv/bin/mypy"]


# -- the page of threats


def test_each_threat_on_the_page_has_tests_that_exist() -> None:
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
    known = {
        found
        for path in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    page = (ROOT / "docs" / "security.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in page if line.startswith("| ")]
    threats = [row for row in rows if row[0] != "threat"]
    assert len(threats) > 20
    for threat, _, _, tests in threats:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, threat
        assert ", ".join(f"`{one}`" for one in named) == tests.strip(), threat
        assert set(named) <= known, threat


def test_our_code_asks_torch_for_weights_only() -> None:
    paths = [path for folder in ("harness", "strategies") for path in (ROOT / folder).rglob("*.py")]
    calls = [
        (f"{path}:{node.lineno}", {one.arg: ast.unparse(one.value) for one in node.keywords})
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert len(calls) > 5
    assert [place for place, named in calls if named.get("weights_only") != "True"] == []


# -- tools of developers


def test_the_commands_for_use_install_no_tools_of_developers() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    alone = {"help", "clean", "test-versions", "test-all"}  # test-all begins with test
    plain = "python3 harness/set_up.py"
    for target in {*targets} - alone:
        command = ["make", "--dry-run", "--always-make", "-C", str(ROOT), target]
        variables = {"PATH": os.environ["PATH"]}  # `make test` exports its own settings
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        used = [line for line in done.stdout.splitlines() if "harness/set_up.py" in line]
        assert used == ([plain] if target in USE else [plain, f"{plain} --dev"]), target


def test_the_tests_of_other_versions_are_there() -> None:
    program = (ROOT / "tests/versions/__main__.py").read_text()
    (listed,) = re.findall(r"^TESTED: Final = \((.*?)^\)", program, re.DOTALL | re.MULTILINE)
    named = [ROOT / f"tests/unit/test_{name}.py" for name in re.findall(r'"(\w+)"', listed)]
    assert len(named) > 20
    assert [path for path in named if not path.exists()] == []
