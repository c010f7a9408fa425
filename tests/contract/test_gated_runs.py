"""``weighin check``, ``compare`` and ``history`` over published runs, in every form that they print."""

import json
import shlex
from pathlib import Path
from typing import Any

import outside
import pytest
from outside import RUNS, weighin
from snapshots import Compare

BASE = "gpt2-xl-16GiB"
MIXED = ("gpt2-medium-ranks", "releases-torch", "releases-transformers")
"""Runs of several numbers of threads or torch, or with failed loads, of which no baseline can be made."""
FACTORS = {
    "baseline": 1.002, "sequential": 1.02, "meta_copy": 1.2, "mmap_assign": 0.8, "streaming": 1.0,
}  # fmt: skip
"""By how much the memory of each strategy is larger in a later run; per_param was not measured then."""


def later(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return a record of a run on another day, in which the code had changed."""
    name = record["cell"]["strategy"]
    if name not in FACTORS:
        return None
    for peaks in (record["peaks"], *record["phases"]):
        for key, value in peaks.items():
            if value and "peak" in key + "peaks" and key.endswith("_bytes"):
                peaks[key] = round(value * FACTORS[name])
    record["started_at"] = record["started_at"].replace("2026-", "2027-")
    if name == "streaming":
        record |= {"outcome": "timeout", "message": "not done after 600 s", "ready_ns": None}
    return record


def elsewhere(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of another kind of machine."""
    record["environment"] |= {"cpu": "Another CPU", "cpus": 64}
    return record


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a published run, a run of a later day, and the baseline of the first."""
    outside.published(BASE, tmp_path, "before")
    outside.published(BASE, tmp_path, "after")
    outside.changed(tmp_path / "after", later)
    update = weighin(tmp_path, "check", "before", "--baseline", "baseline.json", "--update")
    assert update.code == 0
    return tmp_path


@pytest.mark.parametrize("name", [name for name in RUNS if name not in MIXED])
def test_a_run_passes_beside_a_baseline_made_of_it(name: str, tmp_path: Path) -> None:
    outside.published(name, tmp_path, "run")
    made = ("check", "run", "--baseline", "baseline.json")
    assert weighin(tmp_path, *made, "--update").code == 0
    again = weighin(tmp_path, *made, "--json", "-")
    assert again.code == 0
    assert again.data["passed"]
    assert {one["verdict"] for one in again.data["lines"]} <= {"same", "expected"}


def test_a_run_that_changed(runs: Path, same: Compare) -> None:
    words = """check after --baseline baseline.json
        --json check.json --junit check.xml --markdown check.md --github"""
    summary = runs / "summary.md"
    printed = weighin(runs, *words.split(), GITHUB_STEP_SUMMARY=str(summary))
    assert printed.code == 1
    marked = [line for line in printed.out.splitlines() if line.startswith("::")]
    same("gate/check.txt", outside.flat(json.loads((runs / "check.json").read_text())))
    same("gate/annotations.txt", "".join(f"{line}\n" for line in marked))
    same("gate/junit.xml", (runs / "check.xml").read_text())
    same("gate/summary.md", (runs / "check.md").read_text())
    assert summary.read_text() == (runs / "check.md").read_text()
    same("gate/notes.txt", printed.err)


BESIDE = {
    "gpt2-medium-floors-again": "gpt2-medium-floors", "gpt2-xl-16GiB": "gpt2-xl-8GiB",
    "after-the-load": "after-the-load-floors",
}  # fmt: skip


@pytest.mark.parametrize("after", BESIDE)
def test_a_published_run_beside_another(after: str, tmp_path: Path, same: Compare) -> None:
    before, made = outside.published(BESIDE[after], tmp_path), ("--baseline", "baseline.json")
    outside.published(after, tmp_path)
    assert weighin(tmp_path, "check", before, *made, "--update").code == 0
    checked = weighin(tmp_path, "check", after, *made, "--json", "-")
    found = checked.data
    found["lines"] = [one for one in found["lines"] if one["verdict"] != "same"]
    same(f"gate/{after}.txt", f"exit code {checked.code}\n{outside.flat(found)}")


PUBLISHED = {
    "budgets": """check gpt2-xl-8GiB --budget 'peak_rss <= 1.1 x model + 64MiB above import'
        --budget 'streaming: anon <= 7GiB' --budget 'ready <= 20 s' --budget 'above_import <= 1 x model'
        --expect baseline=oom_killed,streaming=timeout --all --json -""",
    "compare-floors": """compare gpt2-medium-floors gpt2-medium-floors-again
        --metrics above_import --json -""",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs(name: str, tmp_path: Path, same: Compare) -> None:
    words = shlex.split(PUBLISHED[name])
    for each in {*RUNS} & {*words}:
        outside.published(each, tmp_path)
    printed = weighin(tmp_path, *words)
    same(f"gate/{name}.txt", f"exit code {printed.code}\n{outside.flat(printed.data)}{printed.err}")


@pytest.mark.parametrize("by", ["run", "machine"])
def test_runs_side_by_side(by: str, runs: Path, same: Compare) -> None:
    if by == "machine":
        outside.changed(runs / "after", elsewhere)
    to = ("--by", by, "--json", "-", "--markdown", "side.md")
    printed = weighin(runs, "compare", "before", "after", *to)
    assert printed.code == 0
    same(f"gate/compare-{by}.txt", outside.flat(printed.data))
    same(f"gate/compare-{by}.md", (runs / "side.md").read_text())


def test_a_metric_over_time(runs: Path, same: Compare) -> None:
    """The steps of a level are left out, which an estimate finds."""
    found = weighin(runs, "history", ".", "--metric", "anon", "--json", "-").data
    for line in found["series"]:
        del line["steps"]
    same("gate/history.txt", outside.flat(found))
