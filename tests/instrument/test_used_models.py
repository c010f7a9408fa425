"""What the use of a loaded model costs: real uses in real cells, with known sizes of memory."""

from pathlib import Path

import pytest
from cells import LARGE, MIB, Bench, Outcome, Result, Watched, known, names_of, phases_of

NOISE = 0.1  # of the model: buffers of the math libraries, Python's own objects
FAILS = "def use(model):\n    raise ValueError('no such layer')\n"


def used(bench: Bench, isolation: Watched, use: str, strategy: str = "mmap_assign") -> Result:
    result = bench(strategy, isolation, spec=LARGE, use=use)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    assert names_of(result)[-1] == f"use: {use}"
    return result


def grown(result: Result) -> float:
    """By how much the use made the anonymous memory grow, as a multiple of the model."""
    [phase] = result.use_phases
    rise = phase.end.anon_bytes - phases_of(result)["touch"].end.anon_bytes
    return rise / known(result.model_bytes)


@pytest.mark.cgroup
def test_the_first_write_copies_a_mapped_model_and_no_other(bench: Bench, cgroup: Watched) -> None:
    mapped = used(bench, cgroup, "write")
    assert grown(mapped) == pytest.approx(1.0, abs=NOISE)
    assert mapped.use
    assert known(mapped.use.anon_sampled_bytes) >= mapped.use_phases[0].end.anon_bytes
    assert mapped.use_phases[0].peak_cgroup_bytes
    assert grown(used(bench, cgroup, "write", "streaming")) == pytest.approx(0.0, abs=NOISE)


@pytest.mark.cgroup
def test_after_a_step_of_adamw_a_mapped_and_a_copied_model_are_alike(
    bench: Bench, cgroup: Watched
) -> None:
    for strategy in ("mmap_assign", "baseline"):  # 150 MiB of weights: a backward pass is not free
        result = used(bench, cgroup, "adamw", strategy)
        assert result.baseline
        above = result.use_phases[-1].end.anon_bytes - result.baseline.anon_bytes
        assert above / known(result.model_bytes) == pytest.approx(4.0, abs=4 * NOISE), strategy
        assert result.use and result.use.gradients == "backward"
        assert result.cost and result.cost.first_use_ns


@pytest.mark.cgroup
def test_the_peak_of_a_use_is_not_that_of_its_load(bench: Bench, cgroup: Watched) -> None:
    copied = used(bench, cgroup, "deepcopy")
    assert grown(copied) == pytest.approx(1.0, abs=NOISE)
    [phase] = copied.use_phases
    of_load = known(copied.peaks.rss_bytes)
    assert phase.peak_rss_bytes > of_load + 0.8 * known(copied.model_bytes)


@pytest.mark.cgroup
def test_forked_processes_copy_what_they_write_and_the_group_is_charged_for_all(
    bench: Bench, cgroup: Watched
) -> None:
    result = used(bench, cgroup, "fork")
    assert result.use
    children = result.use.children_private_bytes
    assert [*children] == pytest.approx([known(result.model_bytes)] * 2, rel=0.3)
    assert grown(result) == pytest.approx(0.0, abs=NOISE)
    [phase] = result.use_phases
    assert known(phase.peak_cgroup_bytes) > sum(children)
    assert not [text for text in result.warnings if "it started" in text]


@pytest.mark.cgroup
def test_a_save_leaves_no_file(bench: Bench, cgroup: Watched) -> None:
    assert used(bench, cgroup, "save").written is None


def test_a_use_that_fails_is_an_outcome_that_names_it(
    bench: Bench, process: Watched, tmp_path: Path
) -> None:
    (file := tmp_path / "probe.py").write_text(FAILS)
    result = bench("baseline", process, use="probe", use_path=str(file))
    assert result.outcome is Outcome.USE_FAILED
    assert result.message == "probe: ValueError: no such layer (probe.py:2); every weight is right"
    assert (result.last_phase, result.ready_ns is not None) == ("use: probe", True)


@pytest.mark.cgroup
def test_a_use_is_killed_where_its_load_lives(bench: Bench, cgroup: Watched) -> None:
    limit = 640 * MIB  # two copies of 150 MiB beside the import, and not four
    result = bench("mmap_assign", cgroup, spec=LARGE, use="adamw", limit_bytes=limit)
    assert (result.outcome, result.last_phase) == (Outcome.OOM_KILLED, "use: adamw")
    assert result.message.endswith("in phase 'use: adamw'")
    assert bench("mmap_assign", cgroup, spec=LARGE, limit_bytes=limit).outcome is Outcome.OK
