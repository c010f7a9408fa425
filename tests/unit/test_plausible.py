"""A result whose figures contradict each other is a failed measurement."""

from dataclasses import replace

import pytest
from factories import make_result

from weighin.result import Cost, Memory, Peaks, Rank, Result
from weighin.run.judge import contradiction, is_beyond
from weighin.units import MIB

BASE = Memory(100 * MIB, 60 * MIB, 40 * MIB, 0)


def result(**changes: object) -> Result:
    plain = replace(
        make_result(),
        baseline=BASE,
        peaks=Peaks(rss_bytes=300 * MIB, cgroup_bytes=400 * MIB, anon_sampled_bytes=250 * MIB),
        load_ns=10,
        ready_ns=20,
        cost=Cost(wall_ns=30),
    )
    plain = replace(plain, cell=replace(plain.cell, ram_limit_bytes=500 * MIB))
    return replace(plain, **changes)  # type: ignore[arg-type]


def peaks(**changes: int) -> Peaks:
    return replace(result().peaks, **changes)


def told(result: Result) -> str:
    spent_ns = max(result.ready_ns or 0, result.load_ns or 0)
    assert result.cost
    cell, wall_ns = replace(result.cell, ranks=max(1, len(result.ranks))), result.cost.wall_ns
    return contradiction(cell, result.peaks, result.baseline, spent_ns, wall_ns)


def test_a_result_without_contradictions_stays() -> None:
    assert told(result()) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"peaks": peaks(anon_sampled_bytes=410 * MIB, rss_bytes=450 * MIB)},
            "outside of its cgroup",
        ),
        ({"peaks": peaks(cgroup_bytes=520 * MIB)}, "the limit was changed"),
        ({"peaks": peaks(anon_sampled_bytes=320 * MIB)}, "the peak was reset"),
        (
            {"peaks": peaks(rss_bytes=80 * MIB, anon_sampled_bytes=60 * MIB)},
            "the memory before the load",
        ),
        ({"ready_ns": 31}, "longer than the whole measurement"),
    ],
)
def test_a_contradiction_voids_a_result(changes: dict[str, object], words: str) -> None:
    assert words in told(result(**changes))


def test_several_ranks_may_share_more_than_their_cgroup_has() -> None:
    ranks = result(ranks=(Rank(), Rank()), peaks=peaks(anon_sampled_bytes=410 * MIB))
    assert told(ranks) == ""


@pytest.mark.parametrize(("size", "bound"), [(None, 5), (5, None), (104 * MIB, 100 * MIB)])
def test_a_size_within_the_kernels_slack_is_not_beyond(size: int | None, bound: int | None) -> None:
    assert not is_beyond(size, bound)
