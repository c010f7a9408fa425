"""The baseline file: what is written, that it is read again, the YAML of before, and what is invalid."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from factories import refused
from snapshots import Compare, answered

from weighin.gate.baseline import read, write
from weighin.gate.rules import Expectation
from weighin.records.metrics import METRICS, Tolerance
from weighin.records.series import Figure, Series
from weighin.result import Outcome
from weighin.units import GIB, MIB

WRONG = Path(__file__).with_name("snapshots") / "gate_baseline.txt"
OK, KILLED = "gpt2-small streaming pt", "gpt2-small baseline pt"
SERIES = {
    OK: Series(
        "ok", 3, model_bytes=700, figures={"peak_rss": Figure(GIB, GIB, GIB), "ready": Figure(10**9, 2 * 10**9, 3 * 10**9)},
        phases={"build": {"peak_rss": 10, "end_anon": 5, "time": 7}, "touch": {"peak_rss": 11, "end_anon": 6, "time": 8}},
    ),
    KILLED: Series("oom_killed", 3, 700, figures={"peak_rss": Figure(1, 1, 1)}),
}  # fmt: skip
ENVIRONMENT: dict[str, Any] = {"torch": "2.13.0+cpu", "cgroup_version": 1, "gpu": None, "psi": True}

YAML = """\
# Ours.
schema: 1
metrics:
  load: off  # too noisy
  anon: {direction: both}
  peak_rss: {relative: 0.02}
  ready: {absolute: 2.5 s}
budgets:
  - peak_rss <= 1.1 x model  # as promised
expect: {base*: timeout}
environment:
  "settings.*": warn
measured:
  environment: {torch: "2.12"}
  expect: {baseline: oom_killed}
  series:
    "gpt2-small streaming pt": {outcome: ok, repeats: 1, figures: {peak_rss: 5}}
"""


def test_the_whole_file_and_that_it_is_read_again(tmp_path: Path, same: Compare) -> None:
    path = tmp_path / "sub" / "baseline.json"
    difference = write(path, ENVIRONMENT, SERIES)
    same("gate/baseline.json", path.read_text())
    assert [line[1:] for line in difference[3:]] == path.read_text().splitlines()
    known = read(path)
    assert known.environment == {
        key: ENVIRONMENT[key] for key in ("torch", "cgroup_version", "gpu")
    }
    assert known.series == {OK: SERIES[OK], KILLED: Series("oom_killed", 3, 700)}
    assert write(path, ENVIRONMENT, SERIES) == []


def test_an_update_shows_what_changed_and_what_is_off_is_not_written(
    tmp_path: Path, same: Compare
) -> None:
    path = tmp_path / "baseline.json"
    write(path, ENVIRONMENT, SERIES)
    grown = replace(SERIES[OK], figures={"peak_rss": Figure(GIB, GIB, GIB + MIB)})
    shown = write(path, ENVIRONMENT, SERIES | {OK: grown})
    same("gate/baseline.diff", "\n".join(shown[2:]) + "\n")
    off = {"tolerances": ["ready=off", "load=off"], "settings": ["torch=ignore"]}
    write(path, ENVIRONMENT, SERIES, **off)
    same("gate/baseline-less.json", path.read_text())


def test_the_rules_of_a_yaml_file_are_read_and_stay_in_the_json_that_replaces_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text(YAML)
    rules = read(path).rules
    assert set(rules.tolerances) == set(METRICS) - {"load"}
    assert rules.tolerances["peak_rss"] == Tolerance(0.02, 0)
    assert rules.tolerances["ready"] == Tolerance(0.0, 2_500_000_000)
    assert rules.tolerances["anon"] == replace(METRICS["anon"].tolerance, direction="both")
    assert rules.tolerances["peak_cgroup"] == METRICS["peak_cgroup"].tolerance
    assert [str(budget) for budget in rules.budgets] == ["peak_rss <= 1.1 x model"]
    assert rules.policies == {"settings.*": "warn"}
    ours = Expectation("base*", Outcome.TIMEOUT)
    assert rules.expected == (ours, Expectation("baseline", Outcome.OOM_KILLED))
    difference = write(path, ENVIRONMENT, SERIES)
    assert '-     "peak_rss": 5' in difference and '-   "torch": "2.12"' in difference
    json.loads(path.read_text())
    assert read(path).rules == replace(rules, expected=(ours,))  # the outcome itself is accepted


def test_a_file_that_cannot_be_used(tmp_path: Path, same: Compare) -> None:
    path = tmp_path / "baseline.yaml"

    def answer(text: str) -> str:
        path.write_text(text.replace("\\n", "\n"))
        return refused(read, path).replace(str(path), "FILE")

    same(WRONG.name, answered(WRONG, answer))
