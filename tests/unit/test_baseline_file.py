"""The baseline file: its whole text, what stays of its owner's, and what cannot be used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result
from hypothesis import given
from hypothesis import strategies as st

from weighin import __version__
from weighin.errors import ConfigError, HarnessError, RecordError
from weighin.gate import baseline, freeze
from weighin.gate.baseline import read
from weighin.gate.freeze import update
from weighin.records.metrics import METRICS, Tolerance
from weighin.records.series import Figure, Series, SeriesRun, summarise
from weighin.result import Outcome
from weighin.units import GIB, MIB

SERIES = {
    "gpt2-small streaming pt": Series(
        "ok",
        3,
        model_bytes=700,
        figures={"peak_rss": Figure(GIB, GIB, GIB), "ready": Figure(10**9, 2 * 10**9, 3 * 10**9)},
        phases={
            "build": {"peak_rss": 10, "end_anon": 5, "time": 7},
            "touch": {"peak_rss": 11, "end_anon": 6, "time": 8},
        },
    ),
    "gpt2-small baseline pt": Series("oom_killed", 3, 700, figures={"peak_rss": Figure(1, 1, 1)}),
}
ENVIRONMENT: dict[str, Any] = {"torch": "2.13.0+cpu", "cgroup_version": 1, "gpu": None, "psi": True}

OWNED = """\
# Ours.
schema: 1
metrics:
  load: off  # too noisy
  anon: {direction: both}
  peak_rss: {relative: 0.02}
  ready: {absolute: 2.5 s}
budgets:
  - peak_rss <= 1.1 x model  # as promised
environment:
  "settings.*": warn
"""


def test_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "baseline.yaml"
    difference = update(path, ENVIRONMENT, SERIES)
    text = path.read_text()
    assert text == freeze._HEAD + (
        f"# measured by weighin {__version__}; the lines below are written by:"
        " weighin check RUN --baseline FILE --update\n"
        "measured:\n"
        "  environment:\n"
        "    cgroup_version: 1\n"
        "    gpu: null\n"
        '    torch: "2.13.0+cpu"\n'
        "  series:\n"
        '    "gpt2-small baseline pt":\n'
        "      outcome: oom_killed\n"
        "      repeats: 3\n"
        "      model_bytes: 700\n"
        '    "gpt2-small streaming pt":\n'
        "      outcome: ok\n"
        "      repeats: 3\n"
        "      model_bytes: 700\n"
        "      figures:\n"
        "        peak_rss: 1073741824  # 1.000 GiB\n"
        "        ready: [1000000000, 2000000000, 3000000000]  # 2.00 s\n"
        "      phases:\n"
        "        build: {peak_rss: 10, end_anon: 5, time: 7}\n"
        "        touch: {peak_rss: 11, end_anon: 6, time: 8}\n"
    )
    assert [line[1:] for line in difference[3:]] == text.splitlines()
    known = read(path)
    assert known.environment == {
        key: ENVIRONMENT[key] for key in ("torch", "cgroup_version", "gpu")
    }
    assert known.series["gpt2-small streaming pt"] == SERIES["gpt2-small streaming pt"]
    assert known.series["gpt2-small baseline pt"] == Series("oom_killed", 3, 700)
    assert update(path, ENVIRONMENT, SERIES) == []


def test_an_update_keeps_what_its_owner_wrote_and_shows_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text(OWNED)
    update(path, ENVIRONMENT, SERIES)
    assert path.read_text().startswith(OWNED + "# measured by weighin")
    grown = replace(
        SERIES["gpt2-small streaming pt"], figures={"peak_rss": Figure(GIB, GIB, GIB + MIB)}
    )
    assert update(path, ENVIRONMENT, SERIES | {"gpt2-small streaming pt": grown})[2:] == [
        "@@ -27,4 +27,3 @@",
        "       figures:",
        "-        peak_rss: 1073741824  # 1.000 GiB",
        "-        ready: [1000000000, 2000000000, 3000000000]  # 2.00 s",
        "+        peak_rss: [1073741824, 1073741824, 1074790400]  # 1.000 GiB",
        "       phases:",
    ]
    assert path.read_text().startswith(OWNED)


def test_the_rules_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text(OWNED)
    rules = read(path).rules
    assert set(rules.tolerances) == set(METRICS) - {"load"}
    assert rules.tolerances["peak_rss"] == Tolerance(0.02, 0)
    assert rules.tolerances["ready"] == Tolerance(0.0, 2_500_000_000)
    assert rules.tolerances["anon"] == replace(METRICS["anon"].tolerance, direction="both")
    assert rules.tolerances["peak_cgroup"] == METRICS["peak_cgroup"].tolerance
    assert [str(budget) for budget in rules.budgets] == ["peak_rss <= 1.1 x model"]
    assert rules.policies == {"settings.*": "warn"}


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text("schema: 1\nmetrics: {load: off, ready: off}\n")
    update(path, {}, SERIES)
    text = path.read_text()
    assert "ready" not in text.partition("# measured")[2]
    assert "build: {peak_rss: 10, end_anon: 5}\n" in text


def test_real_results_come_back_as_they_were(tmp_path: Path) -> None:
    results = [make_result(make_cell("streaming", repeat=number)) for number in range(3)]
    results.append(make_result(make_cell("baseline"), outcome=Outcome.OOM_KILLED))
    series = summarise([SeriesRun(results)])
    path = tmp_path / "baseline.yaml"
    update(path, results[0].environment, series)
    known = read(path).series
    assert list(known) == sorted(series)
    for name, one in series.items():
        assert known[name].outcome == one.outcome
        if one.is_ok:
            assert (known[name].figures, known[name].repeats) == (one.figures, 3)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.booleans(), st.none()
    ),
)
def test_any_name_and_any_setting_come_back(name: str, value: str | int | bool | None) -> None:
    import yaml

    line = f"{freeze._text(name)}: {freeze._text(value)}"
    assert yaml.safe_load(line) == {name: value}


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "schema: 2\nnew: things\n",
            RecordError,
            "{path}: written by a newer weighin (schema 2; this version reads up to 1)\npip install --upgrade 'weighin @ git+URL', where URL is the address of weighin's repository",
        ),
        ("metrics: {}\n", ConfigError, "{path}: schema: missing\nknown keys: schema, metrics, budgets, expect, environment, measured"),
        (
            "schema: 1\nbudget: []\n",
            ConfigError,
            "{path}: budget: unknown key\ndid you mean 'budgets'? known keys: schema, metrics, budgets, expect, environment, measured",
        ),
        (
            "schema: 1\nmetrics: {peak_rs: off}\n",
            ConfigError,
            "{path}: no metric is called 'peak_rs'\n"
            f"did you mean 'peak_rss'? known: {', '.join(sorted(METRICS))}",
        ),
        (
            "schema: 1\nmetrics: {peak_rss: {relativ: 1}}\n",
            ConfigError,
            "{path}: metrics.peak_rss.relativ: unknown key\n"
            "did you mean 'relative'? known keys: relative, absolute, direction",
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
            "schema: 1\nbudgets: [peak_rss]\n",
            ConfigError,
            "{path}: cannot read the budget 'peak_rss'\n"
            'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import", "floor <= 8GiB" or'
            ' "streaming: anon <= model + 300MiB"',
        ),
        (
            "schema: 1\nenvironment: {torch: maybe}\n",
            ConfigError,
            "{path}: environment.torch: input should be 'ignore', 'warn' or 'fail', got 'maybe'",
        ),
        ("- a\n", ConfigError, "{path}: not a mapping of keys to values"),
    ],
)  # fmt: skip
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
        read(tmp_path / "no.yaml")
    assert str(caught.value) == (
        f"the baseline file {tmp_path}/no.yaml does not exist\n"
        f"create the baseline file from a good run: weighin check RUN --baseline {tmp_path}/no.yaml --update"
    )


def test_empty_keys_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text("schema: 1\nmetrics:\nbudgets:\nenvironment:\n")
    assert read(path).rules == baseline.Rules(baseline.default_rules().tolerances, (), {})
