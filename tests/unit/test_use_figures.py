"""The figures of the use of a model after its load."""

from dataclasses import replace

import pytest
from factories import make_cell, make_result

from weighin.records import metrics
from weighin.records.metrics import COLUMNS
from weighin.result import Memory, Phase, Result, Use

PHASES = [(10, 300, 700, 50), (5, 200, 900, 60), (7, 100, None, 40)]


def used(phases: list[tuple[int, int, int | None, int]], use: Use | None = None) -> Result:
    """A result whose forward passes have these (time, peak RSS, peak of the cgroup, anonymous memory)."""
    result = make_result(make_cell("baseline"), [("import", 1, 0.1, 0.1), ("read", 1, 1, 0)])
    passes = tuple(
        Phase(
            "forward", 100, 100 + ns, rss, Memory(rss, anon, 0, 0), 0, 0, peak_cgroup_bytes=cgroup
        )
        for ns, rss, cgroup, anon in phases
    )
    return replace(result, phases=(*result.phases, *passes), use=use)


def test_the_figures_are_of_all_passes_and_the_memory_is_that_after_the_last() -> None:
    result = used(PHASES)
    assert COLUMNS["use_s"].read(result) == 22
    assert COLUMNS["use_peak_rss_bytes"].read(result) == 300
    assert COLUMNS["use_peak_cgroup_bytes"].read(result) == 900
    assert COLUMNS["use_anon_bytes"].read(result) == 40


def test_a_load_without_a_use_has_none_of_them() -> None:
    result = used([])
    assert COLUMNS["use_s"].read(result) is None
    assert COLUMNS["use_peak_rss_bytes"].read(result) is None
    assert COLUMNS["use_peak_cgroup_bytes"].read(result) is None
    assert COLUMNS["use_anon_bytes"].read(result) is None
    assert COLUMNS["use_child_bytes"].read(result) is None
    assert COLUMNS["use_anon_sampled_bytes"].read(result) is None
    assert metrics.use_needed_bytes(result) == 0


def test_forked_processes_need_their_own_memory() -> None:
    forked = used(PHASES, Use(1000, "", (30, 50, 20)))
    assert COLUMNS["use_child_bytes"].read(forked) == 50
    assert COLUMNS["use_anon_sampled_bytes"].read(forked) == 1000
    assert metrics.use_needed_bytes(forked) == 1100
    unknown = used(PHASES, Use(None, "backward", ()))
    assert COLUMNS["use_child_bytes"].read(unknown) is None
    assert metrics.use_needed_bytes(unknown) == 0


def test_memory_as_a_multiple_of_the_model_counts_from_the_imports() -> None:
    result = replace(used(PHASES), model_bytes=200, baseline=Memory(90, 50, 0, 0))
    assert metrics.per_model(result, 450) == pytest.approx(2.0)
    assert metrics.per_model(result, None) is None
    assert metrics.per_model(replace(result, baseline=None), 450) is None
    assert metrics.per_model(replace(result, model_bytes=None), 450) is None
    assert metrics.per_model(replace(result, model_bytes=0), 450) is None
