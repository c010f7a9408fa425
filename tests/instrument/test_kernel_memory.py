"""A command needs whatever the kernel cannot reclaim, and weighin names the kind that it read."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cells import MIB, cgroup_version, page_cache
from known_commands import FILE_BYTES
from unusual_commands import UNUSUAL, Measured, Unusual, measured, weighin

pytestmark = [pytest.mark.cgroup, pytest.mark.compiler]

Measure = Callable[[Unusual], tuple[Measured, Path]]
PARTS = {
    "anonymous": "anon_bytes",
    "shared": "shmem_bytes",
    "locked": "locked_bytes",
    "kernel": "kernel_bytes",
}


def is_v1() -> bool:
    return cgroup_version() == 1


def within(figure: int, known_bytes: int) -> bool:
    """Tell whether a figure is right within 1 % and 2 MiB."""
    return abs(figure - known_bytes) <= 0.01 * known_bytes + 2 * MIB


@pytest.fixture(scope="module")
def file(disk: Path) -> Path:
    path = disk / "unusual-file"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


@pytest.fixture(scope="module")
def measure(programs: Path, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Call it to measure a program without a limit; it runs once for all tests."""

    @cache
    def once(known: Unusual) -> tuple[Measured, Path]:
        page_cache.drop([file])
        folder = tmp_path_factory.mktemp("unusual") / "run"
        return measured(folder, known.command(programs, file)), folder

    return once


@pytest.mark.parametrize("known", UNUSUAL, ids=lambda known: known.id)
def test_the_need_is_what_the_kernel_cannot_reclaim(known: Unusual, measure: Measure) -> None:
    found, _ = measure(known)
    print(found.record["peaks"], found.record["ran"]["at_peak"])
    assert found.record["outcome"] == "ok"
    assert within(found.needed_bytes, known.needed_bytes)
    assert within(found.record["peaks"]["cgroup_bytes"], known.peak_bytes)


@pytest.mark.parametrize("known", UNUSUAL, ids=lambda known: known.id)
def test_the_need_is_split_at_the_peak_and_over_time(known: Unusual, measure: Measure) -> None:
    found, folder = measure(known)
    at_peak = found.record["ran"]["at_peak"]
    assert at_peak[PARTS[known.kind]] >= 0.9 * known.needed_bytes
    parts = sum(at_peak[name] for name in PARTS.values()) - at_peak["kernel_reclaimable_bytes"]
    assert within(parts + (at_peak["socket_bytes"] or 0), known.needed_bytes)
    rows = list(csv.DictReader((folder / found.record["samples_path"]).read_text().splitlines()))
    assert any(all(row[name] == str(at_peak[name]) for name in PARTS.values()) for row in rows)
    # The peak is any of the samples whose need is within 1 % of the most: the kernel counts in batches.
    assert within(max(int(row[PARTS[known.kind]]) for row in rows), at_peak[PARTS[known.kind]])
    if known.name == "returns":
        assert within(at_peak["freed_bytes"], known.peak_bytes - known.needed_bytes)


@pytest.mark.parametrize("known", UNUSUAL, ids=lambda known: known.id)
def test_the_sentence_names_the_kind_that_was_read(known: Unusual, measure: Measure) -> None:
    said = measure(known)[0].said
    print(said)
    assert re.search(rf"needs (at least )?\d+ MiB of ([a-z]+ and )?{known.kind}\b", said)
    assert "peak with page cache" not in said


@pytest.mark.parametrize("known", UNUSUAL[:3], ids=lambda known: known.id)
def test_a_killed_command_had_the_kind_that_was_read(
    known: Unusual, programs: Path, file: Path, tmp_path: Path
) -> None:
    found = measured(tmp_path / "run", known.command(programs, file), "--ram", "60m")
    print(found.said)
    assert found.record["outcome"] == "oom_killed"
    assert within(found.needed_bytes, 60 * MIB)
    if is_v1():  # which keeps the peak of the kernel's memory
        assert within(found.record["peaks"]["kernel_bytes"], 60 * MIB)
        assert re.search(r"had \d+ MiB of (anonymous and )?kernel memory", found.said)
    assert "of anonymous memory," not in found.said


def test_a_budget_counts_the_kernels_memory(measure: Measure) -> None:
    _, folder = measure(UNUSUAL[0])
    over = weighin("check", str(folder), "--budget", "needed <= 10MiB")
    assert over.returncode == 1, over.stdout
    assert weighin("check", str(folder), "--budget", "needed <= 160MiB").returncode == 0


def test_what_the_kernel_remembers_of_files_is_no_need(disk: Path, tmp_path: Path) -> None:
    (folder := disk / "many-files").mkdir()
    code = (
        "import sys, time\n"
        "for n in range(20_000): open(f'{sys.argv[1]}/{n}', 'x').close()\n"
        "time.sleep(0.1)"
    )
    found = measured(tmp_path / "run", (sys.executable, "-S", "-c", code, str(folder)))
    at_peak = found.record["ran"]["at_peak"]
    print(found.record["peaks"], at_peak)
    assert at_peak["kernel_bytes"] > 16 * MIB
    assert at_peak["kernel_bytes"] - at_peak["kernel_reclaimable_bytes"] < 8 * MIB
    assert found.needed_bytes < 24 * MIB


def test_a_command_that_reads_many_pages_needs_at_least_the_sampled(
    programs: Path, file: Path, tmp_path: Path
) -> None:
    page_cache.drop([file])
    found = measured(tmp_path / "run", (str(programs / "reads"), str(file)))
    assert found.record["ran"]["needed_is_sampled"]
    assert "needs at least" in found.said
    assert "the peak with page cache is" in found.said
