"""The files that a repository has beside its code agree with the code, and with each other."""

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from weighin import __version__
from weighin.gate.rules import parse_budget
from weighin.settings.definition import read_suite
from weighin.suite import registry

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
    set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}
)
GUIDES = ("CONTRIBUTING.md", "SECURITY.md")
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
        "actions/checkout": 1,
        "actions/setup-python": 1,
        "actions/upload-artifact": 1,
    }


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


def test_the_gate_measures_a_suite_with_budgets_that_weighin_reads() -> None:
    [job] = read(GITHUB / "workflows" / "gate.yml")["jobs"].values()
    [step] = [step for step in job["steps"] if step["uses"] == "./"]
    known = read(ROOT / "action.yml")["inputs"]
    assert set(step["with"]) <= set(known)
    suite = read_suite(ROOT / step["with"]["suite"])
    names = {info.name for info, _ in registry.chosen(suite)}
    assert registry.model(suite.models[0].source).name == "gpt2-small"
    for line in step["with"]["budgets"].splitlines():
        pattern = parse_budget(line).selector
        assert pattern in {*names, "*"}


@pytest.mark.parametrize("page", GUIDES)
def test_every_file_that_a_guide_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(rf"`((?:{OURS})/[\w./-]+)`", text)
    linked = [path.partition("#")[0] for path in re.findall(r"\]\(((?!https:)[^)]+)\)", text)]
    missing = [
        path for path in [*named, *linked] if "NAME" not in path and not (ROOT / path).exists()
    ]
    assert missing == []


def test_the_headings_that_a_guide_links_to_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path, anchor in re.findall(r"\]\(([\w./]+)#([\w-]+)\)", text):
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


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
    assert {hook["id"] for hook in ruff["hooks"]} == {"ruff-check", "ruff-format"}
    assert [hook["entry"] for hook in local["hooks"]] == [".venv/bin/mypy"]


def test_ci_makes_its_environment_with_the_python_of_the_distribution() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert any(line.split("  #")[0] == "export PYTHON=/usr/bin/python3" for line in lines)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_is_one_that_github_shows(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    for field in form["body"]:
        assert field["type"] in {"input", "textarea"}
        assert field["attributes"]["label"]
