"""A real process is sampled from outside; it grows and ends when told, so that no test sleeps."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_trees import Command, command

from weighin.probes import process_table
from weighin.probes import sampler as module
from weighin.probes.cgroup import Cgroup, parent_of
from weighin.probes.sampler import Sampler
from weighin.result import Sample
from weighin.units import MIB

GROWS = """
import ctypes
ctypes.CDLL(None).prctl(15, b"\\xff\\x1dVmRSS: 1")  # its name is no text
step("started")
first = hold(32)
step("32 MiB")
second = hold(16)
step("48 MiB")
"""


@pytest.fixture
def child() -> Iterator[Command]:
    with command(GROWS) as child:
        child.reach("started")
        yield child


def end(child: Command) -> None:
    assert child.process.stdin and child.process.stdout
    child.process.stdin.close()
    child.process.stdout.read()  # at its end the child has closed it: it is a zombie, or soon


def sampler_of(pid: int, group: Cgroup | None = None, interval_s: float = 0.001) -> Sampler:
    """Return the sampler of a process that loads."""
    sampler = Sampler(pid, list, group, loading=[pid])
    sampler._interval_s = interval_s
    return sampler


def wait_for(sampler: Sampler, seen: Callable[[Sample], bool]) -> Sample:
    """Return the first sample that a test waits for; the thread that takes it runs beside us."""
    for _ in range(100_000):
        for sample in sampler.samples[-3:]:
            if seen(sample):
                return sample
        sampler._stop.wait(0.001)
    raise AssertionError(sampler.samples[-3:])


def test_a_process_that_grows_is_seen_growing(child: Command) -> None:
    sampler = sampler_of(child.pid)
    sampler.start()
    first = wait_for(sampler, lambda _: True)
    child.go("32 MiB")
    wait_for(sampler, lambda one: one.anon_bytes >= first.anon_bytes + 32 * MIB)
    child.go("48 MiB")
    last = wait_for(sampler, lambda one: one.anon_bytes >= first.anon_bytes + 48 * MIB)
    samples = sampler.stop()
    assert last.anon_bytes == pytest.approx(first.anon_bytes + 48 * MIB, abs=MIB)
    assert last.minor_faults > first.minor_faults
    assert all(
        one.rss_bytes == one.anon_bytes + one.file_bytes + one.shmem_bytes for one in samples
    )
    assert [one.t_ns for one in samples] == sorted(one.t_ns for one in samples)
    assert {(one.cgroup_bytes, one.cgroup_file_bytes) for one in samples} == {(None, None)}
    (peak,) = sampler.last_peaks_rss_bytes
    assert peak and peak >= last.rss_bytes


def test_a_process_or_a_group_that_is_gone_has_no_figures(tmp_path: Path, child: Command) -> None:
    sampler = sampler_of(child.pid, Cgroup(tmp_path / "gone"), interval_s=3600)
    sampler.start()
    sample = wait_for(sampler, lambda _: True)
    assert len(sampler.stop()) <= 2  # it stops at once, and samples once more at its end
    assert sample.rss_bytes > 0
    assert (sample.cgroup_bytes, sample.cgroup_file_bytes, sampler.oom_kills) == (None, None, None)
    end(child)
    child.process.wait(60)
    sampler = sampler_of(child.pid)
    sampler.start()
    assert sampler.stop() == []
    assert sampler.last_peaks_rss_bytes == [None]


def write_group(folder: Path, version: int) -> Cgroup:
    v1 = version == 1
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text("1000\n")
    (folder / "memory.stat").write_text(f"anon 600\n{'total_cache' if v1 else 'file'} 400\n")
    (folder / ("memory.oom_control" if v1 else "memory.events.local")).write_text("oom_kill 0\n")
    return Cgroup(folder)


@pytest.mark.parametrize("version", [1, 2])
def test_the_cgroup_is_read_beside_the_process(
    tmp_path: Path, child: Command, version: int
) -> None:
    group = write_group(tmp_path, version)
    sampler = sampler_of(child.pid, group)
    sampler.start()
    sample = wait_for(sampler, lambda _: True)
    assert (sample.cgroup_bytes, sample.cgroup_file_bytes) == (1000, 400)
    group.file("oom").write_text("oom_kill 2\n")  # the very file that is held open
    end(child)
    sampler.stop()
    assert sampler.oom_kills == 2  # looked for once more after the end


def test_a_grandchild_in_another_cgroup_is_an_escape(
    tmp_path: Path, child: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def where(pid: int, group: Path) -> Path | None:
        return Path("/other") if pid == child.pid else None

    monkeypatch.setattr(module, "outside", where)
    grandparent = parent_of(os.getpid())
    assert grandparent
    sampler = Sampler(grandparent, lambda: [grandparent], write_group(tmp_path, 2))
    sampler.pids()
    assert f"(pid {child.pid}) left the command's cgroup for /other" in sampler.escape


def test_an_error_in_a_sample_closes_what_it_reads(tmp_path: Path, child: Command) -> None:
    def opened() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before, sampler = opened(), sampler_of(child.pid, write_group(tmp_path, 2))
    sampler._at_sample = Mock(side_effect=MemoryError)
    with pytest.raises(MemoryError):
        sampler._run()
    assert opened() == before


def test_a_library_that_the_linker_reads_is_no_data_file(tmp_path: Path) -> None:
    names = ("libtorch_cpu.so", "libcudnn.so.9.1", "model.so.bin")
    with ExitStack() as opened:
        for name in names:
            (tmp_path / name).write_bytes(bytes(MIB))
            opened.enter_context((tmp_path / name).open("rb"))
        found = {file.path for file in process_table.open_files(os.getpid())}
    assert {name for name in names if f"{tmp_path}/{name}" in found} == {"model.so.bin"}


def test_samples_as_text(tmp_path: Path) -> None:
    every = Sample(2, 61, 31, 20, 10, 0, 7, 6, 90, 40, 8, 900, 30, 1, 2, 3, 4, 5, 6, 7)
    module.write_samples(tmp_path / "csv", [Sample(1, 60, 30, 20, 10, 0, 5, 6), every])
    assert (tmp_path / "csv").read_bytes().decode() == (
        "t_ns,rss_bytes,anon_bytes,file_bytes,shmem_bytes,swap_bytes,minor_faults,major_faults,"
        "cgroup_bytes,cgroup_file_bytes,cuda_allocated_bytes,cuda_driver_bytes,"
        "cgroup_shmem_bytes,locked_bytes,freed_bytes,kernel_bytes,kernel_reclaimable_bytes,"
        "socket_bytes,slab_bytes,page_tables_bytes\r\n"
        "1,60,30,20,10,0,5,6,,,,,,,,,,,,\r\n"
        "2,61,31,20,10,0,7,6,90,40,8,900,30,1,2,3,4,5,6,7\r\n"
    )


def test_a_pause_is_a_share_of_what_an_action_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now_s": 100.0}
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(time, name, lambda: clock["now_s"])
    pause, due_s = process_table.Pause(least_s=30.0), []
    for took_s in (2.0, 5.0, *[0.0] * 80):
        with pause as is_due:
            due_s += [clock["now_s"] - 100] * is_due
            clock["now_s"] += took_s  # the second is not due, and puts nothing off
        clock["now_s"] += 1.0
    assert due_s == [0, 42, 72]
