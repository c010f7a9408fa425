"""A command's memory in a cgroup: exact splits, its processes, their files, and its kills."""

import mmap
import os
import time
from pathlib import Path

import command_trees
import pytest
from cells import MIB, kernel_log, new_group, page_cache
from command_trees import FAMILY, command, record, samples, weighed

pytestmark = pytest.mark.cgroup

SEEN_S = 1.5
"""A command that uses most memory for so long is sampled, and the table of its processes kept."""


def pause(one: command_trees.Command, step: str) -> None:
    """Let a command go on to a step, and wait there until it must have been seen."""
    one.go(step)
    time.sleep(SEEN_S)


def test_a_family_is_counted_once_and_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with weighed(FAMILY, out) as family:
        family.reach("started")
        time.sleep(0.3)
        started_ns = time.monotonic_ns()
        pause(family, "forked")
        family.go("alone")
    found, seen = record(out), samples(out)
    before = max((one for one in seen if one["t_ns"] < started_ns), key=lambda one: one["t_ns"])
    most = max(seen, key=lambda one: one["anon_bytes"])
    anon, shmem = command_trees.FAMILY_ANON_MIB * MIB, command_trees.FAMILY_SHMEM_MIB * MIB
    rise = most["anon_bytes"] - before["anon_bytes"]
    assert rise == pytest.approx(anon, abs=0.01 * anon + MIB)
    assert most["shmem_bytes"] == pytest.approx(shmem, abs=MIB)
    assert most["cgroup_bytes"] >= most["anon_bytes"] + most["shmem_bytes"]
    assert (found["outcome"], found["oom_kills"]) == ("ok", 0)
    parent, *children = found["ran"]["processes"]
    assert len(children) == 3
    assert {child["parent_pid"] for child in children} == {parent["pid"]}
    assert parent["highest_rss_bytes"] >= 128 * MIB + shmem
    together = sum(one["anon_bytes"] + one["shmem_bytes"] for one in (parent, *children))
    assert together == pytest.approx(found["ran"]["needed_bytes"], rel=0.05)


READING = """
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


def test_the_files_that_are_read_and_mapped_at_the_peak(tmp_path: Path, disk: Path) -> None:
    files, out = [disk / "big.bin", disk / "big.bin2"], tmp_path / "run"
    for file, mib in zip(files, (30, 20), strict=True):
        file.write_bytes(b"\1" * (mib * MIB))
    with weighed(f"PATH = {str(files[0])!r}\n{READING}", out) as one:
        one.reach("started")
        pause(one, "read")
        one.go("freed")
    (process,) = record(out)["ran"]["processes"]
    read, mapped = sorted(process["files"], key=lambda one: str(one["path"]))
    names = ("path", "size_bytes", "position_bytes")
    assert [read[name] for name in names] == [str(files[0]), 30 * MIB, 24 * MIB]
    assert [mapped[name] for name in names] == [str(files[1]), 20 * MIB, 0]
    assert mapped["mapped_bytes"] == 20 * MIB
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


def test_page_cache_at_the_limit_does_not_hide_the_peak(tmp_path: Path, disk: Path) -> None:
    """Page cache fills the group up to its limit first: the usage then no longer grows."""
    file, out = disk / "cached.bin", tmp_path / "run"
    file.write_bytes(b"\1" * (160 * MIB))
    page_cache.drop([file])
    with weighed(f"PATH = {str(file)!r}\n{CACHE_THEN_MEMORY}", out, "--ram 128m") as one:
        one.reach("started")
        pause(one, "held")
        one.go("freed")
    found = record(out)
    (process,) = found["ran"]["processes"]
    # The kernel's counters lag by up to 64 pages for each processor. The sampler reads the processes
    # again only if the memory grew by 1 MiB or 1 %.
    least = 60 * MIB - 64 * mmap.PAGESIZE * (os.cpu_count() or 1)
    assert process["anon_bytes"] >= least - max(MIB, 128 * MIB // 100)
    (peak,) = [each for each in samples(out) if each["t_ns"] == found["ran"]["peak_ns"]]
    assert peak["anon_bytes"] >= least
    assert found["peaks"]["file_sampled_bytes"] > 100 * MIB
    file.unlink()


def test_short_children_and_groups_below_are_seen(tmp_path: Path) -> None:
    code = """
step("started")
for _ in range(2):
    if (pid := os.fork()) == 0:
        os.execv("/bin/sleep", ["sleep", "1"])
    os.waitpid(pid, 0)
below = own_group()[0] + "/below"
os.mkdir(below)
if (pid := os.fork()) == 0:
    enter(below)
    os.execv("/bin/sleep", ["sleep", "1.5"])
os.waitpid(pid, 0)
step("done")
"""
    out = tmp_path / "run"
    with weighed(code, out) as one:
        one.reach("started")
        one.go("done")
    parent, *children = record(out)["ran"]["processes"]
    assert [child["command"] for child in children] == ["sleep 1"] * 2 + ["sleep 1.5"]
    assert {child["parent_pid"] for child in children} == {parent["pid"]}
    for child, lived_s in zip(children, (1, 1, 1.5), strict=True):
        assert (child["end_ns"] - child["start_ns"]) / 1e9 == pytest.approx(lived_s, abs=0.4)


def test_a_kill_of_a_child_is_counted_although_the_command_lives(tmp_path: Path) -> None:
    code = """
step("started")
if (pid := os.fork()) == 0:
    held = hold(40)
    step("held")
    hold(200)
os.waitpid(pid, 0)
step("survived")
"""
    out = tmp_path / "run"
    with weighed(code, out, "--ram 64m") as one:
        one.reach("started")
        pause(one, "held")
        one.go("survived")
    found = record(out)
    assert (found["oom_kills"], found["exit_code"], found["ran"]["survived"]) == (1, 0, True)
    assert 40 * MIB < found["peaks"]["unreclaimable_sampled_bytes"] <= 64 * MIB
    assert 40 * MIB < found["ran"]["needed_bytes"] <= 64 * MIB


BELOW = """
group, version = own_group()
os.mkdir(group + "/own")
enter(group + "/own")  # v2 limits only groups whose parents have no processes
if version == 2:
    open(group + "/cgroup.subtree_control", "w").write("+memory")
below = group + "/below"
os.mkdir(below)
names = ("memory.max",) if version == 2 else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
for name in names:
    if os.path.exists(below + "/" + name):
        open(below + "/" + name, "w").write(str(64 << 20))
step("started")
if (pid := os.fork()) == 0:
    enter(below)
    hold(200)
    os._exit(0)
step(f"killed {os.waitpid(pid, 0)[1]}")
os.rmdir(below)
step("removed")
"""


def test_a_kill_in_a_group_below_is_counted_also_after_its_removal(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with weighed(BELOW, out) as one:
        one.reach("started")
        pause(one, "killed 9")
        pause(one, "removed")
    assert record(out)["oom_kills"] == 1


@pytest.mark.parametrize("is_own", [True, False])
def test_the_kernel_log_tells_who_was_killed_for_whose_limit(is_own: bool) -> None:
    if (start := kernel_log.position()) is None:
        pytest.skip("this user may not read the kernel's log")
    with new_group() as group:
        cell = group.path
        if not is_own:
            cell = group.path / "cell"
            cell.mkdir()
        group.limit(64 * MIB)
        with command('step("started"); hold(200)', cell) as one:
            one.reach("started")
            one.go()
            assert one.process.wait(60) == -9
        kills = kernel_log.kills_since(start, cell, one.pid)
    assert kills
    (kill,) = kills
    assert (kill.pid, kill.is_main) == (one.pid, True)
    assert kill.limit_of == ("" if is_own else f"/{group.path.name}")
    assert kill.anon_bytes == pytest.approx(60 * MIB, abs=6 * MIB)
    assert kernel_log.kills_since(kernel_log.position(), cell, one.pid) == ()
