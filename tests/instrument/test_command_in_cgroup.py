"""A command's memory in a cgroup: exact splits, its processes, their files, and its kills."""

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from command_trees import FAMILY, FAMILY_ANON_MIB, FAMILY_SHMEM_MIB, Command, command, last, settle
from leftovers import wait_until

from weighin.isolation.cgroup import limit, temporary_group
from weighin.probes import kernel_log, page_cache
from weighin.probes.cgroup import MemoryCgroup
from weighin.probes.command_memory import GroupMemory
from weighin.probes.command_sampler import CommandSampler
from weighin.units import MIB

pytestmark = pytest.mark.cgroup


@pytest.fixture
def group() -> Iterator[Path]:
    with temporary_group() as made:
        yield made


def sampled(started: Command, group: Path, interval_s: float = 0.02) -> CommandSampler:
    sampler = CommandSampler(started.pid, MemoryCgroup(group), interval_s)
    sampler.start()
    wait_until(lambda: sampler._samples, "no sample")
    return sampler


def test_a_family_is_counted_once_and_named(group: Path) -> None:
    with command(FAMILY, group) as family:
        family.reach("started")
        sampler = sampled(family, group)
        before = last(sampler)
        family.go("forked")
        settle(sampler)
        family.go("alone")
        samples = sampler.stop()
        found = sampler.table.processes()
    most = max(samples, key=lambda one: one.anon_bytes)
    assert most.anon_bytes - before.anon_bytes == pytest.approx(
        FAMILY_ANON_MIB * MIB, abs=0.01 * FAMILY_ANON_MIB * MIB + MIB
    )
    assert most.shmem_bytes == pytest.approx(FAMILY_SHMEM_MIB * MIB, abs=MIB)
    assert most.cgroup_bytes
    assert most.cgroup_bytes >= most.anon_bytes + most.shmem_bytes
    assert sampler.oom_kills == 0
    assert len(found) == 4
    assert found[0].highest_rss_bytes
    assert found[0].highest_rss_bytes >= (128 + FAMILY_SHMEM_MIB) * MIB
    together = sum((one.anon_bytes or 0) + (one.shmem_bytes or 0) for one in found)
    assert sampler.peak
    assert together == pytest.approx(sampler.peak.anon_bytes + sampler.peak.shmem_bytes, rel=0.05)
    assert (sampler.peak.kernel_bytes or 0) > 0


READING = """
import ctypes
step("started")
big = open(PATH, "rb", buffering=0)
for _ in range(24):
    big.read(1 << 20)
mapped = mmap.mmap(os.open(PATH + "2", os.O_RDONLY), 0, prot=mmap.PROT_READ)
sum(mapped[::4096])
held = hold(40)
step("read")
held.close()
step("freed")
"""


def test_the_files_that_are_read_and_mapped_at_the_peak(group: Path, disk: Path) -> None:
    files = [disk / "big.bin", disk / "big.bin2"]
    for file, mib in zip(files, (30, 20), strict=True):
        file.write_bytes(b"\1" * (mib * MIB))
    with command(f"PATH = {str(files[0])!r}\n{READING}", group) as one:
        one.reach("started")
        sampler = sampled(one, group)
        one.go("read")
        settle(sampler)
        one.go("freed")
        sampler.stop()
        (process,) = sampler.table.processes()
    read, mapped = process.files
    assert (read.path, read.size_bytes, read.position_bytes) == (str(files[0]), 30 * MIB, 24 * MIB)
    assert (mapped.path, mapped.size_bytes, mapped.position_bytes, mapped.mapped_bytes) == (
        str(files[1]),
        20 * MIB,
        0,
        20 * MIB,
    )
    for file in files:
        file.unlink()


CACHE_THEN_MEMORY = """
step("started")
for _ in range(2):
    with open(PATH, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
held = hold(60)
step("held")
held.close()
step("freed")
"""


def test_page_cache_at_the_limit_does_not_hide_the_peak(group: Path, disk: Path) -> None:
    """Page cache fills the group up to its limit first: the usage then no longer grows."""
    limit(group, 128 * MIB)
    file = disk / "cached.bin"
    file.write_bytes(b"\1" * (160 * MIB))
    page_cache.drop([file])
    with command(f"PATH = {str(file)!r}\n{CACHE_THEN_MEMORY}", group) as one:
        one.reach("started")
        sampler = sampled(one, group)
        one.go("held")
        settle(sampler)
        one.go("freed")
        samples = sampler.stop()
        (process,) = sampler.table.processes()
    # The kernel's counters lag by up to 64 pages for each processor. The sampler reads the processes
    # again only if the memory grew by 1 MiB or 1 %.
    least = 60 * MIB - 64 * mmap.PAGESIZE * (os.cpu_count() or 1)
    assert process.anon_bytes
    assert process.anon_bytes >= least - max(MIB, 128 * MIB // 100)
    assert sampler.peak
    assert sampler.peak.anon_bytes >= least
    assert max(each.page_cache_bytes for each in samples) > 100 * MIB
    file.unlink()


def test_short_children_and_groups_below_are_seen(group: Path) -> None:
    below = group / "below"
    code = f"""
step("started")
for _ in range(2):
    if (pid := os.fork()) == 0:
        os.execv("/bin/sleep", ["sleep", "1"])
    os.waitpid(pid, 0)
os.mkdir({str(below)!r})
if (pid := os.fork()) == 0:
    open({str(below / "cgroup.procs")!r}, "w").write(str(os.getpid()))
    os.execv("/bin/sleep", ["sleep", "1.5"])
os.waitpid(pid, 0)
step("done")
"""
    with command(code, group) as one:
        one.reach("started")
        sampler = sampled(one, group)
        one.go("done")
        sampler.stop()
        children = sampler.table.processes()[1:]
        assert [child.command for child in children] == ["sleep 1"] * 2 + ["sleep 1.5"]
        assert {child.parent_pid for child in children} == {one.pid}
        for child, lived_s in zip(children, (1, 1, 1.5), strict=True):
            assert (child.end_ns - child.start_ns) / 1e9 == pytest.approx(lived_s, abs=0.4)


def test_a_kill_of_a_child_is_counted_although_the_command_lives(group: Path) -> None:
    limit(group, 64 * MIB)
    code = """
step("started")
if (pid := os.fork()) == 0:
    held = hold(40)
    step("held")
    hold(200)
os.waitpid(pid, 0)
step("survived")
"""
    with command(code, group) as one:
        one.reach("started")
        sampler = sampled(one, group)
        one.go("held")
        settle(sampler)
        one.go("survived")
        sampler.stop()
    assert sampler.oom_kills == 1
    assert sampler.peak
    assert 40 * MIB < sampler.peak.needed_bytes <= 64 * MIB


def test_a_kill_in_a_group_below_is_counted_also_after_its_removal(group: Path) -> None:
    if (control := group / "cgroup.subtree_control").exists():
        control.write_text("+memory")
    below = group / "below"
    below.mkdir()
    limit(below, 64 * MIB)
    with command('step("started"); hold(200)', below) as one:
        one.reach("started")
        sampler = sampled(one, group)
        one.go()
        assert one.process.wait(60) == -9
        wait_until(lambda: sampler.oom_kills == 1, "the kill is not counted")
        below.rmdir()
        sampler.stop()
    assert sampler.oom_kills == 1


def test_sampling_takes_little_time(group: Path) -> None:
    with command('step("started"); held = hold(100); step("held")', group) as one:
        one.reach("started")
        start = time.thread_time_ns()
        sampler = CommandSampler(one.pid, MemoryCgroup(group))
        for _ in range(100):
            sampler._look()
        each_ns = (time.thread_time_ns() - start) / 100
        sampler.memory.close()
    assert each_ns < 2_000_000


@pytest.mark.parametrize("is_own", [True, False])
def test_the_kernel_log_tells_who_was_killed_for_whose_limit(group: Path, is_own: bool) -> None:
    if (start := kernel_log.position()) is None:
        pytest.skip("this user may not read the kernel's log")
    cell = group
    if not is_own:
        cell = group / "cell"
        cell.mkdir()
    limit(group, 64 * MIB)
    with command('step("started"); hold(200)', cell) as one:
        one.reach("started")
        one.go()
        assert one.process.wait(60) == -9
    kills = kernel_log.kills_since(start, cell, one.pid)
    assert kills
    (kill,) = kills
    assert (kill.pid, kill.is_main) == (one.pid, True)
    assert kill.limit_of == ("" if is_own else f"/{group.name}")
    assert kill.anon_bytes == pytest.approx(60 * MIB, abs=6 * MIB)
    assert kernel_log.kills_since(kernel_log.position(), cell, one.pid) == ()


def test_a_group_that_was_removed_gives_no_sample() -> None:
    with temporary_group() as made:
        memory = GroupMemory(MemoryCgroup(made))
    with closing(memory):
        assert memory.sample(1, []) is None
        assert memory.pids() == []
        assert memory.oom_kills() is None
