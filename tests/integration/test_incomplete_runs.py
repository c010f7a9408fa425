"""A run that was stopped after the first of its two cells: no reader takes it for a complete run."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from commands import CommandLine
from test_stopped_runs import PAUSING

import weighin

SAID = "run: 1 of 2 cells measured; weighin bench --resume run measures the rest"
LINE = f"{SAID}, --partial judges only this part"
BUDGET = ("--budget", "peak_rss <= 100GiB")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[CommandLine]:
    """A folder with the run ``run``, which SIGTERM stopped, and the complete run ``whole``."""
    folder = tmp_path_factory.mktemp("incomplete")
    command = CommandLine(folder, disk / "cache")
    strategy = folder / "pausing.py"
    strategy.write_text(PAUSING)
    strategy.chmod(0o755)
    bench = ("bench", "gpt2-tiny", "--isolation", "process", "-s", "baseline,./pausing.py", "--out")
    started = command.start(*bench, "run")
    records = folder / "run" / "records.jsonl"
    leftovers.wait_until(
        lambda: (
            started.process.poll() is not None
            or (records.exists() and records.read_text().count("\n") == 1 and started.at_work())
        ),
        "the second cell did not begin",
        patience_s=120,
    )
    ended = started.end(signal.SIGTERM)
    assert (ended.code, ended.left) == (130, [])
    assert ended.err.endswith(
        "error: stopped; nothing is left running; 1 of 2 cells measured\n"
        "resume it: weighin bench --resume run\n"
    )
    strategy.chmod(0o644)
    whole = command.run(*bench, "whole")
    assert (whole.code, whole.left) == (0, []), whole.err
    yield command


def test_the_report_says_it_in_every_form(stopped: CommandLine) -> None:
    ended = stopped.run("report", "run", "--format", "md,html,csv", "--json", "run.json")
    assert ended.code == 0
    assert ended.err.splitlines()[0] == f"note: {SAID}"
    assert SAID in " ".join(ended.out.split())
    run = stopped.folder / "run"
    assert f"- {SAID}" in (run / "report.md").read_text()
    assert SAID in re.sub(r"<[^>]+>", "", (run / "report.html").read_text())
    content = json.loads((stopped.folder / "run.json").read_text())
    assert (content["missing_cells"], content["warnings"]) == (1, [SAID])
    heading, row = (run / "summary.csv").read_text().splitlines()
    assert (heading.split(",")[-1], row.split(",")[-1]) == ("missing_cells", "1")


def test_the_exports_for_other_programs_count_the_missing_cells(stopped: CommandLine) -> None:
    for name, missing in (("run", 1), ("whole", 0)):
        ended = stopped.run("report", name, "--format", "bmf,gha")
        assert ended.code == 0, ended.err
        run = stopped.folder / name
        assert json.loads((run / "bmf.json").read_text())["run"] == {
            "missing_cells": {"value": missing}
        }
        entry = {"name": "run missing_cells", "unit": "cells", "value": missing}
        assert entry in json.loads((run / "gha.json").read_text())
        assert set(weighin.results(run)["missing_cells"]) == {missing}


def test_check_fails_and_makes_no_baseline(stopped: CommandLine) -> None:
    ended = stopped.run("check", "run", *BUDGET, "--json", "-", "--junit", "check.xml")
    assert (ended.code, ended.err) == (1, f"note: {SAID}\n")
    content = json.loads(ended.out)
    assert (content["passed"], content["summary"]) == (
        False,
        "gate failed: 1 missing, 1 within budget",
    )
    assert content["lines"][0]["text"] == LINE
    assert LINE in (stopped.folder / "check.xml").read_text()
    refused = stopped.run("check", "run", "--baseline", "part.yaml", "--update")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith(
        f"note: {SAID}\nerror: cannot make a baseline from an incomplete run"
    )
    for fact in ("run: 1 of 2 cells measured\n", "weighin bench --resume run;", "--partial"):
        assert fact in refused.err
    assert not (stopped.folder / "part.yaml").exists()


def test_partial_judges_the_measured_cells_alone(stopped: CommandLine) -> None:
    updated = stopped.run("check", "whole", "--baseline", "baseline.yaml", "--update")
    assert updated.code == 0
    refused = stopped.run("check", "run", "--baseline", "baseline.yaml")
    assert refused.code == 1
    later = ("--budget", "pausing: peak_rss <= 1KiB")
    passed = stopped.run(
        "check", "run", "--baseline", "baseline.yaml", "--partial", *BUDGET, *later
    )
    assert passed.code == 0, passed.out
    assert "note: run: 1 of 2 cells measured" in passed.out
    part = stopped.run("check", "run", "--baseline", "part.yaml", "--update", "--partial")
    assert part.code == 0
    assert "pausing" not in (stopped.folder / "part.yaml").read_text()
    (stopped.folder / "part.yaml").unlink()


def test_compare_says_it_beside_the_name_of_the_run(stopped: CommandLine) -> None:
    ended = stopped.run("compare", "whole", "run", "--markdown", "compared.md", "--json", "-")
    assert (ended.code, ended.err) == (0, f"note: {SAID}\n")
    content = json.loads(ended.out)
    assert "1 of 2" not in content["runs"][0]
    assert content["runs"][1].startswith("B = run: 1 of 2 cells measured")
    assert "B = run: 1 of 2 cells measured" in (stopped.folder / "compared.md").read_text()


def test_history_says_it(stopped: CommandLine) -> None:
    ended = stopped.run("history", ".", "--json", "history.json")
    assert ended.code == 0, ended.err
    assert f"note: {SAID}" in ended.err.splitlines()
    assert SAID in json.loads((stopped.folder / "history.json").read_text())["warnings"]


def test_a_run_that_is_complete_is_no_incomplete_run(stopped: CommandLine) -> None:
    assert stopped.run("check", "whole", *BUDGET).err == ""
    reported = stopped.run("report", "whole", "--format", "csv")
    assert "cells measured" not in reported.out + reported.err
