"""What the use of a loaded model costs, pass by pass."""

import mmap

import pytest
from cells import LARGE, MIB, Bench, Outcome, Phase, Result, Watched, known, names_of
from nightly import isolations, limits

# Of the model's 150 MiB, so much is left beside the anonymous memory of a load.
LEFT = 60 * MIB


def passes_of(result: Result) -> list[Phase]:
    return [phase for phase in result.phases if phase.name == "forward"]


@pytest.mark.parametrize("isolation", isolations("process"), indirect=True)
def test_each_pass_is_a_phase_and_no_pass_is_none(bench: Bench, isolation: Watched) -> None:
    result = bench("mmap_assign", isolation, passes=3)
    assert names_of(result)[-4:] == ["touch", "forward", "forward", "forward"]
    assert result.cost and result.cost.first_use_ns
    together = sum(phase.end_ns - phase.start_ns for phase in passes_of(result))
    assert result.cost.first_use_ns == pytest.approx(together, rel=0.5)
    unused = bench("mmap_assign", isolation, passes=0)
    assert (names_of(unused)[-1], unused.outcome) == ("touch", Outcome.OK)
    assert unused.cost and unused.cost.first_use_ns is None


@pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)
def test_below_the_models_size_a_mapped_model_is_read_again_in_every_pass(
    bench: Bench, limiting: Watched
) -> None:
    roomy = bench("mmap_assign", limiting, spec=LARGE, limit_bytes=1024 * MIB, passes=3)
    too_small = known(roomy.peaks.anon_sampled_bytes) + LEFT
    result = bench("mmap_assign", limiting, spec=LARGE, limit_bytes=too_small, passes=3)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    again = [phase.workingset_refault_file for phase in passes_of(result)]
    assert len(again) == 3
    assert min(pages or 0 for pages in again) * mmap.PAGESIZE > 16 * MIB, again
    seldom = max(phase.workingset_refault_file or 0 for phase in passes_of(roomy)[1:])
    assert seldom * mmap.PAGESIZE < 16 * MIB
