"""The rate and the latency of a disk: as text, in the name of a cell, over time, and in a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import make_cell, make_result
from test_matrix import cells_of

from weighin.errors import ConfigError
from weighin.records.metrics import through_first_pass_ns
from weighin.records.series import name_of
from weighin.result import Result
from weighin.settings.definition import check_suite
from weighin.units import (
    MIB,
    parse_rate,
)

MS = 1_000_000


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200MB/s", 200_000_000), ("1.5 GB/s", 1_500_000_000), ("100MiB/s", 100 * MIB), ("50MB", 50_000_000)],
)  # fmt: skip
def test_a_rate_is_read_in_the_units_of_disks(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


def test_a_rate_without_a_unit_is_refused_with_the_likely_one() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate("200")
    assert caught.value.message == "'200' is too slow: every disk reads faster"
    assert caught.value.repair == "did you mean 200MB/s?"


@pytest.mark.parametrize("text", ["fast", "xx/s", "/s"])
def test_a_text_that_is_no_rate_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text)
    assert caught.value.message == f"cannot read {text!r} as a rate"
    assert caught.value.repair == "write a rate such as 200MB/s, 1.5GB/s or 100MiB/s"


def test_a_disk_makes_another_series_and_no_disk_keeps_its_name() -> None:
    plain, slow = make_cell(), make_cell(disk_bytes_per_s=200_000_000, disk_latency_ns=5 * MS)
    assert make_cell(disk_bytes_per_s=None).series == plain.series != slow.series
    assert slow.series != replace(slow, disk_latency_ns=None).series
    assert name_of(slow) == f"{name_of(plain)} disk=200MB/s disk_latency=5ms"


def test_a_matrix_has_each_rate_with_each_latency() -> None:
    planned = cells_of(disk=["50MB/s", "none"], disk_latency=["1ms", "none"])
    cells = [each.cell for each in planned if each.cell.strategy == "a"]
    assert [cell.disk for cell in cells] == [
        ("disk=50MB/s", "disk_latency=1ms"),
        ("disk=50MB/s",),
        ("disk_latency=1ms",),
        (),
    ]


def test_a_suite_lists_rates_and_latencies() -> None:
    suite = check_suite({"models": "m", "disk": ["50MB/s", "none"], "disk_latency": "20ms"})
    assert (suite.disk, suite.disk_latency) == ([50_000_000, None], [20 * MS])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"disk": "50"}, "--disk: '50' is too slow: every disk reads faster\ndid you mean 50MB/s?"),
        (
            {"disk_latency": "5"},
            "--disk-latency: cannot read '5' as a duration\nwrite a duration such as 2.5 s, 150 ms or 3 min",
        ),
        (
            {"disk": "50MB/s", "operation": "save"},
            "--disk: it has no effect with operation save\nleave it out",
        ),
    ],
)
def test_a_disk_that_would_have_no_effect_is_refused(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_suite({"models": "m"} | options)
    assert str(caught.value) == complaint


def loaded(strategy: str, rate: int | None, latency_ns: int | None) -> Result:
    cell = make_cell(strategy, disk_bytes_per_s=rate, disk_latency_ns=latency_ns)
    return make_result(cell)


@pytest.fixture
def results() -> list[Result]:
    return [
        loaded(strategy, rate, latency_ns)
        for rate in (50_000_000, 200_000_000)
        for latency_ns in (MS, 20 * MS)
        for strategy in ("mmap_assign", "streaming")
    ]


def test_the_first_pass_counts_once(results: list[Result]) -> None:
    (result,) = [results[1]]
    forward = next(phase for phase in result.phases if phase.name == "forward")
    assert result.ready_ns
    expected = result.ready_ns + forward.end_ns - forward.start_ns
    assert through_first_pass_ns(result) == expected
    again = replace(result, phases=(*result.phases, forward))
    assert through_first_pass_ns(again) == expected
    assert through_first_pass_ns(replace(result, ready_ns=None)) is None
