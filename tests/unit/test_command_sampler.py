"""A command's memory without a cgroup: shared pages count once, and its processes are named."""

import os
import time
from contextlib import closing
from typing import Any

import psutil
import pytest
from command_trees import (
    FAMILY,
    FAMILY_ANON_MIB,
    FAMILY_SHMEM_MIB,
    command,
)
from leftovers import wait_until

from weighin.isolation.cgroup import temporary_group
from weighin.probes.cgroup import MemoryCgroup, members_of
from weighin.probes.sampler import Sampler
from weighin.result import Process, Sample
from weighin.units import MIB


def tree_of(pid: int, **options: Any) -> Sampler:
    """Return a sampler of a process and its descendants."""

    def members() -> list[int]:
        try:
            family = psutil.Process(pid), *psutil.Process(pid).children(recursive=True)
            return [one.pid for one in family if one.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []

    return Sampler(pid, members, **options)


def last(sampler: Sampler) -> Sample:
    """Return the newest sample of a running sampler."""
    return sampler.samples[-1]


def processes_of(sampler: Sampler) -> tuple[Process, ...]:
    assert sampler.table
    return sampler.table.processes()


def settle(sampler: Sampler) -> None:
    """Wait until a command that does not grow was sampled, and its table of processes kept."""
    count = len(sampler.samples)

    def is_settled() -> bool:
        kept, now = sampler._kept, last(sampler)
        return (
            len(sampler.samples) > count + 2
            and kept is not None
            and _size(now) < _size(kept) + 4 * MIB
        )

    wait_until(is_settled, "the table of processes was not kept")


def _size(sample: Sample) -> int:
    return sample.rss_bytes if sample.cgroup_bytes is None else sample.cgroup_bytes


def test_pages_that_processes_share_are_counted_once() -> None:
    with command(FAMILY) as family:
        family.reach("started")
        sampler = tree_of(family.pid)
        sampler.start()
        wait_until(lambda: sampler.samples, "no sample")
        before = last(sampler)
        family.go("forked")
        expected = before.anon_bytes + FAMILY_ANON_MIB * MIB
        wait_until(lambda: last(sampler).anon_bytes > 0.98 * expected, "not all was seen")
        settle(sampler)
        settled = last(sampler)
        family.go("alone")
        samples = sampler.stop()
    assert max(one.anon_bytes for one in samples) == pytest.approx(expected, rel=0.05)
    assert settled.anon_bytes == pytest.approx(expected, rel=0.02)
    assert settled.shmem_bytes == pytest.approx(FAMILY_SHMEM_MIB * MIB, rel=0.05)
    assert sampler.peak
    assert sampler.peak.needed_bytes == pytest.approx(
        before.anon_bytes + (FAMILY_ANON_MIB + FAMILY_SHMEM_MIB) * MIB, rel=0.05
    )
    assert sampler.oom_kills is None
    assert sampler.peak in samples


def test_each_process_has_its_share_when_the_command_used_most() -> None:
    with command(FAMILY) as family:
        family.reach("started")
        sampler = tree_of(family.pid)
        sampler.start()
        family.go("forked")
        wait_until(lambda: last(sampler).anon_bytes > FAMILY_ANON_MIB * MIB, "not all was seen")
        settle(sampler)
        family.go("alone")
        wait_until(lambda: len(sampler.pids()) == 1, "the children's end was not seen")
        sampler.stop()
        found = processes_of(sampler)
    assert [one.pid == family.pid for one in found] == [True, False, False, False]
    assert {one.parent_pid for one in found} == {os.getpid(), family.pid}
    assert all("import mmap, os, sys, time" in one.command for one in found)
    # Of the 128 MiB, 96 MiB are shared by four, and three have a copy of 32 MiB that is their own.
    for child in found[1:]:
        assert child.anon_bytes == pytest.approx((96 / 4 + 32) * MIB, rel=0.1)
        assert child.shmem_bytes == pytest.approx(FAMILY_SHMEM_MIB * MIB / 4, rel=0.2)
    assert found[0].highest_rss_bytes
    assert found[0].highest_rss_bytes > (128 + 32) * MIB
    assert found[1].end_ns < found[0].end_ns


def test_a_single_process_that_grows_is_seen_at_every_sample() -> None:
    """The sum of shares is expensive: between two sums, the process's own status shows its growth."""
    with command('step("a"); held = hold(300); step("b"); more = hold(100); step("c")') as one:
        one.reach("a")
        sampler = tree_of(one.pid, interval_s=0.002)
        sampler.start()
        one.go("b")
        wait_until(lambda: last(sampler).anon_bytes > 300 * MIB, "the first growth was not seen")
        one.go("c")
        wait_until(lambda: last(sampler).anon_bytes > 400 * MIB, "the second growth was not seen")
        samples = sampler.stop()
    assert max(sample.anon_bytes for sample in samples) == pytest.approx(405 * MIB, rel=0.02)
    assert len({sample.anon_bytes for sample in samples}) > 10


def test_each_sample_is_told() -> None:
    told: list[tuple[int, int]] = []
    with command('step("a"); held = hold(100); step("b"); held.close(); step("c")') as one:
        one.reach("a")
        at_sample = lambda t_ns, used: told.append((t_ns, used))  # noqa: E731
        sampler = tree_of(one.pid, interval_s=0.002, at_sample=at_sample)
        sampler.start()
        one.go("b")
        wait_until(lambda: told and told[-1][1] > 100 * MIB, "the growth was not told")
        one.go("c")
        wait_until(lambda: told[-1][1] < 100 * MIB, "the end of it was not told")
        samples = sampler.stop()
    assert [t_ns for t_ns, _ in told] == [sample.t_ns for sample in samples]


def test_a_command_that_has_ended_leaves_no_samples() -> None:
    with command('step("a")') as one:
        one.reach("a")
        one.go()
        one.process.wait(60)
        sampler = tree_of(one.pid)
        sampler.start()
        assert sampler.stop() == []
        assert sampler.peak is None
        assert processes_of(sampler) == ()


@pytest.mark.cgroup
def test_sampling_takes_little_time() -> None:
    code = 'step("started"); held = hold(100); step("held")'
    with temporary_group() as group, command(code, group) as one:
        one.reach("started")
        start = time.thread_time_ns()
        sampler = Sampler(one.pid, lambda: members_of(group), MemoryCgroup(group))
        for _ in range(100):
            sampler._look()
        each_ns = (time.thread_time_ns() - start) / 100
        sampler.close()
    assert each_ns < 2_000_000


@pytest.mark.cgroup
def test_a_group_that_was_removed_gives_no_sample() -> None:
    with temporary_group() as made:
        memory = Sampler(0, lambda: members_of(made), MemoryCgroup(made))
    with closing(memory):
        assert memory.read(1, []) is None
        assert memory.pids() == []
        assert memory.oom_kills is None
