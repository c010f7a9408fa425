"""A real process is sampled from outside; it grows and ends when told, so that no test sleeps."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weighin.probes import process_table
from weighin.probes import sampler as module
from weighin.probes.cgroup import Cgroup, parent_of
from weighin.probes.sampler import Sampler, write_samples
from weighin.result import Sample
from weighin.units import MIB

CHILD = """
import mmap, sys
held = []
for line in sys.stdin:
    held.append(mmap.mmap(-1, int(line) << 20, mmap.MAP_PRIVATE))
    for offset in range(0, len(held[-1]), 4096):
        held[-1][offset] = 1
    print("taken", flush=True)
"""


class Child:
    """A process that takes as many MiB as it is told to, and ends at the end of its input."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.take(1)  # its interpreter has started

    def take(self, mib: int) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{mib}\n")
        assert self.process.stdout.readline() == "taken\n"

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.read()  # at its end the child has closed it: it is a zombie, or soon


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    with child.process:
        yield child
        child.process.kill()


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


def test_a_process_that_grows_is_seen_growing(child: Child) -> None:
    sampler = sampler_of(child.process.pid)
    sampler.start()
    first = wait_for(sampler, lambda _: True)
    child.take(32)
    wait_for(sampler, lambda one: one.anon_bytes >= first.anon_bytes + 32 * MIB)
    child.take(16)
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


def test_a_process_whose_name_is_not_text_is_sampled() -> None:
    named = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xff\\x1dVmRSS: 1'); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", named])
    try:
        while not Path(f"/proc/{process.pid}/comm").read_bytes().startswith(b"\xff"):
            time.sleep(0.01)
        sampler = sampler_of(process.pid)
        sampler.start()
        sample = wait_for(sampler, lambda _: True)
        assert sample.rss_bytes > MIB
        sampler.stop()
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone_gives_no_samples(child: Child) -> None:
    child.end()
    child.process.wait(60)
    sampler = sampler_of(child.process.pid)
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
def test_the_cgroup_is_read_beside_the_process(tmp_path: Path, child: Child, version: int) -> None:
    group = write_group(tmp_path, version)
    sampler = sampler_of(child.process.pid, group)
    sampler.start()
    sample = wait_for(sampler, lambda _: True)
    assert (sample.cgroup_bytes, sample.cgroup_file_bytes) == (1000, 400)
    group.file("oom").write_text("oom_kill 2\n")  # the very file that is held open
    child.end()
    sampler.stop()
    assert sampler.oom_kills == 2  # looked for once more after the end


def test_a_group_that_cannot_be_read_leaves_the_processs_figures(
    tmp_path: Path, child: Child
) -> None:
    sampler = sampler_of(child.process.pid, Cgroup(tmp_path / "gone"))
    sampler.start()
    sample = wait_for(sampler, lambda _: True)
    sampler.stop()
    assert sample.rss_bytes > 0
    assert (sample.cgroup_bytes, sample.cgroup_file_bytes, sampler.oom_kills) == (None, None, None)


def test_a_grandchild_in_another_cgroup_is_an_escape(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    def where(pid: int, group: Path) -> Path | None:
        return Path("/other") if pid == child.process.pid else None

    monkeypatch.setattr(module, "outside", where)
    grandparent = parent_of(os.getpid())
    assert grandparent
    sampler = Sampler(grandparent, lambda: [grandparent], write_group(tmp_path, 2))
    sampler.pids()
    assert f"(pid {child.process.pid}) left the command's cgroup for /other" in sampler.escape


def test_an_error_in_a_sample_closes_what_it_reads(tmp_path: Path, child: Child) -> None:
    def fail(*_: int) -> None:
        raise MemoryError

    def opened() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before, sampler = opened(), sampler_of(child.process.pid, write_group(tmp_path, 2))
    sampler._at_sample = fail
    with pytest.raises(MemoryError):
        sampler._run()
    assert opened() == before


def test_it_stops_at_once_whatever_its_interval(child: Child) -> None:
    sampler = sampler_of(child.process.pid, interval_s=3600)
    sampler.start()
    wait_for(sampler, lambda _: True)
    assert len(sampler.stop()) <= 2  # it samples once more at its end


def test_a_library_that_the_linker_reads_is_no_data_file(tmp_path: Path) -> None:
    names = ("libtorch_cpu.so", "libcudnn.so.9.1", "model.so.bin")
    with ExitStack() as opened:
        for name in names:
            (tmp_path / name).write_bytes(bytes(MIB))
            opened.enter_context((tmp_path / name).open("rb"))
        found = {file.path for file in process_table.open_files(os.getpid())}
    assert {name for name in names if f"{tmp_path}/{name}" in found} == {"model.so.bin"}


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


def test_samples_as_text(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    write_samples(
        path,
        [
            Sample(1, 60, 30, 20, 10, 0, 5, 6),
            Sample(2, 61, 31, 20, 10, 0, 7, 6, 90, 40, 8, 900, 30, 1, 2, 3, 4, 5, 6, 7),
        ],
    )
    assert path.read_bytes().decode() == (
        "t_ns,rss_bytes,anon_bytes,file_bytes,shmem_bytes,swap_bytes,minor_faults,major_faults,"
        "cgroup_bytes,cgroup_file_bytes,cuda_allocated_bytes,cuda_driver_bytes,"
        "cgroup_shmem_bytes,locked_bytes,freed_bytes,kernel_bytes,kernel_reclaimable_bytes,"
        "socket_bytes,slab_bytes,page_tables_bytes\r\n"
        "1,60,30,20,10,0,5,6,,,,,,,,,,,,\r\n"
        "2,61,31,20,10,0,7,6,90,40,8,900,30,1,2,3,4,5,6,7\r\n"
    )
