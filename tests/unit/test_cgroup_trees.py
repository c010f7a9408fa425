"""Cells in cgroups of every kind: their groups, their limits, and that nothing of them is left."""

import errno
import os
import re
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cgroup_trees import UNLIMITED_V1, Kernel
from factories import refused
from fakes import JOB
from leftovers import Piped, wait_until
from snapshots import Compare

from weighin.cell import Cell
from weighin.errors import ConfigError, IsolationUnavailable, StillRunning
from weighin.isolation import cgroup
from weighin.isolation.base import Exit, Streams
from weighin.isolation.cgroup import PARENT_LEAF, temporary_group
from weighin.isolation.process import CgroupIsolation, Started
from weighin.probes.cgroup import LOCK_VARIABLE, Cgroup, this_process
from weighin.units import MIB

ENDED = "-".join(["1", "1", *this_process().split("-")[2:]])
ENDS_S = 60  # how long to wait for a short command on a busy machine


def started(*words: str, **fields: object) -> Started:
    cell = Cell.of_command("mine", words or ("true",), "cgroup", **fields)
    return CgroupIsolation().start(cell, cell.command, "/", Streams())


Rows = list[tuple[dict[str, int], dict[str, object]]]

HARD, SOFT = {"ram_limit_bytes": 64 * MIB}, {"ram_high_bytes": 32 * MIB}
V1: Rows = [
    ({}, {"limit_in_bytes": UNLIMITED_V1, "memsw.limit_in_bytes": UNLIMITED_V1}),
    (HARD, {"limit_in_bytes": 64 * MIB, "memsw.limit_in_bytes": 64 * MIB, "swappiness": 0}),
]
V2: Rows = [
    ({}, {"max": "max", "high": "max"}),
    (HARD, {"max": 64 * MIB, "high": "max", "swap.max": 0, "oom.group": 0}),
    (HARD | SOFT, {"max": 64 * MIB, "high": 32 * MIB}),
]
LIMITS = [("v1", V1), ("hybrid", V1), ("v2", V2)]


@pytest.mark.parametrize(
    ("kernel", "fields", "files"),
    [(layout, *row) for layout, rows in LIMITS for row in rows],
    indirect=["kernel"],
)
def test_a_command_enters_its_limited_groups(
    kernel: Kernel, fields: dict[str, int], files: dict[str, object]
) -> None:
    command = ("sh", "-c", 'exit "$CODE"')
    with closing(started(*command, environment={"CODE": "3"}, **fields)) as running:
        assert [group.parent for group in running.groups] == kernel.roots
        assert running.cgroup == running.groups[0]
        for name, value in files.items():
            assert (running.groups[0] / f"memory.{name}").read_text() == str(value), name
        assert running.wait(ENDS_S)
        assert running.reap() == Exit(3)
        # 0 stands for the process that writes.
        assert {(group / "cgroup.procs").read_text() for group in running.groups} == {"0"}
        assert len({group.name for group in running.groups}) == 1
    assert kernel.groups() == []


def test_a_limit_is_lifted_although_the_kernel_wants_the_larger_limit_first(kernel: Kernel) -> None:
    with temporary_group() as group:
        cgroup.limit(group, 64 * MIB)
        assert group.parent == kernel.memory
        assert Cgroup(group).read("limit") == 64 * MIB
        Cgroup(group).raise_limit()
        assert Cgroup(group).file("limit").read_text() == (
            "max" if kernel.memory == kernel.unified else "-1"
        )


def test_a_machine_that_can_limit_passes_the_check_and_keeps_no_group(kernel: Kernel) -> None:
    CgroupIsolation().check()
    assert kernel.groups() == []
    assert CgroupIsolation().describe() == {"groups": str(kernel.memory)}


# -- refusals


LACKS: dict[str, Callable[[Kernel], object]] = {
    "no_controller": lambda kernel: kernel.mounts.write_text(""),
    "may_not": lambda kernel: kernel.refused.add(kernel.memory),
    "refused_later": lambda kernel: kernel.refused.add(kernel.memory),
    "uncounted_swap": lambda kernel: kernel.left_out.update({"memory.memsw.limit_in_bytes", "memory.swap.max"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "lack"),
    [
        ("v1", "no_controller"), ("hybrid", "no_controller"), ("v2", "no_controller"), ("hybrid", "may_not"),
        ("v1", "refused_later"), ("hybrid", "refused_later"), ("v2", "refused_later"),
        ("v1", "uncounted_swap"), ("v2", "uncounted_swap"),
    ],
    indirect=["kernel"],
)  # fmt: skip
def test_a_machine_that_cannot_limit_is_told_what_to_do(
    kernel: Kernel, lack: str, same: Compare
) -> None:
    if lack == "refused_later":
        CgroupIsolation().check()  # finds the folder for groups
    LACKS[lack](kernel)
    said = refused(CgroupIsolation().check, kind=IsolationUnavailable)
    said = said.replace(str(kernel.memory), "MEMORY")
    said = re.sub(r"weighin\.\d+-\d+-\d+\.\S+:", "GROUP:", said)
    same(f"cgroups/{lack}_{kernel.memory.name}.txt", f"{said}\n")
    assert kernel.groups() == []
    if lack == "uncounted_swap":
        kernel.swaps.write_text("Filename Type Size Used Priority\n")
        CgroupIsolation().check()


def test_a_group_that_cannot_be_entered_is_named(tmp_path: Path) -> None:
    told = refused(Started, ("true",), groups=[tmp_path / "gone"], is_worker=True)
    assert (
        f"cannot be started: it could not enter its cgroup ({tmp_path}/gone/cgroup.procs)" in told
    )


def test_a_failed_start_leaves_no_group(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        started("/no/such/program", **HARD)
    assert kernel.groups() == []
    monkeypatch.setattr(cgroup, "limit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        started(**HARD)
    assert kernel.groups() == []


# -- groups and processes


@pytest.mark.parametrize("kernel", ["hybrid"], indirect=True)
def test_a_group_for_psi_that_cannot_be_made_is_left_out(kernel: Kernel) -> None:
    assert kernel.unified
    kernel.refused.add(kernel.unified)
    with closing(started()) as running:
        assert [group.parent for group in running.groups] == [kernel.memory]
        assert running.wait(ENDS_S)


@pytest.mark.parametrize("kernel", ["hybrid"], indirect=True)
def test_the_groups_of_two_cells_have_two_names(kernel: Kernel) -> None:
    with temporary_group() as first, temporary_group() as second:
        assert first != second
        assert len(kernel.groups()) == 4


def test_a_worker_is_in_all_its_groups_before_its_first_instruction(kernel: Kernel) -> None:
    cell = replace(JOB.cell, ram_limit_bytes=64 * MIB, environment={"MODE": "fast"})
    pipes = Piped()
    command = ("sh", "-c", 'echo "$$ $MODE"; exec cat')
    running = CgroupIsolation().start(cell, command, "", Streams(*pipes.streams))
    pipes.started()
    try:
        assert pipes.printed() == [f"{running.pid} fast".encode()]
        groups = kernel.groups()
        assert {group.parent for group in groups} == set(kernel.roots)
        assert {(g / "cgroup.procs").read_text() for g in groups} == {"0"}  # it entered itself
        assert running.cgroup and running.cgroup.parent == kernel.memory
        assert Cgroup(running.cgroup).read("limit") == 64 * MIB
    finally:
        running.close()
        pipes.close()
    assert kernel.groups() == []


@pytest.mark.parametrize("kernel", ["hybrid"], indirect=True)
def test_the_processes_of_a_command_are_those_of_all_its_groups(kernel: Kernel) -> None:
    with closing(started()) as running:
        assert running.wait(ENDS_S)
        (below := running.groups[0] / "below").mkdir()
        files = [folder / "cgroup.procs" for folder in (running.groups[0], below)]
        for file, text in zip(files, ("12\n0\n", "34\n"), strict=True):
            file.unlink()
            with file.open("w") as opened:
                opened.write(text)  # 0: a process of another pid namespace
        assert sorted(running.members()) == [12, 34]
        for file in files:
            file.unlink()
        assert running.members() == []
        for file in files:
            file.touch()


# -- the end


def ended(groups: list[Path], *, is_worker: bool = False) -> None:
    running = Started(("true",), groups=groups, is_worker=is_worker, streams=Streams())
    assert running.wait(ENDS_S)
    running.kill()
    running.close()


def ended_worker(groups: list[Path]) -> None:
    ended(groups, is_worker=True)


def living(groups: list[Path]) -> None:
    running = Started(("sleep", "600"), groups=groups)
    running.kill()
    assert running.reap() == Exit(None, signal=signal.SIGKILL)
    assert groups[0].exists()  # until it is closed
    running.close()


@pytest.mark.parametrize("end", [ended_worker, ended, living, cgroup.remove])
@pytest.mark.parametrize(
    ("kernel", "left_out"),
    [("v1", ""), ("hybrid", ""), ("v2", "cgroup.kill"), ("v2", "")],
    ids=["v1", "hybrid", "v2 before Linux 5.14", "v2"],
    indirect=["kernel"],
)
def test_processes_in_groups_below_end_with_the_cell(
    kernel: Kernel, sleeper: int, left_out: str, end: Callable[[list[Path]], None]
) -> None:
    kernel.left_out.add(left_out)
    groups = cgroup.make()
    below = groups[0] / "below" / "deeper"
    below.parent.mkdir()
    below.mkdir()
    kernel.put(sleeper, below)
    end(groups)
    assert kernel.groups() == []
    assert os.waitpid(sleeper, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("reaps", [True, False])
@pytest.mark.parametrize("kernel", ["hybrid"], indirect=True)
def test_all_groups_are_removed_but_the_one_whose_process_does_not_end(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, reaps: bool
) -> None:
    waits: list[float] = []
    running = Started(("true",) if reaps else ("sleep", "600"), groups=(groups := cgroup.make()))
    kernel.busy.add(groups[0])
    with monkeypatch.context() as patch:
        if reaps:
            assert running.wait(ENDS_S)
            assert running.reap() == Exit(0)
            patch.setattr(cgroup, "PATIENCE_S", 0)
            why = f"the cgroup {groups[0]} cannot be removed"
        else:  # it was waited for before, which is enough
            patch.setattr(Started, "reap", lambda _: Exit(None, still_runs=True))
            patch.setattr("time.sleep", waits.append)
            why = f"process {running.pid} does not end"
        with pytest.raises(StillRunning, match=why):
            running.close()
    assert len(waits) < 10
    assert kernel.groups() == [groups[0]]
    kernel.busy.clear()
    running.close()
    assert kernel.groups() == []


def test_a_removal_waits_for_a_late_end(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def ends_now(seconds: float) -> None:
        waits.append(seconds)
        kernel.busy.clear()

    monkeypatch.setattr("time.sleep", ends_now)
    with temporary_group() as group:
        kernel.busy.add(group)
    assert not group.exists()
    assert len(waits) == 1


def forbidden(path: Path) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted", str(path))


def test_a_group_that_stays_is_named(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "PATIENCE_S", 0)
    with pytest.raises(StillRunning) as caught, temporary_group() as group:
        kernel.busy.add(group)
    why = f"the cgroup {group} cannot be removed after SIGKILL to its processes"
    assert caught.value.message == f"{why}: Device or resource busy"
    assert group.exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", forbidden)  # that is no running process
        told = refused(cgroup.remove, [group], kind=IsolationUnavailable)
    assert told == f"{why}: Operation not permitted\nrmdir {group}"


def test_two_remove_a_group_at_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = os.rmdir

    def removed_before(path: Path) -> None:
        remove(path)
        raise FileNotFoundError

    with temporary_group() as group:
        monkeypatch.setattr(os, "rmdir", removed_before)
    assert not group.exists()
    assert kernel.groups() == []


# -- what dead runs left


def test_what_dead_runs_left_in_any_hierarchy_is_removed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, sleeper: int
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    dead = [root / f"weighin.{ENDED}.0" for root in kernel.roots]
    of_another_lock = kernel.memory / f"weighin.{ENDED}.0-0a1b2c3d"
    # An ordinary user's own process is in the leaf.
    others = (f"weighin.{this_process()}.0", f"other.{ENDED}.0", PARENT_LEAF, "init.scope")
    kept = [kernel.memory / name for name in others]
    for group in (*dead, of_another_lock, *kept):
        group.mkdir()
    kernel.put(sleeper, dead[0])
    removed = {f"cgroup {group}" for group in (*dead, of_another_lock)}
    assert set(CgroupIsolation().remove_stale()) == removed
    assert set(kernel.groups()) == set(kept)
    wait_until(lambda: os.waitpid(sleeper, os.WNOHANG)[0] == sleeper, "the process lives on")


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_leftover_that_cannot_be_removed_is_not_said_to_be(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    monkeypatch.setattr(cgroup, "PATIENCE_S", 0)
    (dead := kernel.memory / f"weighin.{ENDED}.0").mkdir()
    kernel.busy.add(dead)
    with monkeypatch.context() as patch:
        if is_refused:
            patch.setattr(os, "rmdir", forbidden)
        assert CgroupIsolation().remove_stale() == []
    assert dead.exists()
