"""Cells of several ranks: shared memory counts once, and the rank that ended a cell is named."""

import csv
from typing import Any

import pytest
from cells import MIB, Bench, Outcome, Result, Watched, known, sharing_strategies
from nightly import limits, nightly

BY_DAY = pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)


@pytest.fixture(scope="module")
def amounts(bench: Bench, limiting: Watched) -> Result:
    result = bench("rank_amounts", limiting, ranks=4)
    assert (result.outcome, result.message) == ("ok", "")
    return result


@BY_DAY
def test_memory_that_ranks_share_counts_once(amounts: Result) -> None:
    """4 x 64 MiB of their own and 256 MiB together are 512 MiB, whatever the sum of RSS says."""
    charged = {phase.name: phase.end.cgroup_bytes for phase in amounts.phases}
    before, after = known(charged["meet"]), known(charged["take"])
    assert after - before == pytest.approx(512 * MIB, rel=0.02)
    # The checksums of four ranks need the rest.
    assert after <= known(amounts.peaks.cgroup_bytes) < after + 32 * MIB
    assert amounts.baseline
    sum_of_peaks = sum(rank.peak_rss_bytes or 0 for rank in amounts.ranks)
    assert sum_of_peaks - 4 * amounts.baseline.rss_bytes > 1200 * MIB


@BY_DAY
def test_the_pss_of_all_ranks_counts_each_page_once(amounts: Result) -> None:
    assert amounts.peaks.pss_bytes == sum(rank.pss_bytes or 0 for rank in amounts.ranks)
    own = known(amounts.peaks.anon_sampled_bytes)
    # Beside anonymous and shared memory, there are the libraries, once: some 105 MiB if no other
    # process maps them. If each rank counted all of its shared pages, they were over 1,400 MiB.
    assert own + 256 * MIB < amounts.peaks.pss_bytes < own + (256 + 150) * MIB


@BY_DAY
def test_samples_are_those_of_all_ranks_together_and_of_each_rank(
    amounts: Result, bench: Bench
) -> None:
    last = max(bench.samples(amounts), key=lambda sample: sample["anon_bytes"] or 0)
    assert last["shmem_bytes"] == pytest.approx(256 * MIB, rel=0.02)
    highest = 0
    for rank in amounts.ranks:
        assert rank.samples_path
        with (bench.run / rank.samples_path).open() as file:
            highest += max(int(row["anon_bytes"]) for row in csv.DictReader(file))
    assert last["anon_bytes"] == pytest.approx(highest, rel=0.05)


@pytest.mark.parametrize(
    ("isolation", "rank"),
    [
        pytest.param("cgroup", 2, marks=pytest.mark.cgroup),
        pytest.param("cgroup", 0, marks=[pytest.mark.cgroup, pytest.mark.nightly]),
        pytest.param("docker", 1, marks=pytest.mark.docker),
    ],
    indirect=["isolation"],
)
def test_the_rank_that_the_kernel_killed_is_named(
    bench: Bench, isolation: Watched, rank: int
) -> None:
    options: dict[str, Any] = {"how": "takes too much", "rank": rank, "limit_bytes": 1200 * MIB}
    result = bench("rank_ends", isolation, ranks=3, **options)
    assert result.outcome == Outcome.OOM_KILLED
    assert result.message == f"rank {rank}: killed by the kernel for lack of memory in phase 'bad'"
    assert (result.last_phase, result.oom_kills) == ("bad", 1)
    assert result.ranks[rank].exit_code == 137


FAILED = [
    pytest.param("raises", "strategy_failed", "rank 1: ValueError: the shard is broken (rank_ends.py:20)", marks=pytest.mark.nightly),
    ("exits as if all were well", "strategy_failed", "rank 1: the measured process ended with exit code 0 in phase 'bad'"),
    ("is wrong", "wrong_weights", "rank 1: 2 tensors with other values than in the checkpoint: embedding.weight, head.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "outcome", "message"), FAILED)
def test_the_rank_that_failed_is_named(
    bench: Bench, process: Watched, how: str, outcome: str, message: str
) -> None:
    result = bench("rank_ends", process, ranks=3, how=how)
    assert (result.outcome, result.message) == (outcome, message)
    assert result.ranks[1].exit_code == (0 if how == "exits as if all were well" else 1)


def test_the_rank_that_hangs_is_named(bench: Bench, process: Watched) -> None:
    result = bench("rank_ends", process, ranks=3, how="hangs", timeout_s=30)
    assert result.outcome == Outcome.TIMEOUT
    assert result.message == "still running after 30 s, rank 1 in phase 'bad'"
    assert result.last_phase == "bad"


def test_a_cell_is_as_slow_as_its_slowest_rank(bench: Bench, process: Watched) -> None:
    result = bench("rank_ends", process, ranks=2, how="is late")
    times = [rank.load_ns or 0 for rank in result.ranks]
    assert result.outcome == Outcome.OK
    assert result.load_ns == max(times) > 1e9
    assert result.ready_ns == max(rank.ready_ns or 0 for rank in result.ranks)


@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32")])
@pytest.mark.parametrize("name", sharing_strategies())
def test_strategies_that_divide_a_load_leave_the_right_model_in_each_rank(
    bench: Bench, process: Watched, name: str, dtype: str
) -> None:
    """The worker of each rank compares all values, ties and dtypes with the checkpoint."""
    result = bench(name, process, ranks=2, dtype=dtype)
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("fmt", ["sharded", *nightly("safetensors")])
def test_dcp_reads_hugging_face_files_into_shards(bench: Bench, process: Watched, fmt: str) -> None:
    result = bench("dcp_fsdp", process, ranks=2, fmt=fmt)
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("limiting", limits("docker"), indirect=True)
@pytest.mark.parametrize("name", ["streaming", *nightly("baseline", "mmap_assign")])
def test_a_strategy_of_one_process_runs_in_each_rank(
    bench: Bench, limiting: Watched, name: str
) -> None:
    result = bench(name, limiting, ranks=2)
    assert (result.outcome, result.message) == ("ok", "")
    assert [rank.exit_code for rank in result.ranks] == [0, 0]
    assert [str(rank.samples_path)[-10:] for rank in result.ranks] == ["-rank0.csv", "-rank1.csv"]
