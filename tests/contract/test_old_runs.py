"""Runs and baselines of an older weighin: resumed, checked, and refused where that would be wrong."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from old_files import BEFORE, ROOT, put_cache, put_run
from outside import PUBLISHED, typed
from snapshots import Compare

from weighin import results

pytestmark = pytest.mark.usefixtures("here")


RECORDS = Path("run/records.jsonl")
PLAN = Path("run/plan.json")


def _records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def _resume(verb: str, out: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Resume the run, which prints ``out`` first; return its old and its new records; the old ones are as they were."""
    before, cut_off, _ = RECORDS.read_bytes().rpartition(b"\n")
    ended = typed(verb, "--resume", "run", "--trust")
    assert ended.code == 0, ended.err
    assert ended.out.startswith(out)
    assert RECORDS.read_bytes().startswith(before + cut_off)
    records, old = _records(), before.count(b"\n") + 1
    return records[:old], records[old:]


def test_bench_measures_the_rest_of_an_old_run() -> None:
    put_cache(Path("cache"))
    put_run("bench", Path("run"))
    old, (new,) = _resume("bench")
    assert [one["cell"]["repeat"] for one in old] == [0, 0, 1]
    assert (new["cell"]["strategy"], new["outcome"]) == ("per_param", "ok")
    assert new["cell"] == old[1]["cell"] | {"repeat": 1, "releases": ""}


def _later() -> None:
    """Let the plan have settings that this weighin does not know."""
    plan = json.loads(PLAN.read_text())
    plan["settings"]["colour"] = plan["colour"] = "red"
    PLAN.write_text(json.dumps(plan))


def _torn() -> None:
    """Let the last record be cut off, as after a power cut."""
    with RECORDS.open("ab") as file:
        file.write(b'{"schema": 1, "cell": {"mod')


@pytest.mark.parametrize("change", [lambda: None, _later, _torn], ids=["as it was", "later", "torn"])  # fmt: skip
def test_run_measures_the_rest_of_an_old_run_once(change: Callable[[], object]) -> None:
    put_run("run", Path("run"))
    change()
    (old,), (new,) = _resume("run", out="line\n")
    assert new["outcome"] == "ok"
    assert new["cell"] == old["cell"] | {"repeat": 1, "releases": ""}
    assert len(new["ran"]["marks"]) == len(old["ran"]["marks"]) == 1
    assert _resume("run")[1] == []


@pytest.mark.cgroup
def test_floor_goes_on_with_an_old_search() -> None:
    put_run("floor", Path("run"))
    old, new = _resume("floor")
    assert 0 < len(new) < 12
    tried, again = (
        {(one["cell"]["ram_limit_bytes"], one["cell"]["repeat"]) for one in some}
        for some in (old, new)
    )
    assert not tried & again
    right = [one["cell"]["ram_limit_bytes"] for one in old + new if one["outcome"] == "ok"]
    assert 50 << 20 < min(filter(None, right)) < 80 << 20


@pytest.mark.parametrize("verb", ["bench", "run", "floor"])
def test_a_plan_of_a_later_weighin_is_refused_and_its_records_are_read(verb: str) -> None:
    put_run(verb, Path("run"))
    records = RECORDS.read_bytes()
    PLAN.write_text(PLAN.read_text().replace('"schema": 1', '"schema": 2', 1))
    ended = typed(verb, "--resume", "run", "--trust")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: run/plan.json: written by a newer weighin (schema 2;")
    assert RECORDS.read_bytes() == records
    ended = typed("report", "run", "--format", "csv")
    assert "weighin cannot tell whether the run is complete" in ended.err
    assert len(Path("run/summary.csv").read_text().splitlines()) > 1


@pytest.mark.parametrize("verb", ["bench", "run", "floor"])
def test_a_report_says_how_to_go_on(verb: str) -> None:
    put_run(verb, Path("run"))
    ended = typed("report", "run", "--format", "csv")
    assert ended.code == 0
    assert f"weighin {verb} --resume run measures the rest" in ended.err


CHECKS = {
    "the run itself": ("gpt2-xl-8GiB", "gpt2-xl-8GiB", ()),
    "another run": ("gpt2-medium-floors", "gpt2-medium-floors-again", ()),
    "commands": ("converting-files", "converting-files", ()),
    "other limits": ("gpt2-xl-8GiB", "gpt2-xl-16GiB", ()),
    "another kind of run": ("converting-files", "gpt2-xl-8GiB", ()),
    "another outcome": ("gpt2-xl-8GiB", "gpt2-xl-8GiB", ("--expect", "streaming=timeout")),
    "a rule of the user": ("rules", "gpt2-xl-8GiB", ()),
    "one metric": ("gpt2-medium-floors", "gpt2-medium-floors-again", ("--metrics", "ready")),
}


@pytest.mark.parametrize("name", CHECKS)
def test_an_old_baseline_judges_as_before(name: str, same: Compare) -> None:
    baseline, run, more = CHECKS[name]
    file = BEFORE / "baselines" / f"{baseline}.yaml"
    ended = typed("check", PUBLISHED / run, "--baseline", file, *more)
    said = f"exit code {ended.code}\n{ended.out}{ended.err}".replace(str(ROOT), "CHECKOUT")
    same(f"old_runs/{name}.txt", "".join(f"{line.rstrip()}\n" for line in said.splitlines()))


def test_an_old_baseline_is_kept_where_nothing_has_changed() -> None:
    file = Path("baseline.yaml")
    file.write_bytes((BEFORE / "baselines/converting-files.yaml").read_bytes())
    before = file.read_text()
    ended = typed("check", PUBLISHED / "converting-files", "--baseline", file, "--update")
    assert (ended.code, file.read_text()) == (0, before)
    assert "baseline.yaml is up to date" in ended.out


INCOMPLETE = (
    "report run --format md,html,csv,bmf,gha --json -",
    "check run --budget 'peak_rss <= 100GiB' --json - --junit check.xml",
    "check run --budget 'peak_rss <= 100GiB' --partial", "check run --baseline part.yaml --update",
    "check run --baseline part.yaml --update --partial",
    "compare run run --markdown run/compared.md --json -", "history . --json -",
)  # fmt: skip
WRITTEN = ("check.xml", "report.md", "report.html", "summary.csv", "bmf.json", "gha.json", "compared.md")  # fmt: skip


def test_no_reader_takes_an_incomplete_run_for_a_complete_one(same: Compare) -> None:
    """What they say of it; the exports have one row, or one entry, for it."""
    put_run("bench", Path("run"))
    said = []
    for line in INCOMPLETE:
        ended = typed(*shlex.split(line))
        said += [f"$ weighin {line}", f"exit code {ended.code}", *_of_cells(ended.out + ended.err)]
    Path("check.xml").rename("run/check.xml")
    for name in WRITTEN:
        text = re.sub(r"<style>.*?</style>|<script.*?</script>", "", Path("run", name).read_text())
        said += [f"$ cat {name}", *_of_cells(text)]
    same("old_runs/incomplete.txt", "".join(f"{line}\n" for line in said))
    rows = Path("run/summary.csv").read_text().splitlines()[1:]
    assert {row.rpartition(",")[2] for row in rows} == {"1"}
    assert json.loads(Path("run/bmf.json").read_text())["run"] == {"missing_cells": {"value": 1}}
    entry = {"name": "run missing_cells", "unit": "cells", "value": 1}
    assert entry in json.loads(Path("run/gha.json").read_text())
    assert set(results("run")["missing_cells"]) == {1}


def _of_cells(text: str) -> list[str]:
    """Return the lines that tell of missing cells, without what precedes or follows the words."""
    words = r"[^,\n]*(?:\d of \d cells|missing|incomplete|--partial)[^,\n]*"
    return [line.strip() for line in re.findall(words, text)]
