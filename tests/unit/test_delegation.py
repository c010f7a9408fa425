"""Where cells' groups can be made, and the memory that is there: on trees of every kind."""

import os
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from cgroup_trees import Kernel, installed

from weighin.isolation import cgroup
from weighin.probes import environment
from weighin.units import GIB, MIB


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    with installed(tmp_path, monkeypatch, "v2") as kernel:
        yield kernel


def scope(kernel: Kernel, *, pid: int | None = None) -> Path:
    """Return a delegated group with this process, as systemd makes one."""
    (group := kernel.memory / "user.scope").mkdir()
    with (group / "cgroup.controllers").open("w") as file:
        file.write("memory pids")
    kernel.put(pid or os.getpid(), group)
    return group


def refuse_root(kernel: Kernel) -> None:
    kernel.refused |= {kernel.memory, kernel.memory / "cgroup.subtree_control"}


def test_root_makes_groups_in_the_root_of_the_memory_hierarchy(kernel: Kernel) -> None:
    assert cgroup.groups_root() == kernel.memory


def test_the_controller_is_enabled_for_groups_on_v2(v2: Kernel) -> None:
    cgroup.groups_root()
    assert (v2.memory / "cgroup.subtree_control").read_text().split() == ["memory"]
    cgroup.groups_root.cache_clear()
    v2.refused.add(v2.memory / "cgroup.subtree_control")  # it is enabled: nothing is to be written
    assert cgroup.groups_root() == v2.memory


def test_a_user_who_may_write_nowhere_has_no_root(kernel: Kernel) -> None:
    refuse_root(kernel)
    assert cgroup.groups_root() is None


def test_a_folder_whose_controller_is_on_but_in_which_this_user_makes_nothing(v2: Kernel) -> None:
    (v2.memory / "cgroup.subtree_control").write_text("+memory")
    v2.refused.add(v2.memory)
    assert cgroup.groups_root() is None


def test_without_a_memory_controller_there_is_no_root(kernel: Kernel) -> None:
    kernel.mounts.write_text("")
    assert cgroup.groups_root() is None


def test_a_user_has_the_scope_that_was_given_and_moves_out_of_its_groups_way(v2: Kernel) -> None:
    group = scope(v2)
    refuse_root(v2)
    assert cgroup.groups_root() == group
    leaf = group / "weighin-parent"
    assert (leaf / "cgroup.procs").read_text().split() == [str(os.getpid())]
    assert (group / "cgroup.procs").read_text() == ""
    assert (group / "cgroup.subtree_control").read_text().split() == ["memory"]


def test_a_process_in_the_leaf_finds_the_scope_again(v2: Kernel) -> None:
    group = scope(v2)
    refuse_root(v2)
    cgroup.groups_root()
    cgroup.groups_root.cache_clear()
    assert cgroup.groups_root() == group
    assert [each.name for each in group.iterdir() if each.is_dir()] == ["weighin-parent"]


def test_processes_that_start_while_others_are_moved_are_moved_too(
    v2: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, leaf = scope(v2), v2.memory / "user.scope" / "weighin-parent"
    refuse_root(v2)
    put, started = v2.put, [1001, 1002]

    def fork(pid: int, target: Path) -> None:
        if target == leaf and started:
            put(started.pop(), group)
        put(pid, target)

    monkeypatch.setattr(v2, "put", fork)
    assert cgroup.groups_root() == group
    assert len((leaf / "cgroup.procs").read_text().split()) == 3


def test_a_process_that_ends_before_it_is_moved_does_not_keep_the_others(v2: Kernel) -> None:
    group, leaf = scope(v2, pid=1001), v2.memory / "user.scope" / "weighin-parent"
    v2.put(os.getpid(), group)
    v2.ended = {1001}
    refuse_root(v2)
    assert cgroup.groups_root() == group
    assert (leaf / "cgroup.procs").read_text().split() == [str(os.getpid())]


def test_a_group_whose_processes_fork_again_and_again_is_no_root(
    v2: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = scope(v2)
    refuse_root(v2)
    put, numbers = v2.put, count(1001)

    def fork(pid: int, target: Path) -> None:
        put(pid, target)
        if target.name == "weighin-parent":
            put(next(numbers), group)

    monkeypatch.setattr(v2, "put", fork)
    assert cgroup.groups_root() is None


def test_a_leaf_into_which_nothing_can_be_moved_does_not_stay(v2: Kernel) -> None:
    group = scope(v2)
    refuse_root(v2)
    v2.refused.add(group / "weighin-parent" / "cgroup.procs")
    assert cgroup.groups_root() is None
    assert not (group / "weighin-parent").exists()


def test_a_scope_without_the_memory_controller_is_no_root(v2: Kernel) -> None:
    with ((group := scope(v2)) / "cgroup.controllers").open("w") as file:
        file.write("pids")
    refuse_root(v2)
    assert cgroup.groups_root() is None
    assert (group / "cgroup.procs").read_text().split() == [str(os.getpid())]


def test_processes_that_an_earlier_run_moved_stay_where_they_are(v2: Kernel) -> None:
    group = scope(v2)
    (leaf := group / "weighin-parent").mkdir()
    v2.put(1001, leaf)
    v2.busy.add(leaf)
    with (group / "cgroup.controllers").open("w") as file:
        file.write("pids")
    refuse_root(v2)
    assert cgroup.groups_root() is None
    assert (leaf / "cgroup.procs").read_text().split() == ["1001"]
    assert (group / "cgroup.procs").read_text().split() == [str(os.getpid())]


def test_root_outside_of_a_container_takes_the_root_although_it_has_a_group(v2: Kernel) -> None:
    scope(v2)
    assert cgroup.groups_root() == v2.memory


def test_in_a_container_without_a_namespace_the_cells_stay_in_its_group(v2: Kernel) -> None:
    v2.put(1, group := scope(v2))  # the first process of this machine is in the same group
    assert cgroup.groups_root() == group


def test_a_group_around_this_process_whose_limit_is_known_holds_the_cells(v2: Kernel) -> None:
    (v2.memory / "cgroup.subtree_control").write_text("+memory")
    group = scope(v2)
    cgroup.limit(group, 64 * MIB)
    assert cgroup.groups_root() == group


def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(environment, "free_ram_bytes", lambda: 10 * GIB)


def test_the_ram_of_cells_is_that_of_the_machine(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    assert cgroup.ram_bytes() == (64 * GIB, 10 * GIB)


def test_a_limit_around_the_cells_takes_from_their_ram_but_not_from_a_containers(
    v2: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    (v2.memory / "cgroup.subtree_control").write_text("+memory")
    group = scope(v2)
    cgroup.limit(group, 4 * GIB)
    (group / "memory.current").write_text(str(3 * GIB))
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert cgroup.ram_bytes() == (4 * GIB, 2 * GIB)
    assert cgroup.ram_bytes("docker") == (64 * GIB, 10 * GIB)
    (group / "memory.max").write_text(str(32 * GIB))
    assert cgroup.ram_bytes() == (32 * GIB, 10 * GIB)


@pytest.fixture
def entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command in whose scope weighin goes on; a user manager of systemd is there."""
    command: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda _, words: command.extend(words))
    run = subprocess.run
    monkeypatch.setattr("subprocess.run", lambda words, **how: run(words[-1:], **how))
    monkeypatch.setenv("WEIGHIN_DELEGATED", "")  # so that it is restored
    monkeypatch.delenv("WEIGHIN_DELEGATED")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    (tmp_path / "run" / "systemd" / "private").mkdir(parents=True)
    return command


@pytest.mark.parametrize("kernel", ["v1", "v2"], indirect=True)
@pytest.mark.parametrize("lacks", ["", "systemd-run", "manager", "scope", "entry", "consent"])
def test_a_user_on_v2_goes_on_in_a_delegated_scope(
    kernel: Kernel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entered: list[str],
    lacks: str,
) -> None:
    refuse_root(kernel)
    monkeypatch.setattr("shutil.which", lambda name: None if name == lacks else f"/bin/{name}")
    if lacks == "manager":
        (tmp_path / "run" / "systemd" / "private").rmdir()
    if lacks == "entry":  # the folder is another user's, as after su
        kernel.refused.add(tmp_path / "run" / "systemd" / "private")
    if lacks == "scope":
        monkeypatch.setenv("WEIGHIN_DELEGATED", "1")  # this process is in one already
    if lacks == "consent":
        monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess((), 1))
    cgroup.enter_scope(["bench", "gpt2-tiny"])
    assert bool(entered) == (kernel.memory == kernel.unified and not lacks)
    if entered:
        before, after = entered[: entered.index("--")], entered[entered.index("--") + 1 :]
        assert before[0] == "systemd-run"
        assert {"--user", "--scope", "Delegate=yes"} <= set(before)
        assert after[-4:] == ["-m", "weighin", "bench", "gpt2-tiny"]
        assert os.environ["WEIGHIN_DELEGATED"] == "1"


def test_a_user_who_may_make_groups_needs_no_scope(v2: Kernel, entered: list[str]) -> None:
    assert v2.memory
    cgroup.enter_scope(["bench"])
    assert entered == []


@pytest.mark.parametrize("kernel", ["v1", "hybrid"], indirect=True)
def test_the_ram_of_cells_outside_of_the_limit_around_this_process_is_the_machines(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    (own := kernel.memory / "own").mkdir()
    kernel.put(os.getpid(), own)
    cgroup.limit(own, GIB)
    assert cgroup.ram_bytes() == (64 * GIB, 10 * GIB)


@pytest.mark.parametrize("kernel", ["v1", "hybrid"], indirect=True)
def test_without_groups_for_cells_the_limit_around_this_process_holds_for_them(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    (own := kernel.memory / "own").mkdir()
    kernel.put(os.getpid(), own)
    cgroup.limit(own, 4 * GIB)
    (own / "memory.usage_in_bytes").write_text(str(GIB))
    refuse_root(kernel)
    assert cgroup.ram_bytes("process") == (4 * GIB, 3 * GIB)
