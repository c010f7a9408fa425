"""Exports, each held to what the format's own documentation, schema or parser accepts."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest
from factories import LIMIT, make_cell, make_result, make_skipped, mixed_run, notebook_run
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from weighin import install
from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.report import exports
from weighin.result import Outcome, Peaks, Result

# https://bencher.dev/bmf.json, without its $id
BMF = {
    "$schema": "http://json-schema.org/draft-07/schema",
    "type": "object",
    "patternProperties": {
        ".+": {
            "type": "object",
            "patternProperties": {
                ".+": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "number"},
                        "lower_value": {"type": "number"},
                        "upper_value": {"type": "number"},
                    },
                    "required": ["value"],
                }
            },
        }
    },
}
# From the README of benchmark-action/github-action-benchmark and its interface BenchmarkResult.
GHA = {
    "$schema": "http://json-schema.org/draft-07/schema",
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "unit": {"type": "string", "minLength": 1},
            "value": {"type": "number"},
            "range": {"type": "string"},
            "extra": {"type": "string"},
        },
        "required": ["name", "unit", "value"],
        "additionalProperties": False,
    },
}
STREAMING = "gpt2-xl streaming safetensors float32 cpu cold docker ram=8GiB"
EVIL = 'a "name"\\ with\n{everything} <b>=1'


def repeated() -> list[Result]:
    """Three repeats of one series: two ok, one timed out."""
    first = make_result(make_cell("streaming", format="safetensors"))
    later = make_result(replace(first.cell, repeat=1), ready_ns=9_000_000_000)
    late = make_result(replace(first.cell, repeat=2), outcome=Outcome.TIMEOUT)
    return [first, later, late]


def evil() -> list[Result]:
    spec = ModelSpec(EVIL, "m:f", {})
    return [make_result(make_cell(EVIL, model=spec, format=EVIL, options={EVIL: EVIL}), environment={EVIL: EVIL, "0": 1})]  # fmt: skip


def families(results: Sequence[Result]) -> dict[str, Any]:
    return {one.name: one for one in text_string_to_metric_families(exports.openmetrics(results))}


RUNS: list[list[Result]] = [notebook_run(), mixed_run(), repeated(), [make_skipped()], [], evil()]


@pytest.mark.parametrize("results", RUNS)
def test_bencher_accepts_it(results: list[Result]) -> None:
    found = json.loads(exports.bencher(results))
    jsonschema.validate(found, BMF)
    assert all(0 < len(name) <= 1024 for name in found)
    assert all(len(measure) <= 64 for measures in found.values() for measure in measures)


def test_what_bencher_is_told() -> None:
    (series,) = json.loads(exports.bencher(repeated())).values()
    assert series["not_ok_repeats"] == {"value": 1}
    assert series["ready_ns"] == {
        "value": 7_300_000_000,  # the lower of two is the median
        "lower_value": 7_300_000_000,
        "upper_value": 9_000_000_000,
    }
    peak = repeated()[0].peaks.rss_bytes
    assert series["peak_rss_bytes"] == {"value": peak, "lower_value": peak, "upper_value": peak}


def test_what_is_not_ok_has_no_figures_and_what_is_skipped_is_no_benchmark() -> None:
    found = json.loads(exports.bencher(mixed_run()))
    names = {name.split(" ")[1]: sorted(measures) for name, measures in found.items()}
    assert names["baseline"] == ["not_ok_repeats"]
    assert "peak_rss_bytes" in names["streaming"]
    assert "direct_cuda" not in names


@pytest.mark.parametrize("results", RUNS)
def test_github_action_benchmark_accepts_it(results: list[Result]) -> None:
    found = json.loads(exports.github_action_benchmark(results))
    jsonschema.validate(found, GHA)
    names = [one["name"] for one in found]
    assert len(set(names)) == len(names)


def test_what_github_action_benchmark_is_told() -> None:
    found = {one["name"]: one for one in json.loads(exports.github_action_benchmark(repeated()))}
    assert found[f"{STREAMING} not_ok_repeats"] == {
        "name": f"{STREAMING} not_ok_repeats",
        "unit": "repeats",
        "value": 1,
        "extra": "3 repeats: ok 2, timeout 1",
    }
    assert found[f"{STREAMING} ready"] == {
        "name": f"{STREAMING} ready",
        "unit": "ns",
        "value": 7_300_000_000,
        "extra": "exact, median of the ok ones of 3 repeats",
        "range": "7300000000..9000000000",
    }
    assert "range" not in found[f"{STREAMING} peak_rss"]


@pytest.mark.parametrize("results", RUNS)
def test_the_openmetrics_parser_accepts_it(results: list[Result]) -> None:
    text = exports.openmetrics(results)
    assert text.endswith("# EOF\n")
    for family in families(results).values():
        assert family.name.startswith("weighin_")
        assert family.unit == "" or family.name.endswith(f"_{family.unit}")


def test_what_prometheus_is_told() -> None:
    found = families(repeated())
    labels = {
        "model": "gpt2-xl", "strategy": "streaming", "format": "safetensors", "dtype": "float32",
        "device": "cpu", "cache": "cold", "isolation": "docker", "ram_limit_bytes": str(LIMIT),
        "ram_high_bytes": "", "vram_limit_bytes": "", "passes": "1",
        "options": "",
    }  # fmt: skip
    ready = {s.labels["statistic"]: s for s in found["weighin_ready_seconds"].samples}
    assert {name: s.value for name, s in ready.items()} == {"low": 7.3, "median": 7.3, "high": 9.0}
    assert ready["low"].labels == labels | {"statistic": "low"}
    assert found["weighin_peak_rss_bytes"].unit == "bytes"
    counted = {s.labels["outcome"]: s.value for s in found["weighin_repeats"].samples}
    assert counted["ok"] == 2
    assert counted["timeout"] == 1
    assert counted["oom_killed"] == 0
    (about,) = found["weighin_run"].samples
    assert about.labels["torch"] == "2.13.0"
    assert about.labels["kernel"] == "6.18.0"


def test_names_survive_the_openmetrics_escapes() -> None:
    samples = families(evil())["weighin_repeats"].samples
    assert samples[0].labels["model"] == 'a "name"\\ with?{everything} <b>=1'


def test_parquet_has_the_cells_unrounded() -> None:
    size = 2**53 + 1  # a float cannot hold it
    results = [make_result(peaks=Peaks(rss_bytes=size)), make_skipped()]
    table = pq.read_table(io.BytesIO(exports.parquet(results)))
    assert table["peak_rss_bytes"].to_pylist() == [size, None]
    assert table["strategy"].to_pylist() == ["mmap_assign", "direct_cuda"]
    assert table["ready_s"].to_pylist() == [5.44, None]
    assert "group" not in table.column_names


@pytest.mark.parametrize("results", RUNS)
def test_any_run_is_parquet(results: list[Result]) -> None:
    assert pq.read_table(io.BytesIO(exports.parquet(results))).num_rows == len(results)


@pytest.mark.parametrize(
    ("export", "package", "extra"),
    [
        (exports.parquet, "pyarrow", "parquet"),
        (exports.openmetrics, "prometheus_client", "dashboards"),
    ],
)
def test_without_its_package_an_export_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    export: Callable[[Sequence[Result]], object],
    package: str,
    extra: str,
) -> None:
    for name in [each for each in sys.modules if each.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        export([])
    assert caught.value.message.startswith(f"{export.__name__} needs ")
    assert package in caught.value.message
    assert caught.value.repair == install.command(extra)


def test_series_that_differ_in_passes_or_in_a_limit_are_other_label_sets() -> None:
    cell = make_cell("streaming")
    cells = [
        cell,
        replace(cell, passes=3),
        replace(cell, ram_high_bytes=LIMIT // 2),
        replace(cell, vram_limit_bytes=LIMIT // 4),
    ]
    text = exports.openmetrics([make_result(one) for one in cells])
    lines = [line for line in text.splitlines() if "weighin_ready_seconds{" in line]
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines}) == 3 * len(cells)
    for label in (
        'passes="3"',
        f'ram_high_bytes="{LIMIT // 2}"',
        f'vram_limit_bytes="{LIMIT // 4}"',
    ):
        assert sum(label in line for line in lines) == 3
