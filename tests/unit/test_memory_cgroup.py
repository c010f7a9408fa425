"""A memory cgroup as a folder of recorded files: its figures, its samples, its limit, what doctor says."""

import os
import shutil
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from snapshots import Compare
from test_cgroup_probe import KERNEL, V1, V2

from weighin import doctor, slow_disk
from weighin.errors import IsolationUnavailable
from weighin.probes.cgroup import Cgroup, Counters, room_in
from weighin.probes.sampler import Sampler
from weighin.units import MIB

NO_PID = 2**22 + 1  # which no process has


def make_group(folder: Path, kernel: str) -> Cgroup:
    """A folder with the recorded files of a memory cgroup of this kernel."""
    for file in (KERNEL / kernel).glob("memory.*"):
        shutil.copy(file, folder)
    return Cgroup(folder, folder / "memory.pressure")


@pytest.mark.parametrize("kernel", [*V1, *V2])
def test_what_is_read_of_a_group(tmp_path: Path, kernel: str, same: Compare) -> None:
    """Of each kernel, a group with a limit of 24 MiB in which one process was killed."""
    group = make_group(tmp_path, kernel)
    memory = Sampler(NO_PID, list, group)
    sample = memory.read(7, [])
    assert sample
    assert memory.pids() == []
    memory._look()
    with closing(group):
        told = {
            "version": group.version,
            **{name: group.read(name) for name in ("limit", "usage")},
            "room in": room_in(tmp_path),
            **asdict(group.counters()),
            "kills that the sampler saw": memory.oom_kills,
            "can reset its peak": group.reset_peak(),
            **{f"sample {name}": value for name, value in asdict(sample).items()},
        }
    same(f"groups/{kernel}.txt", "".join(f"{name}: {value}\n" for name, value in told.items()))


@pytest.mark.parametrize(
    ("kernel", "written", "lifted"), [("hybrid-6.18", "0", "-1"), ("v2-6.12", "reset\n", "max")]
)
def test_what_a_kernel_wants_written(
    tmp_path: Path, kernel: str, written: str, lifted: str
) -> None:
    with closing(make_group(tmp_path, kernel)) as group:
        assert group.reset_peak()
        # A plain file keeps what stood behind it.
        assert group.file("peak").read_text().startswith(written)
        for file in ("memory.high", "memory.swap.max"):  # as under a soft limit
            (tmp_path / file).write_text("0")
        group.raise_limit()
    assert group.file("limit").read_text() == lifted
    if group.version == 2:
        assert (tmp_path / "memory.high").read_text() == "max"
        assert group.file("swap").read_text() == "0"  # what thrashes must not swap instead


def test_what_a_kernel_or_a_group_lacks_is_none_never_zero(tmp_path: Path) -> None:
    group = Cgroup(tmp_path / "gone", tmp_path / "gone" / "psi")
    for each in (group, Cgroup(tmp_path)):
        assert each.counters() == Counters()
        assert each.read_peak() is None
        assert not each.reset_peak()  # before Linux 5.19
        each.close()
        each.close()
    group.raise_limit()
    (tmp_path / "memory.stat").write_text("anon 1\nworkingset_refault 7\n")  # v2 before 5.9
    with closing(Cgroup(tmp_path)) as before:
        assert before.counters().refaults is None


@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied"), OSError(30, "read-only")], ids=["denied", "read-only"]
)
def test_a_mark_that_may_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    group, real_open = make_group(tmp_path, "v2-6.12"), os.open

    def read_only(path: Path, flags: int) -> int:
        if flags & os.O_RDWR:
            raise error
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", read_only)
    with closing(group):
        assert group.read_peak() == 24 * MIB
        assert not group.reset_peak()


STAT = {
    "anon": 300, "file": 150, "shmem": 20, "active_file": 10, "inactive_file": 220, "unevictable": 0,
    "kernel": 50, "slab_reclaimable": 30, "sock": 4,
}  # fmt: skip


RECLAIMED: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {  # anonymous, locked, freed, needed
    # 130 file pages, and 230 pages on the lists of files: 100 are freed.
    "freed": ({}, (200, 0, 100, 244)),
    "locked": ({"inactive_file": 60, "unevictable": 60}, (300, 60, 0, 404)),
    # The others are on no list now.
    "in part locked": ({"inactive_file": 60, "unevictable": 15}, (300, 15, 0, 359)),
    "kernel": ({"kernel": 20}, (200, 0, 100, 224)),
}


@pytest.mark.parametrize("name", RECLAIMED)
def test_what_the_kernel_can_reclaim_is_not_needed(tmp_path: Path, name: str) -> None:
    changes, expected = RECLAIMED[name]
    group = Cgroup(tmp_path)
    group.file("usage").write_text("999")
    lines = [f"{name} {number}" for name, number in (STAT | changes).items()]
    group.file("stat").write_text("\n".join(lines))
    sample = Sampler(NO_PID, list, group).read(7, [])
    assert sample
    figures = (sample.anon_bytes, sample.locked_bytes, sample.freed_bytes, sample.needed_bytes)
    assert figures == expected


def test_what_the_doctor_says_of_each_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Compare
) -> None:
    told = []
    for resets, kernels in ((True, (*V1, *V2)), (False, ("v2-6.12",))):
        if not resets:
            monkeypatch.setattr(Cgroup, "reset_peak", lambda _: False)
        for kernel in kernels:
            (folder := tmp_path / f"{kernel} {resets}").mkdir()
            told.append(f"{kernel}:" if resets else f"{kernel} without a reset:")
            found = doctor.of_group(make_group(folder, kernel))
            told += [f"  {one.subject}: {one.verdict}: {one.detail}" for one in found]
    same("doctor.txt", "\n".join(told) + "\n")


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_slow_disk_on_a_fresh_machine_and_for_containers(
    is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*, in_container: bool) -> None:
        if in_container and is_refused:
            raise IsolationUnavailable("they may not read it", "write a line")

    def mount(folder: Path, *_: object) -> object:
        assert folder.exists()
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "none" / "yet"))
    monkeypatch.setattr(slow_disk, "check", check)
    monkeypatch.setattr(slow_disk, "Mount", mount)
    found = doctor._slow_disk()
    assert (found.verdict, found.detail) == (
        ("partly", "they may not read it. write a line")
        if is_refused
        else ("yes", "FUSE has mounted a folder a second time")
    )
