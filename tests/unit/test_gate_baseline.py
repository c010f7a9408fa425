"""The baseline file: what is written, that it is read again, the YAML of before, and what is invalid."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weighin.errors import ConfigError, HarnessError, RecordError
from weighin.gate.baseline import read, write
from weighin.gate.rules import Expectation
from weighin.records.metrics import METRICS, Tolerance
from weighin.records.series import Figure, Series
from weighin.result import Outcome
from weighin.units import GIB, MIB

OK, KILLED = "gpt2-small streaming pt", "gpt2-small baseline pt"
SERIES = {
    OK: Series(
        "ok",
        3,
        model_bytes=700,
        figures={"peak_rss": Figure(GIB, GIB, GIB), "ready": Figure(10**9, 2 * 10**9, 3 * 10**9)},
        phases={
            "build": {"peak_rss": 10, "end_anon": 5, "time": 7},
            "touch": {"peak_rss": 11, "end_anon": 6, "time": 8},
        },
    ),
    KILLED: Series("oom_killed", 3, 700, figures={"peak_rss": Figure(1, 1, 1)}),
}
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


def test_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "baseline.json"
    difference = write(path, ENVIRONMENT, SERIES)
    text = path.read_text()
    assert json.loads(text) == {
        "schema": 1,
        "measured": {
            "environment": {"cgroup_version": 1, "gpu": None, "torch": "2.13.0+cpu"},
            "series": {
                KILLED: {"outcome": "oom_killed", "repeats": 3, "model_bytes": 700},
                OK: {
                    "outcome": "ok",
                    "repeats": 3,
                    "model_bytes": 700,
                    "figures": {"peak_rss": GIB, "ready": [10**9, 2 * 10**9, 3 * 10**9]},
                    "phases": SERIES[OK].phases,
                },
            },
        },
    }
    assert [line[1:] for line in difference[3:]] == text.splitlines()
    assert '     "ready": [1000000000, 2000000000, 3000000000]' in text.splitlines()
    known = read(path)
    assert known.environment == {
        key: ENVIRONMENT[key] for key in ("torch", "cgroup_version", "gpu")
    }
    assert known.series == {OK: SERIES[OK], KILLED: Series("oom_killed", 3, 700)}
    assert write(path, ENVIRONMENT, SERIES) == []


def test_an_update_shows_what_changed_and_what_is_off_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    write(path, ENVIRONMENT, SERIES)
    grown = replace(SERIES[OK], figures={"peak_rss": Figure(GIB, GIB, GIB + MIB)})
    assert write(path, ENVIRONMENT, SERIES | {OK: grown})[2:] == [
        "@@ -19,4 +19,3 @@",
        '     "figures": {',
        '-     "peak_rss": 1073741824,',
        '-     "ready": [1000000000, 2000000000, 3000000000]',
        '+     "peak_rss": [1073741824, 1073741824, 1074790400]',
        "     },",
    ]
    off = {"tolerances": ["ready=off", "load=off"], "settings": ["torch=ignore"]}
    write(path, ENVIRONMENT, SERIES, **off)
    assert "ready" not in path.read_text() and "torch" not in path.read_text()
    assert '"build": {\n      "peak_rss": 10,\n      "end_anon": 5\n     }' in path.read_text()


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
    ours, accepted = (
        Expectation("base*", Outcome.TIMEOUT),
        Expectation("baseline", Outcome.OOM_KILLED),
    )
    assert rules.expected == (ours, accepted)
    difference = write(path, ENVIRONMENT, SERIES)
    assert '-     "peak_rss": 5' in difference and '-   "torch": "2.12"' in difference
    json.loads(path.read_text())
    assert read(path).rules == replace(rules, expected=(ours,))  # the outcome itself is accepted


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "schema: 2\nnew: things\n",
            RecordError,
            "{path}: written by a newer weighin (schema 2; this version reads up to 1)\npip install --upgrade 'weighin @ git+URL', where URL is the address of weighin's repository",
        ),
        (
            '{"schema": 1, "budget": []}',
            ConfigError,
            "{path}: budget: unknown key\ndid you mean 'budgets'? known: budgets, environment, expect, measured, metrics, schema",
        ),
        (
            "schema: 1\nmetrics: {peak_rs: off}\n",
            ConfigError,
            "{path}: no metric is called 'peak_rs'\n"
            f"did you mean 'peak_rss'? known: {', '.join(sorted(METRICS))}",
        ),
        (
            "schema: 1\nmetrics: {peak_rss: {relative: -1}}\n",
            ConfigError,
            "{path}: metrics.peak_rss.relative: input should be greater than or equal to 0, got -1",
        ),
        (
            "schema: 1\nmetrics: {peak_rss: {absolute: 5GB}}\n",
            ConfigError,
            "{path}: '5GB' is ambiguous: GB is 1000-based for some tools and 1024-based for others\n"
            "write 5GiB (1024-based), or the number of bytes",
        ),
        (
            "schema: 1\nexpect: {lossy: dead}\n",
            ConfigError,
            "{path}: expect: lossy=dead: this is none of the outcomes\nwrite an expected outcome as in"
            " baseline=oom_killed; outcomes that can be expected: oom_killed, child_killed, cuda_oom,"
            " timeout, thrashing, skipped",
        ),
        (
            "schema: 1\nenvironment: {torch: maybe}\n",
            ConfigError,
            "{path}: environment.torch: input should be 'ignore', 'warn' or 'fail', got 'maybe'",
        ),
        ("- a\n", ConfigError, "{path}: not a mapping of keys to values"),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, text: str, kind: type[HarnessError], message: str
) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text(text)
    with pytest.raises(kind) as caught:
        read(path)
    assert str(caught.value) == message.format(path=path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "no.json")
    assert str(caught.value) == (
        f"the baseline file {tmp_path}/no.json does not exist\n"
        f"create the baseline file from a good run: weighin check RUN --baseline {tmp_path}/no.json --update"
    )
