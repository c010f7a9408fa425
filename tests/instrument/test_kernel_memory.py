"""A command needs whatever the kernel cannot reclaim, and weighin names the kind that it read."""

import csv
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cells import MIB, cgroup_version, page_cache
from known_commands import UNUSUAL, Known, within
from typed import CommandLine, Measured, measured

pytestmark = [pytest.mark.cgroup, pytest.mark.compiler]

Measure = Callable[[Known], tuple[Measured, Path]]
PARTS = {
    "anonymous": "anon_bytes", "shared": "shmem_bytes", "locked": "locked_bytes",
    "kernel": "kernel_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def measure(programs: Path, known_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Call it to measure a program without a limit; it runs once for all tests."""

    @cache
    def once(known: Known) -> tuple[Measured, Path]:
        page_cache.drop([known_file])
        folder = tmp_path_factory.mktemp("unusual") / "run"
        return measured(folder, known.command(programs, known_file)), folder

    return once


EACH = pytest.mark.parametrize("known", UNUSUAL, ids=lambda known: known.id)


@EACH
def test_the_need_is_what_the_kernel_cannot_reclaim(known: Known, measure: Measure) -> None:
    found, _ = measure(known)
    print(found.record["peaks"], found.record["ran"]["at_peak"], found.said)
    assert found.record["outcome"] == "ok"
    assert within(found.needed_bytes, known.needed_bytes, 2 * MIB)
    assert within(found.record["peaks"]["cgroup_bytes"], known.peak_bytes, 2 * MIB)
    assert re.search(rf"needs (at least )?\d+ MiB of ([a-z]+ and )?{known.kind}\b", found.said)
    assert "peak with page cache" not in found.said


@EACH
def test_the_need_is_split_at_the_peak_and_over_time(known: Known, measure: Measure) -> None:
    found, folder = measure(known)
    at_peak = found.record["ran"]["at_peak"]
    assert at_peak[PARTS[known.kind]] >= 0.9 * known.needed_bytes
    parts = sum(at_peak[name] for name in PARTS.values()) - at_peak["kernel_reclaimable_bytes"]
    assert within(parts + (at_peak["socket_bytes"] or 0), known.needed_bytes, 2 * MIB)
    rows = list(csv.DictReader((folder / found.record["samples_path"]).read_text().splitlines()))
    assert any(all(row[name] == str(at_peak[name]) for name in PARTS.values()) for row in rows)
    # The peak is any of the samples whose need is within 1 % of the most: the kernel counts in batches.
    assert within(max(int(row[PARTS[known.kind]]) for row in rows), at_peak[PARTS[known.kind]])
    if known.name == "returns":
        assert within(at_peak["freed_bytes"], known.peak_bytes - known.needed_bytes, 2 * MIB)


@pytest.mark.parametrize("known", UNUSUAL[:3], ids=lambda known: known.id)
def test_a_killed_command_had_the_kind_that_was_read(
    known: Known, programs: Path, known_file: Path, tmp_path: Path
) -> None:
    found = measured(
        tmp_path / "run", known.command(programs, known_file), "--isolation cgroup --ram 60m"
    )
    print(found.said)
    assert found.record["outcome"] == "oom_killed"
    assert within(found.needed_bytes, 60 * MIB, 2 * MIB)
    if cgroup_version() == 1:  # which keeps the peak of the kernel's memory
        assert within(found.record["peaks"]["kernel_bytes"], 60 * MIB, 2 * MIB)
        assert re.search(r"had \d+ MiB of (anonymous and )?kernel memory", found.said)
    assert "of anonymous memory," not in found.said


def test_a_budget_counts_the_kernels_memory(measure: Measure) -> None:
    _, folder = measure(UNUSUAL[0])
    command = CommandLine(folder.parent, folder.parent / "cache")
    for most, code in (("10MiB", 1), ("160MiB", 0)):
        assert command.run(f"check {folder.name} --budget 'needed <= {most}'").code == code


def test_what_the_kernel_remembers_of_files_is_no_need(disk: Path, tmp_path: Path) -> None:
    (folder := disk / "many-files").mkdir()
    made = "for n in range(20_000): open(f'{sys.argv[1]}/{n}', 'x').close()"
    code = (sys.executable, "-S", "-c", f"import sys, time\n{made}\ntime.sleep(0.1)")
    found = measured(tmp_path / "run", (*code, str(folder)))
    at_peak = found.record["ran"]["at_peak"]
    print(found.record["peaks"], at_peak)
    assert at_peak["kernel_bytes"] > 16 * MIB
    assert at_peak["kernel_bytes"] - at_peak["kernel_reclaimable_bytes"] < 8 * MIB
    assert found.needed_bytes < 24 * MIB


def test_a_command_that_reads_many_pages_needs_at_least_the_sampled(
    programs: Path, known_file: Path, tmp_path: Path
) -> None:
    page_cache.drop([known_file])
    found = measured(tmp_path / "run", (str(programs / "reads"), str(known_file)))
    assert found.record["ran"]["needed_is_sampled"]
    assert "needs at least" in found.said
    assert "the peak with page cache is" in found.said
