"""The memory of a command's cgroup, from recorded files of several kernels."""

from contextlib import closing
from pathlib import Path

import pytest
from test_cgroup_probe import V1, V2
from test_memory_cgroup import RECORDED, make_group

from weighin.probes.cgroup import parse_numbers
from weighin.probes.command_memory import GroupMemory


@pytest.mark.parametrize("kernel", [*V1, *V2])
def test_the_sample_of_a_group(tmp_path: Path, kernel: str) -> None:
    group = make_group(tmp_path, kernel)
    stat = parse_numbers(group.stat_path.read_text())
    prefix = "" if kernel in V2 else "total_"
    with closing(GroupMemory(group)) as memory:
        sample = memory.sample(7, [])
        assert sample
        assert sample.t_ns == 7
        assert sample.cgroup_bytes == RECORDED[kernel].usage
        assert sample.anon_bytes == stat["anon" if kernel in V2 else "total_rss"]
        assert sample.cgroup_file_bytes == stat["file" if kernel in V2 else "total_cache"]
        assert sample.shmem_bytes == sample.cgroup_shmem_bytes == stat[f"{prefix}shmem"]
        assert sample.minor_faults + sample.major_faults == stat[f"{prefix}pgfault"]
        assert sample.rss_bytes == sample.anon_bytes + sample.file_bytes + sample.shmem_bytes
        assert memory.oom_kills() == 1
        assert memory.limit() == 24 * 2**20
        assert memory.kernel_bytes == stat.get("kernel")
    assert memory.pids() == []
