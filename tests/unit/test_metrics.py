"""The metrics of the gate: how their figures are written and read, and which phases explain them."""

from dataclasses import replace

import pytest
from factories import make_cell, make_result

from weighin.cell import Cell
from weighin.errors import UnknownName
from weighin.records.metrics import METRICS, PHASE_FIGURES, Tolerance, named, phases_of_load
from weighin.result import UNNAMED, Memory, Peaks, Phase, Ran, Use, phases_of
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


def test_what_is_allowed_is_the_larger_of_share_and_amount() -> None:
    tolerance = Tolerance(relative=0.1, absolute=50)
    assert [tolerance.allowance(was) for was in (499, 500, 510)] == [50, 50, 51]


def test_which_metrics_are_times_and_which_are_sampled() -> None:
    assert {name for name, metric in METRICS.items() if metric.unit == "ns"} == {
        "use", "load", "ready", "time",
    }  # fmt: skip
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


FIGURES = {
    "peak_rss": 1, "above_import": -899, "anon": 2, "ready_anon": 3, "peak_cgroup": 4, "pss": 5,
    "cuda_requested": 6, "cuda_allocated": 7, "cuda_reserved": 8, "floor": None, "use_peak_rss": 9,
    "use_anon": 10, "use_child": 12, "use": 13, "load": 14, "ready": 15, "needed": 16, "time": None,
}  # fmt: skip


def test_each_metric_reads_its_own_figure() -> None:
    touch = Phase("touch", 0, 1, 1, Memory(1, 3, 0, 0), 0, 0)
    used = Phase("use: fork", 100, 113, 9, Memory(1, 10, 0, 0), 0, 0)
    result = replace(
        make_result(make_cell(use="fork")),
        phases=(touch, used),
        baseline=Memory(900, 500, 400, 0),
        peaks=Peaks(
            rss_bytes=1, cgroup_bytes=4, anon_sampled_bytes=2, cuda_requested_bytes=6,
            cuda_allocated_bytes=7, cuda_reserved_bytes=8, pss_bytes=5,
        ),
        use=Use(11, "", (12, 1)),
        load_ns=14,
        ready_ns=15,
        ran=Ran(1, needed_bytes=16),
    )  # fmt: skip
    assert {name: metric.of(result) for name, metric in METRICS.items()} == FIGURES
    assert METRICS["needed"].of(replace(result, ran=None)) is None
    assert METRICS["ready_anon"].of(replace(result, phases=())) is None
    without = replace(result, cell=make_cell(), use=None)
    assert {name for name in FIGURES if METRICS[name].of(without) is None} == {
        "floor", "use_peak_rss", "use_anon", "use_child", "use", "time",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        # Of a figure of 1 GiB, and of one of 100 GiB (of 1 s, and of 10 s).
        ("peak_rss above_import anon ready_anon pss use_peak_rss use_anon use_child needed",
         (16 * MIB, GIB)),
        ("peak_cgroup", (128 * MIB, 4 * GIB)),
        ("cuda_requested cuda_allocated cuda_reserved", (0, 0)),
        ("floor", (round(0.03 * GIB), 3 * GIB)),
    ],
)  # fmt: skip
def test_how_much_memory_may_grow_without_a_rule(names: str, allowed: tuple[int, int]) -> None:
    for name in names.split():
        tolerance = METRICS[name].tolerance
        assert (tolerance.allowance(GIB), tolerance.allowance(100 * GIB)) == allowed, name
        assert tolerance.direction == "lower"
    assert METRICS["floor"].tolerance.allowance(GIB // 2) == 24 * MIB


@pytest.mark.parametrize("name", ["use", "load", "ready", "time"])
def test_a_time_may_become_four_times_as_long(name: str) -> None:
    tolerance = METRICS[name].tolerance
    assert (tolerance.allowance(SECOND), tolerance.allowance(10 * SECOND)) == (
        5 * SECOND,
        30 * SECOND,
    )


def test_each_metric_is_explained_by_a_figure_of_the_phases() -> None:
    phase = Phase(
        "read", 5, 12, 1, Memory(0, 2, 0, 0), 0, 0, peak_cgroup_bytes=3,
        peak_cuda_requested_bytes=4, peak_cuda_allocated_bytes=5, peak_cuda_reserved_bytes=6,
    )  # fmt: skip
    assert {name: read(phase) for name, read in PHASE_FIGURES.items()} == {
        "peak_rss": 1, "end_anon": 2, "peak_cgroup": 3, "cuda_requested": 4, "cuda_allocated": 5,
        "cuda_reserved": 6, "time": 7,
    }  # fmt: skip
    in_phase: dict[str, list[str]] = {}
    for metric in METRICS.values():
        in_phase.setdefault(metric.in_phase, []).append(metric.name)
    assert in_phase == {
        "peak_rss": ["peak_rss", "above_import", "anon", "floor", "use_peak_rss"],
        "end_anon": ["ready_anon", "pss", "use_anon", "use_child"],
        "peak_cgroup": ["peak_cgroup", "needed"],
        "cuda_requested": ["cuda_requested"],
        "cuda_allocated": ["cuda_allocated"],
        "cuda_reserved": ["cuda_reserved"],
        "time": ["use", "load", "ready", "time"],
    }


def test_a_change_by_the_smallest_amount_has_its_sign() -> None:
    assert LOAD.change(SECOND, SECOND + 1).startswith("+")
    assert LOAD.change(SECOND, SECOND - 1).startswith("-")


@pytest.mark.parametrize(("operation", "last"), [("load", "touch"), ("save", "sync")])
def test_memory_when_ready_is_that_after_the_last_phase(operation: str, last: str) -> None:
    phases = tuple(
        Phase(name, 0, 1, 1, Memory(1, number, 0, 0), 0, 0)
        for number, name in enumerate(("read", last, "forward"), 1)
    )
    result = replace(make_result(make_cell(operation=operation)), phases=phases)
    names = [phase.name for phase in phases]
    assert METRICS["ready_anon"].of(result) == names.index(last) + 1
    assert [name for name, _ in phases_of_load(result)] == names[: names.index(last) + 1]


def test_imports_of_libraries_come_before_the_load() -> None:
    result = make_result(make_cell())
    for first in ("import transformers", "import diffusers", "import timm"):
        phases = tuple(
            replace(result.phases[0], name=name)
            for name in ("import", "prepare", first, UNNAMED, UNNAMED, "read", "read", "read")
        )
        found = phases_of_load(replace(result, phases=phases))
        assert [name for name, _ in found] == [
            UNNAMED, f"{UNNAMED} after {UNNAMED}", "read", "read 2", "read 3",
        ]  # fmt: skip


def test_the_phases_of_a_body_that_ran_twice_are_those_of_its_last_run() -> None:
    end = Memory(0, 0, 0, 0)
    names = ("import", "prepare", "first", "prepare", "second")
    phases = [Phase(name, 0, 1, 0, end, 0, 0) for name in names]
    assert [phase.name for phase in phases_of(phases)] == ["second"]
