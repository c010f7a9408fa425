"""Cells in cgroups of every kind: their groups, their limits, and that nothing of them is left."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cgroup_trees import Kernel, installed
from fakes import JOB
from leftovers import Piped, wait_until

from weighin.cell import Cell
from weighin.child_process import PATIENCE_S
from weighin.errors import IsolationUnavailable, StillRunning
from weighin.isolation import cgroup
from weighin.isolation.base import Exit, Streams
from weighin.isolation.cgroup import temporary_group
from weighin.isolation.process import CgroupIsolation, Started
from weighin.probes.cgroup import LOCK_VARIABLE, Cgroup, this_process
from weighin.units import MIB

ENDED = "-".join(["1", "1", *this_process().split("-")[2:]])
MAY_NOT = "this user may not create memory cgroups"


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    with installed(tmp_path, monkeypatch, "hybrid") as kernel:
        yield kernel


def command(*arguments: str, **fields: object) -> Cell:
    return Cell.of_command("mine", arguments or ("true",), "cgroup", **fields)


def started(cell: Cell) -> Started:
    return CgroupIsolation().start(cell, cell.command, "/", Streams())


def roots(kernel: Kernel) -> list[Path]:
    """The folders in which a cell's groups belong, in their order."""
    return list(dict.fromkeys(root for root in (kernel.memory, kernel.unified) if root))


@pytest.mark.parametrize("kernel", ["v1", "hybrid"], indirect=True)
def test_a_limit_on_v1_is_for_memory_and_for_memory_with_swap(kernel: Kernel) -> None:
    with temporary_group() as group:
        assert group.parent == kernel.memory
        cgroup.limit(group, 64 * MIB)
        limits = {name: int((group / name).read_text()) for name in (
            "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.swappiness",
        )}  # fmt: skip
        assert list(limits.values()) == [64 * MIB, 64 * MIB, 0]
        Cgroup(group).raise_limit()  # the kernel wants the larger limit first
        assert (group / "memory.limit_in_bytes").read_text() == "-1"


@pytest.mark.parametrize("kernel", ["v2"], indirect=True)
def test_a_limit_on_v2_forbids_swap_and_kills_one_process(kernel: Kernel) -> None:
    with temporary_group() as group:
        cgroup.limit(group, 64 * MIB)
        names = ("memory.max", "memory.swap.max", "memory.oom.group")
        assert [(group / name).read_text() for name in names] == [str(64 * MIB), "0", "0"]


@pytest.mark.parametrize(
    ("layout", "file"), [("v1", "memory.memsw.limit_in_bytes"), ("v2", "memory.swap.max")]
)
def test_a_kernel_that_does_not_count_swap_limits_only_without_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, file: str
) -> None:
    with installed(tmp_path, monkeypatch, layout, counts_swap=False) as kernel:
        with pytest.raises(IsolationUnavailable) as caught:
            CgroupIsolation().check()
        assert str(caught.value) == (
            f"the kernel does not count swap for each cgroup ({file} is missing), so a process"
            " under a RAM limit could swap\nturn swap off (sudo swapoff -a), or boot with"
            " swapaccount=1"
        )
        assert kernel.groups() == []
        kernel.swaps.write_text("Filename Type Size Used Priority\n")
        CgroupIsolation().check()


def test_a_machine_that_can_limit_passes_the_check_and_keeps_no_group(kernel: Kernel) -> None:
    CgroupIsolation().check()
    assert kernel.groups() == []
    assert CgroupIsolation().describe() == {"groups": str(kernel.memory)}


def test_a_machine_without_a_memory_controller(kernel: Kernel) -> None:
    kernel.mounts.write_text("")
    with pytest.raises(IsolationUnavailable) as caught:
        CgroupIsolation().check()
    assert str(caught.value) == (
        "this machine has no cgroup memory controller (neither v2 nor v1)\nboot with"
        " cgroup_enable=memory"
    )


def test_a_user_who_may_make_no_group_is_told_what_to_do(hybrid: Kernel) -> None:
    hybrid.refused.add(hybrid.memory)
    with pytest.raises(IsolationUnavailable) as caught:
        CgroupIsolation().check()
    assert str(caught.value) == (
        f"{MAY_NOT}\nrun it as root (sudo env PATH=$PATH weighin ...); start a container with"
        " --privileged"
    )


def test_a_group_that_the_kernel_refuses(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    CgroupIsolation().check()  # finds the folder for groups
    kernel.refused.add(kernel.memory)
    with pytest.raises(IsolationUnavailable) as caught:
        CgroupIsolation().check()
    assert caught.value.message.startswith(f"cannot create the memory cgroup {kernel.memory}/weigh")
    assert caught.value.message.endswith(": Permission denied")


def test_a_group_for_psi_that_cannot_be_made_is_left_out(hybrid: Kernel) -> None:
    assert hybrid.unified
    hybrid.refused.add(hybrid.unified)
    with closing(started(command())) as running:
        assert [group.parent for group in running.groups] == [hybrid.memory]
        assert running.wait(10)


def test_a_command_enters_its_limited_groups(kernel: Kernel) -> None:
    cell = command("sh", "-c", 'exit "$CODE"', ram_limit_bytes=64 * MIB, environment={"CODE": "3"})
    with closing(started(cell)) as running:
        assert [group.parent for group in running.groups] == roots(kernel)
        assert running.cgroup == running.groups[0]
        assert Cgroup(running.groups[0]).read("limit") == 64 * MIB
        assert running.wait(10)
        assert running.reap() == Exit(3)
        # 0 stands for the process that writes.
        assert {(group / "cgroup.procs").read_text() for group in running.groups} == {"0"}
        assert len({group.name for group in running.groups}) == 1
    assert kernel.groups() == []


def test_the_groups_of_two_cells_have_two_names(hybrid: Kernel) -> None:
    with temporary_group() as first, temporary_group() as second:
        assert first != second
        assert len(hybrid.groups()) == 4


@pytest.mark.parametrize("kernel", ["v2"], indirect=True)
def test_a_soft_limit_is_that_of_the_group(kernel: Kernel) -> None:
    cell = command(ram_high_bytes=32 * MIB, ram_limit_bytes=64 * MIB)
    with closing(started(cell)) as running:
        assert (running.groups[0] / "memory.high").read_text() == str(32 * MIB)
        assert running.wait(10)


def test_a_cell_without_limits_has_a_group_without_them(kernel: Kernel) -> None:
    before = {"v1": "9223372036854771712", "v2": "max"}
    with closing(started(command())) as running:
        limit = Cgroup(running.groups[0]).file("limit").read_text()
        assert limit == before["v2" if kernel.memory == kernel.unified else "v1"]
        assert running.wait(10)


@pytest.mark.parametrize("fault", ["limit", "command"])
def test_a_cell_that_cannot_start_leaves_no_group(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    program = "/no/such/program" if fault == "command" else "true"
    cell = command(program, ram_limit_bytes=64 * MIB)
    if fault == "limit":
        monkeypatch.setattr(cgroup, "limit", lambda *_: 1 / 0)
    with pytest.raises(Exception) as caught:
        started(cell)
    assert type(caught.value).__name__ in ("ZeroDivisionError", "ConfigError")
    assert kernel.groups() == []


def test_a_worker_is_in_all_its_groups_before_its_first_instruction(
    kernel: Kernel,
) -> None:
    cell = replace(JOB.cell, ram_limit_bytes=64 * MIB, environment={"MODE": "fast"})
    pipes = Piped()
    command = ("sh", "-c", 'echo "$$ $MODE"; exec cat')
    running = CgroupIsolation().start(cell, command, "", Streams(*pipes.streams))
    pipes.started()
    try:
        assert pipes.printed() == [f"{running.pid} fast".encode()]
        groups = kernel.groups()
        assert {group.parent for group in groups} == set(roots(kernel))
        assert {(g / "cgroup.procs").read_text() for g in groups} == {"0"}  # it entered itself
        assert running.cgroup and running.cgroup.parent == kernel.memory
        assert Cgroup(running.cgroup).read("limit") == 64 * MIB
    finally:
        running.close()
        pipes.close()
    assert kernel.groups() == []


def endings() -> dict[str, Callable[[list[Path]], None]]:
    """The ways in which the processes of a cell's groups are ended."""

    def kill_worker(groups: list[Path]) -> None:
        running = Started(("true",), groups=groups, is_worker=True)
        assert running.reap() == Exit(0)
        running.kill()
        running.close()

    def kill_command(groups: list[Path]) -> None:
        running = Started(("true",), folder="/", environment={}, streams=Streams(), groups=groups)
        assert running.wait(10)
        running.kill()
        running.close()

    return {"worker": kill_worker, "command": kill_command, "removal": cgroup.remove}


@pytest.mark.parametrize("ending", list(endings()))
@pytest.mark.parametrize(
    ("layout", "has_kill"), [("v1", False), ("hybrid", True), ("v2", False), ("v2", True)]
)
def test_processes_in_groups_below_end_with_the_cell(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sleeper: int,
    layout: str,
    has_kill: bool,
    ending: str,
) -> None:
    with installed(tmp_path, monkeypatch, layout, has_kill=has_kill) as kernel:
        groups = cgroup.make()
        below = groups[0] / "below" / "deeper"
        below.parent.mkdir()
        below.mkdir()
        kernel.put(sleeper, below)
        endings()[ending](groups)
        assert kernel.groups() == []
        assert os.waitpid(sleeper, 0)[1] == signal.SIGKILL


def test_a_worker_that_is_killed_takes_its_children_along(hybrid: Kernel, sleeper: int) -> None:
    running = Started(("sleep", "60"), groups=(groups := cgroup.make()))
    (groups[0] / "below").mkdir()
    hybrid.put(sleeper, groups[0] / "below")
    running.kill()
    assert os.waitpid(sleeper, 0)[1] == signal.SIGKILL
    assert running.reap() == Exit(None, signal=signal.SIGKILL)
    assert set(hybrid.groups()) == {*groups, groups[0] / "below"}  # until it is closed
    running.close()
    assert hybrid.groups() == []


def test_the_processes_of_a_command_are_those_of_all_its_groups(hybrid: Kernel) -> None:
    with closing(started(command())) as running:
        assert running.wait(10)
        (below := running.groups[0] / "below").mkdir()
        (running.groups[0] / "cgroup.procs").unlink()
        (below / "cgroup.procs").unlink()
        for folder, text in ((running.groups[0], "12\n0\n"), (below, "34\n")):
            with (folder / "cgroup.procs").open("w") as file:
                file.write(text)  # 0: a process of another pid namespace
        assert sorted(running.members()) == [12, 34]
        for folder in (running.groups[0], below):
            (folder / "cgroup.procs").unlink()
        assert running.members() == []
        for folder in (running.groups[0], below):
            (folder / "cgroup.procs").touch()


def test_a_process_that_does_not_end_is_named_with_its_group(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "PATIENCE_S", 0)
    with pytest.raises(StillRunning) as caught, temporary_group() as group:
        kernel.busy.add(group)
    assert caught.value.message == (
        f"the cgroup {group} cannot be removed after SIGKILL to its processes: Device or resource"
        " busy"
    )
    assert group.exists()


def test_a_group_that_the_kernel_does_not_let_go_is_no_running_process(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(cgroup, "PATIENCE_S", 0)
    (dead := kernel.memory / f"weighin.{ENDED}.0").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        assert CgroupIsolation().remove_stale() == []
        with pytest.raises(IsolationUnavailable) as caught:
            cgroup.remove([dead])
    assert caught.value.message.endswith("after SIGKILL to its processes: Operation not permitted")
    assert caught.value.repair == f"rmdir {dead}"


def test_a_group_that_cannot_be_entered_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        IsolationUnavailable, match=f"cannot be started in {tmp_path}/gone/cgroup.procs"
    ):
        Started(("true",), groups=[tmp_path / "gone"], is_worker=True)


def test_all_groups_are_removed_but_the_one_whose_process_does_not_end(
    hybrid: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Started(("true",), groups=(groups := cgroup.make()))
    assert running.wait(60)
    monkeypatch.setattr(cgroup, "PATIENCE_S", 0)
    assert running.reap() == Exit(0)
    hybrid.busy.add(groups[0])
    with pytest.raises(StillRunning):
        running.close()
    assert hybrid.groups() == [groups[0]]
    hybrid.busy.clear()
    running.close()
    assert hybrid.groups() == []


def test_a_removal_waits_for_a_process_that_ends_late(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def ends_now(seconds: float) -> None:
        waits.append(seconds)
        kernel.busy.clear()

    monkeypatch.setattr("time.sleep", ends_now)
    with temporary_group() as group:
        kernel.busy.add(group)
    assert not group.exists()
    assert len(waits) == 1


def test_the_groups_of_a_worker_that_does_not_end_can_be_removed_later(
    hybrid: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Started(("sleep", "60"), groups=(groups := cgroup.make()))
    hybrid.busy.add(groups[0])
    began_s = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Started, "reap", lambda _: Exit(None, still_runs=True))
        with pytest.raises(StillRunning, match=f"process {running.pid} does not end"):
            running.close()
    assert time.monotonic() - began_s < PATIENCE_S / 2  # it was waited for before
    assert hybrid.groups() == [groups[0]]
    hybrid.busy.clear()
    running.close()
    assert hybrid.groups() == []


def test_what_dead_runs_left_in_any_hierarchy_is_removed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, sleeper: int
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    where = roots(kernel)
    dead = [root / f"weighin.{ENDED}.0" for root in where]
    kept = [kernel.memory / name for name in (f"weighin.{this_process()}.0", f"other.{ENDED}.0")]
    for group in (*dead, *kept):
        group.mkdir()
    kernel.put(sleeper, dead[0])
    assert CgroupIsolation().remove_stale() == [f"cgroup {group}" for group in dead]
    assert set(kernel.groups()) == set(kept)
    wait_until(lambda: os.waitpid(sleeper, os.WNOHANG)[0] == sleeper, "the process lives on")


def test_a_leftover_that_cannot_be_removed_is_not_said_to_be(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    monkeypatch.setattr(cgroup, "PATIENCE_S", 0)
    (dead := kernel.memory / f"weighin.{ENDED}.0").mkdir()
    kernel.busy.add(dead)
    assert CgroupIsolation().remove_stale() == []
    assert dead.exists()


def test_a_group_that_another_process_removes_at_the_same_time_is_gone(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = os.rmdir

    def removed_before(path: Path) -> None:
        remove(path)
        raise FileNotFoundError

    with temporary_group() as group:
        monkeypatch.setattr(os, "rmdir", removed_before)
    assert not group.exists()
    assert kernel.groups() == []
