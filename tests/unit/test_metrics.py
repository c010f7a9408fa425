"""The metrics of the gate: how their figures are written and read, and which phases explain them."""

from dataclasses import replace
from typing import Any

import pytest
from factories import make_cell, make_result
from snapshots import Compare

from weighin.cell import Cell
from weighin.errors import UnknownName
from weighin.records.metrics import METRICS, PHASE_FIGURES, Tolerance, named, phases_of_load
from weighin.result import UNNAMED, Memory, Peaks, Phase, Ran, Result, Use, phases_of
from weighin.units import GIB, MIB

PEAK, LOAD = METRICS["peak_rss"], METRICS["load"]
SECOND = 10**9


def test_each_metric_with_its_unit_what_it_may_grow_by_and_the_figure_of_phases(
    same: Compare,
) -> None:
    """Of a figure of 1 GiB and one of 100 GiB, or of 1 s and 10 s: 16 MiB or 1 %, 4 times as long."""
    lines = []
    for metric in METRICS.values():
        figures = (SECOND, 10 * SECOND) if metric.unit == "ns" else (GIB, 100 * GIB)
        tolerance = metric.tolerance
        more = ", ".join(
            f"{metric.text(was)} +{metric.text(tolerance.allowance(was))}" for was in figures
        )
        lines.append(f"{metric.name} ({metric.title}): {more}; {tolerance.direction} is better;")
        lines[-1] += f" explained by {metric.in_phase}\n"
    same("metrics.txt", "".join(lines))
    assert METRICS["floor"].tolerance.allowance(GIB // 2) == 24 * MIB
    tolerance = Tolerance(relative=0.1, absolute=50)  # the larger of share and amount
    assert [tolerance.allowance(was) for was in (499, 500, 510)] == [50, 50, 51]


def test_a_size_is_rounded_and_a_change_has_its_sign_and_its_share() -> None:
    sizes = {GIB: "1.000 GiB", GIB - 1: "1024.0 MiB", -2 * GIB: "-2.000 GiB", 5 * MIB: "5.0 MiB"}
    assert {size: PEAK.text(size) for size in sizes} == sizes
    changes = {(1600, 1600): "±0", (1600, 1680): "+80.0 MiB (+5.0 %)", (1600, 1599): "-1.0 MiB (-0.1 %)", (0, 5): "+5.0 MiB"}  # fmt: skip
    assert {(was, now): PEAK.change(was * MIB, now * MIB) for was, now in changes} == changes
    assert LOAD.change(2 * SECOND, 3 * SECOND) == "+1.00 s (+50.0 %)"
    assert [LOAD.change(SECOND, SECOND + step)[0] for step in (1, -1)] == ["+", "-"]


def test_a_metric_has_a_short_name_too() -> None:
    assert named("rss") is named("peak_rss") is PEAK
    assert (named("cgroup").name, named("cuda").name) == ("peak_cgroup", "cuda_allocated")
    with pytest.raises(UnknownName, match="peak_rs"):
        named("peak_rs")


# -- the figures of a result

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
    without = replace(result, cell=make_cell(), use=None)  # forward passes are no use
    assert {name for name in FIGURES if METRICS[name].of(without) is None} == {
        "floor", "use_peak_rss", "use_anon", "use_child", "use", "time",
    }  # fmt: skip
    command = replace(result, cell=Cell.of_command("mine", ("true",), "process"))
    assert [METRICS[name].of(command) for name in ("load", "time", "peak_rss")] == [None, 15, 1]


def test_each_metric_is_explained_by_a_figure_of_the_phases() -> None:
    phase = Phase(
        "read", 5, 12, 1, Memory(0, 2, 0, 0), 0, 0, peak_cgroup_bytes=3,
        peak_cuda_requested_bytes=4, peak_cuda_allocated_bytes=5, peak_cuda_reserved_bytes=6,
    )  # fmt: skip
    assert {name: read(phase) for name, read in PHASE_FIGURES.items()} == {
        "peak_rss": 1, "end_anon": 2, "peak_cgroup": 3, "cuda_requested": 4, "cuda_allocated": 5,
        "cuda_reserved": 6, "time": 7,
    }  # fmt: skip


# -- the phases of a load


def had(*names: str, **cell: Any) -> Result:
    phases = tuple(
        Phase(name, 0, 1, 1, Memory(1, number, 0, 0), 0, 0) for number, name in enumerate(names, 1)
    )
    return replace(make_result(make_cell(**cell)), phases=phases)


LOADS = ("import", "prepare", "read", UNNAMED, "read", "touch", "forward")
NAMED = ["read", f"{UNNAMED} after read", "read 2", "touch"]


def test_the_phases_of_a_load_have_one_name_each() -> None:
    imports = ["import transformers", "import diffusers", "import timm"]
    first, named = UNNAMED, [UNNAMED, f"{UNNAMED} after {UNNAMED}", "read", "read 2", "read 3"]
    for result, names in (
        (had(*LOADS), NAMED),
        (had(*LOADS, use="fork"), [*NAMED, "forward"]),
        (had("read", "touch", "forward"), ["read", "touch"]),
        (had("read", "sync", "forward", operation="save"), ["read", "sync"]),
        *((had("import", "prepare", one, first, first, "read", "read", "read"), named) for one in imports),
    ):  # fmt: skip
        assert [name for name, _ in phases_of_load(result)] == names


def test_memory_when_ready_is_that_after_the_last_phase() -> None:
    of = METRICS["ready_anon"].of
    assert of(had("read", "touch", "forward")) == 2
    assert of(had("read", "sync", "forward", operation="save")) == 2


def test_the_phases_of_a_command_are_all_and_of_a_body_that_ran_twice_those_of_its_last_run() -> (
    None
):
    command = replace(had(*LOADS), cell=Cell.of_command("mine", ("true",), "process"))
    assert [name for name, _ in phases_of_load(command)][:2] == ["import", "prepare"]
    twice = had("import", "prepare", "first", "prepare", "second")
    assert [phase.name for phase in phases_of(twice.phases)] == ["second"]
