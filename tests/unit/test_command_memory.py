"""The memory of a command's cgroup, from recorded files of several kernels."""

from pathlib import Path

import pytest
from test_cgroup_probe import V1, V2
from test_memory_cgroup import RECORDED, make_group

from weighin.probes.cgroup import Cgroup, parse_numbers, room_in
from weighin.probes.sampler import Sampler

NO_PID = 2**22 + 1  # which no process has


@pytest.mark.parametrize("kernel", [*V1, *V2])
def test_the_sample_of_a_group(tmp_path: Path, kernel: str) -> None:
    group = make_group(tmp_path, kernel)
    stat = parse_numbers(group.file("stat").read_text())
    prefix = "" if kernel in V2 else "total_"
    memory = Sampler(NO_PID, list, group)
    sample = memory.read(7, [])
    assert sample
    assert sample.t_ns == 7
    assert sample.cgroup_bytes == RECORDED[kernel].usage
    assert sample.freed_bytes is not None
    assert sample.anon_bytes + sample.freed_bytes == stat["anon" if kernel in V2 else "total_rss"]
    assert sample.cgroup_file_bytes == stat["file" if kernel in V2 else "total_cache"]
    assert sample.shmem_bytes == sample.cgroup_shmem_bytes == stat[f"{prefix}shmem"]
    assert sample.minor_faults + sample.major_faults == stat[f"{prefix}pgfault"]
    assert sample.rss_bytes == sample.anon_bytes + sample.file_bytes + sample.shmem_bytes
    memory._look()
    assert memory.oom_kills == 1
    assert room_in(tmp_path) == 24 * 2**20
    if kernel in V2:
        assert sample.kernel_bytes == stat.get("kernel", sample.kernel_bytes)
        assert sample.kernel_bytes is not None
        assert sample.kernel_bytes >= stat["slab"]
        parts = (sample.socket_bytes, sample.slab_bytes, sample.kernel_reclaimable_bytes)
        assert parts == (stat["sock"], stat["slab"], stat["slab_reclaimable"])
    files = stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]
    found = sample.page_cache_bytes + sample.freed_bytes
    assert found == pytest.approx(files, abs=64 * 4096)  # some pages are on no list for a moment
    assert memory.pids() == []


STAT = {
    "anon": 300,
    "file": 150,
    "shmem": 20,
    "active_file": 10,
    "inactive_file": 220,
    "unevictable": 0,
    "kernel": 50,
    "slab_reclaimable": 30,
    "sock": 4,
}


@pytest.mark.parametrize(
    ("changes", "anon", "locked", "freed", "needed"),
    [
        (
            {},
            200,
            0,
            100,
            244,
        ),  # 130 file pages, and 230 pages on the lists of files: 100 are freed
        ({"inactive_file": 60, "unevictable": 60}, 300, 60, 0, 404),
        (
            {"inactive_file": 60, "unevictable": 15},
            300,
            15,
            0,
            359,
        ),  # the others are on no list now
        ({"kernel": 20}, 200, 0, 100, 224),
    ],
)
def test_what_the_kernel_can_reclaim_is_not_needed(
    tmp_path: Path, changes: dict[str, int], anon: int, locked: int, freed: int, needed: int
) -> None:
    group = Cgroup(tmp_path)
    group.file("usage").write_text("999")
    lines = [f"{name} {number}" for name, number in (STAT | changes).items()]
    group.file("stat").write_text("\n".join(lines))
    sample = Sampler(NO_PID, list, group).read(7, [])
    assert sample
    figures = (sample.anon_bytes, sample.locked_bytes, sample.freed_bytes, sample.needed_bytes)
    assert figures == (anon, locked, freed, needed)
