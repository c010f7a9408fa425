"""The metrics of the gate: how their figures are written and read, and which phases explain them."""

from dataclasses import replace

import pytest
from factories import make_cell, make_result

from weighin.cell import Cell
from weighin.errors import UnknownName
from weighin.records.metrics import METRICS, Tolerance, named, phases_of_load
from weighin.result import UNNAMED
from weighin.units import GIB, MIB

PEAK, LOAD = METRICS["peak_rss"], METRICS["load"]
SECOND = 10**9


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        (1600 * MIB, 1600 * MIB, "±0"),
        (1600 * MIB, 1680 * MIB, "+80.0 MiB (+5.0 %)"),
        (1600 * MIB, 1599 * MIB, "-1.0 MiB (-0.1 %)"),
        (0, 5 * MIB, "+5.0 MiB"),
    ],
)
def test_a_change_has_its_sign_and_its_share(was: int, now: int, text: str) -> None:
    assert PEAK.change(was, now) == text


def test_a_change_of_a_time_is_in_seconds() -> None:
    assert LOAD.change(2 * SECOND, 3 * SECOND) == "+1.00 s (+50.0 %)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(GIB, "1.000 GiB"), (GIB - 1, "1024.0 MiB"), (-2 * GIB, "-2.000 GiB"), (5 * MIB, "5.0 MiB")],
)
def test_a_size_is_rounded_for_readers(value: int, text: str) -> None:
    assert PEAK.text(value) == text


@pytest.mark.parametrize("value", [1, 1536 * MIB, GIB + 1])
def test_a_precise_size_is_read_as_itself(value: int) -> None:
    assert PEAK.parse(PEAK.precise(value)) == value


@pytest.mark.parametrize(
    ("value", "text"), [(2_500_000_000, "2.5 s"), (1, "0.000000001 s"), (60 * SECOND, "60 s")]
)  # fmt: skip
def test_a_precise_time_is_read_as_itself(value: int, text: str) -> None:
    assert LOAD.precise(value) == text
    assert LOAD.parse(text) == value


def test_what_is_allowed_is_the_larger_of_share_and_amount() -> None:
    tolerance = Tolerance(relative=0.1, absolute=50)
    assert [tolerance.allowance(was) for was in (499, 500, 510)] == [50, 50, 51]


def test_which_metrics_are_times_and_which_are_sampled() -> None:
    assert {name for name, metric in METRICS.items() if not metric.portable} == {
        "use", "load", "ready", "time",
    }  # fmt: skip
    assert all((metric.unit == "ns") is not metric.portable for metric in METRICS.values())
    titles = {metric.title for metric in METRICS.values() if metric.title != metric.name}
    assert titles == {"anon (sampled)", "needed (sampled)"}


def test_a_metric_is_of_its_operations_only() -> None:
    load = make_result(make_cell())
    command = replace(load, cell=Cell.of_command("mine", ("true",), "process"))
    assert (LOAD.of(load), LOAD.of(command)) == (load.load_ns, None)
    assert (METRICS["time"].of(load), METRICS["time"].of(command)) == (None, load.ready_ns)
    assert PEAK.of(load) == PEAK.of(command) == load.peaks.rss_bytes
    assert METRICS["use_peak_rss"].of(load) is None  # forward passes are no use


def test_a_metric_has_a_short_name_too() -> None:
    assert named("rss") is named("peak_rss") is PEAK
    assert (named("cgroup").name, named("cuda").name) == ("peak_cgroup", "cuda_allocated")
    with pytest.raises(UnknownName, match="peak_rs"):
        named("peak_rs")


def test_the_phases_of_a_load_have_one_name_each() -> None:
    result = make_result(make_cell())
    names = ["import", "prepare", "read", UNNAMED, "read", "touch", "forward"]
    phases = tuple(replace(result.phases[0], name=name) for name in names)
    load = replace(result, phases=phases)
    expected = ["read", f"{UNNAMED} after read", "read 2", "touch"]
    assert [name for name, _ in phases_of_load(load)] == expected
    used = replace(load, cell=make_cell(use="fork"))
    assert [name for name, _ in phases_of_load(used)] == [*expected, "forward"]
    command = replace(load, cell=Cell.of_command("mine", ("true",), "process"))
    assert [name for name, _ in phases_of_load(command)][:2] == ["import", "prepare"]
