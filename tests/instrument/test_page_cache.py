"""A cold cell is really cold, and pays for the pages that it reads; so does a warm one."""

import mmap
import os
from pathlib import Path

import pytest
from again import EVICTED, tried_again
from cells import (
    LARGE,
    MIB,
    Bench,
    CacheState,
    Outcome,
    Result,
    Watched,
    charged_above_import,
    checkpoint_of,
    known,
    page_cache,
    phases_of,
)
from nightly import limits

SIZE = 8 * MIB + 100  # no whole number of pages


@pytest.fixture
def file(disk: Path) -> Path:
    path = disk / "pages.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


@tried_again(EVICTED)
def test_a_dropped_file_is_proven_cold(file: Path) -> None:
    assert page_cache.cached([file]) == -(-SIZE // mmap.PAGESIZE) * mmap.PAGESIZE
    assert page_cache.drop([file]) == 0
    assert page_cache.cached([file]) == 0


def test_pages_that_are_mapped_elsewhere_are_owned_up_to(file: Path) -> None:
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as area:
        area[0], area[3 * MIB]  # mapped pages cannot be dropped
        assert known(page_cache.drop([file])) >= 2 * mmap.PAGESIZE
    assert page_cache.drop([file]) == 0
    file.write_bytes(b"")
    assert page_cache.drop([file]) == 0


def charged_file_bytes(bench: Bench, result: Result) -> int:
    """Return the largest file cache that a sample saw charged to the cell after its baseline."""
    baseline_ns = phases_of(result)["prepare"].end_ns
    return max(
        sample["cgroup_file_bytes"] or 0
        for sample in bench.samples(result)
        if (sample["t_ns"] or 0) >= baseline_ns
    )


def test_the_pages_of_a_cold_map_are_charged_to_the_cell(bench: Bench, limiting: Watched) -> None:
    result = bench("mmap_assign", limiting, spec=LARGE, limit_bytes=1024 * MIB)
    assert (result.outcome, result.cached_bytes_at_start) == (Outcome.OK, 0)
    size_bytes = known(result.model_bytes)
    assert charged_above_import(result) >= size_bytes
    # Sampled: on a busy machine the last samples may be missing.
    assert charged_file_bytes(bench, result) >= 0.5 * size_bytes
    assert result.baseline
    mapped_bytes = known(result.peaks.file_sampled_bytes) - result.baseline.file_bytes
    assert mapped_bytes >= 0.95 * size_bytes


@tried_again(EVICTED)
@pytest.mark.parametrize("limiting", limits("docker"), indirect=True)
def test_a_file_that_was_warm_outside_is_made_cold_and_charged(
    bench: Bench, limiting: Watched
) -> None:
    checkpoint = checkpoint_of(LARGE)
    checkpoint.read_bytes()
    assert (page_cache.cached([checkpoint]) or 0) >= checkpoint.stat().st_size
    result = bench("mmap_assign", limiting, spec=LARGE, limit_bytes=1024 * MIB)
    assert (result.outcome, result.cached_bytes_at_start) == (Outcome.OK, 0)
    assert charged_above_import(result) >= known(result.model_bytes)


@pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)
def test_a_map_lives_under_a_limit_that_its_file_overruns(bench: Bench, limiting: Watched) -> None:
    cold = bench("mmap_assign", limiting, spec=LARGE, limit_bytes=320 * MIB)
    assert (cold.outcome, cold.message, cold.oom_kills) == (Outcome.OK, "", 0)
    assert known(cold.peaks.cgroup_bytes) <= 320 * MIB
    copied = bench("baseline", limiting, spec=LARGE, limit_bytes=320 * MIB)
    assert copied.outcome is Outcome.OOM_KILLED


@pytest.mark.parametrize("limiting", limits("cgroup"), indirect=True)
def test_a_warm_cell_is_warmed_inside_its_own_cgroup(bench: Bench, limiting: Watched) -> None:
    bench("mmap_assign", limiting)  # torch's own files are charged to whoever is first to use them
    cold = bench("mmap_assign", limiting, spec=LARGE)
    warm = bench("mmap_assign", limiting, spec=LARGE, cache_state="warm")
    assert (warm.outcome, warm.cached_bytes_at_start) == (Outcome.OK, 0)
    # A busy machine may have dropped pages of torch's own files, which are charged then too.
    more_bytes = charged_above_import(cold) - charged_above_import(warm)
    assert more_bytes == pytest.approx(known(warm.model_bytes), rel=0.25)


@tried_again(EVICTED)
@pytest.mark.parametrize(("state", "share"), [("cold", 0.0), ("warm", 1.0)])
def test_the_load_finds_the_file_as_it_was_asked_for(
    bench: Bench, process: Watched, state: CacheState, share: float
) -> None:
    checkpoint = checkpoint_of(LARGE)
    size = checkpoint.stat().st_size
    found: dict[str, int | None] = {}

    def look(phase: str) -> None:
        found.setdefault(phase, page_cache.cached([checkpoint]))

    result = bench("mmap_assign", process, spec=LARGE, cache_state=state, on_phase=look)
    assert (result.outcome, result.cached_bytes_at_start) == (Outcome.OK, 0)
    assert found["build"] == pytest.approx(share * size, abs=MIB)
