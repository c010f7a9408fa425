"""Known amounts of memory, taken in a real worker, are what the record says.

One worker takes them all, a phase each (strategies/known_amounts.py): every test reads its result.
"""

import pytest
from cells import (
    FILE_BYTES,
    MIB,
    Bench,
    Phase,
    Result,
    Watched,
    keeps_marks_of_phases,
    known,
    known_file,
    names_of,
    phases_of,
)

RSS_TOLERANCE = 2 * MIB
CGROUP_TOLERANCE = 4 * MIB


@pytest.fixture(scope="module")
def result(bench: Bench, isolation: Watched) -> Result:
    result = bench("known_amounts", isolation, files=[known_file(bench.strategies)])
    assert (result.outcome, result.message) == ("ok", "")
    return result


@pytest.fixture
def phases(result: Result) -> dict[str, Phase]:
    return phases_of(result)


def before(result: Result, name: str) -> Phase:
    """Return the phase that ended where the phase ``name`` began."""
    names = [phase.name for phase in result.phases]
    return result.phases[names.index(name) - 1]


TAKEN = {
    "take 512 MiB": (512 * MIB, (512 * MIB, 0, 0)),
    "hold them": (0, (0, 0, 0)),
    "give them back": (0, (-512 * MIB, 0, 0)),
    "spike of 300 MiB": (300 * MIB, (0, 0, 0)),
    "after the spike": (0, (0, 0, 0)),
    "spike with the GIL held": (300 * MIB, (0, 0, 0)),
    "after the spike with the GIL held": (0, (0, 0, 0)),
    "read a mapped file": (FILE_BYTES, (0, FILE_BYTES, 0)),
    "unmap it": (0, (0, -FILE_BYTES, 0)),
    "write 64 MiB of shared memory": (64 * MIB, (0, 0, 64 * MIB)),
    "close it": (0, (0, 0, -64 * MIB)),
}
"""What each phase takes at most, and the anonymous, file and shared memory that it keeps."""


@pytest.mark.parametrize("name", TAKEN)
def test_a_phase_has_the_peak_and_the_end_of_what_was_taken_in_it(
    result: Result, phases: dict[str, Phase], name: str
) -> None:
    most, sizes = TAKEN[name]
    phase, start = phases[name], before(result, name)
    assert phase.peak_rss_bytes - start.end.rss_bytes == pytest.approx(most, abs=RSS_TOLERANCE)
    parts = zip(parts_of(phase), parts_of(start), strict=True)
    kept = tuple(after - at_first for after, at_first in parts)
    assert kept == pytest.approx(sizes, abs=RSS_TOLERANCE)
    if result.cell.isolation != "process" and keeps_marks_of_phases():
        # The page cache of a file stays charged when it is unmapped, and is none of a new rise.
        rise = known(phase.peak_cgroup_bytes) - known(start.end.cgroup_bytes)
        assert rise == pytest.approx(most, abs=CGROUP_TOLERANCE)


def test_the_parts_of_rss_are_its_sum(result: Result) -> None:
    for phase in result.phases:
        assert phase.end.rss_bytes == sum(parts_of(phase)) <= phase.peak_rss_bytes
        assert phase.end.swap_bytes == 0


def parts_of(phase: Phase) -> tuple[int, int, int]:
    return phase.end.anon_bytes, phase.end.file_bytes, phase.end.shmem_bytes


def test_only_a_plain_process_has_no_cgroup_figures(result: Result) -> None:
    marks = [phase.peak_cgroup_bytes for phase in result.phases]
    if result.cell.isolation == "process":
        assert {*marks, result.peaks.cgroup_bytes, result.oom_kills, result.pressure} == {None}
        assert result.warnings == ("a plain process has no cgroup of its own",)
    else:
        assert (None in marks) != keeps_marks_of_phases()
        assert result.peaks.cgroup_bytes is not None
        assert result.oom_kills == 0
        assert result.warnings == ()


def test_the_peaks_of_the_cell_are_the_largest_of_its_load(
    result: Result, phases: dict[str, Phase]
) -> None:
    names = names_of(result)
    assert (names[:2], names[-2:]) == (["import", "prepare"], ["touch", "forward"])
    start, end = (result.phases.index(phases[name]) for name in ("prepare", "touch"))
    load = result.phases[start + 1 : end + 1]
    assert result.peaks.rss_bytes == max(phase.peak_rss_bytes for phase in load)
    taken = phases["take 512 MiB"]
    assert result.peaks.rss_bytes == pytest.approx(taken.peak_rss_bytes, abs=RSS_TOLERANCE)
    assert result.baseline
    above = result.peaks.rss_bytes - result.baseline.rss_bytes
    assert above == pytest.approx(512 * MIB, abs=48 * MIB)  # the model, and torch's first load
    if result.peaks.cgroup_bytes is not None and keeps_marks_of_phases():
        assert result.peaks.cgroup_bytes == max(phase.peak_cgroup_bytes or 0 for phase in load)
        # Pages of torch's own files that a busy machine had dropped are charged on top.
        above = result.peaks.cgroup_bytes - known(taken.peak_cgroup_bytes)
        assert 0 <= above <= 64 * MIB


def test_what_lasts_is_in_the_samples(
    bench: Bench, result: Result, phases: dict[str, Phase]
) -> None:
    held, mapped = phases["hold them"], phases["read a mapped file"]
    peaks = [known(result.peaks.anon_sampled_bytes), known(result.peaks.file_sampled_bytes)]
    assert peaks == pytest.approx([held.end.anon_bytes, mapped.end.file_bytes], abs=RSS_TOLERANCE)
    assert result.cached_bytes_at_start == 0
    inside = [
        sample
        for sample in bench.samples(result)
        if held.start_ns <= (sample["t_ns"] or 0) <= held.end_ns
    ]
    assert len(inside) >= 3  # 1 s at 5 ms a look, on a busy machine
    assert {sample["swap_bytes"] for sample in inside} == {0}
    for sample in inside[:-1]:  # the last may have been read after the phase's end
        assert sample["anon_bytes"] == pytest.approx(held.end.anon_bytes, abs=RSS_TOLERANCE)


def test_the_phases_follow_each_other(result: Result) -> None:
    times = [time for phase in result.phases for time in (phase.start_ns, phase.end_ns)]
    assert times == sorted(times)
    assert result.cost and result.load_ns and result.ready_ns and result.cost.touch_ns
    assert result.ready_ns == result.load_ns + result.cost.touch_ns
    assert result.load_ns >= 300_000_000  # what its phases sleep at least
    assert result.cost.wall_ns > result.ready_ns
