"""Cells of several ranks: shared memory counts once, and the rank that ended a cell is named."""

import csv
from pathlib import Path

import pytest
from cells import MIB, Bench, Outcome, Result, Watched, prepared_isolation, sharing_strategies
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
    before, after, peak = charged["meet"], charged["take"], amounts.peaks.cgroup_bytes
    assert before
    assert after
    assert peak
    assert after - before == pytest.approx(512 * MIB, rel=0.02)
    assert after <= peak < after + 32 * MIB  # the checksums of four ranks need the rest
    assert amounts.baseline
    sum_of_peaks = sum(rank.peak_rss_bytes or 0 for rank in amounts.ranks)
    assert sum_of_peaks - 4 * amounts.baseline.rss_bytes > 1200 * MIB


@BY_DAY
def test_the_pss_of_all_ranks_counts_each_page_once(amounts: Result) -> None:
    assert amounts.baseline
    assert amounts.peaks.pss_bytes == sum(rank.pss_bytes or 0 for rank in amounts.ranks)
    own = amounts.peaks.anon_sampled_bytes
    assert own
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


@pytest.mark.cgroup
@pytest.mark.parametrize("rank", [2, *nightly(0)])
def test_the_rank_that_the_kernel_killed_is_named(bench: Bench, rank: int) -> None:
    isolation = prepared_isolation("cgroup")
    result = bench(
        "rank_ends", isolation, ranks=3, how="takes too much", rank=rank, limit_bytes=1200 * MIB
    )
    assert result.outcome == Outcome.OOM_KILLED
    assert result.message == (
        f"rank {rank}: killed by the kernel for lack of memory in phase 'bad'"
    )
    assert (result.last_phase, result.oom_kills) == ("bad", 1)
    assert result.ranks[rank].exit_code == 137


@pytest.mark.docker
def test_a_rank_that_is_killed_in_a_container_is_named(bench: Bench) -> None:
    isolation = prepared_isolation("docker")
    result = bench("rank_ends", isolation, ranks=3, how="takes too much", limit_bytes=1200 * MIB)
    assert result.outcome == Outcome.OOM_KILLED
    assert result.message == "rank 1: killed by the kernel for lack of memory in phase 'bad'"


@pytest.mark.parametrize(
    ("how", "outcome", "message"),
    [
        pytest.param(
            *("raises", "strategy_failed"), "rank 1: ValueError: the shard is broken (rank_ends.py:20)",
            marks=pytest.mark.nightly,
        ),
        ("exits as if all were well", "strategy_failed", "rank 1: the measured process ended with exit code 0 in phase 'bad'"),
        ("is wrong", "wrong_weights", "rank 1: 2 tensors with other values than in the checkpoint: embedding.weight, head.weight"),
    ],
)  # fmt: skip
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
    assert all(
        Path(rank.samples_path or "").name.endswith(f"-rank{n}.csv")
        for n, rank in enumerate(result.ranks)
    )
