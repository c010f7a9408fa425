"""Where cells' groups can be made, and the memory that is there: on trees of every kind."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cgroup_trees import Kernel, installed

from weighin.isolation import cgroup
from weighin.probes import environment
from weighin.units import GIB, MIB

LEAF = "weighin-parent"


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


@pytest.fixture
def group(v2: Kernel) -> Path:
    """A scope of a user who may make groups there alone."""
    group = scope(v2)
    refuse_root(v2)
    return group


def members(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def enabled(group: Path) -> list[str]:
    return (group / "cgroup.subtree_control").read_text().split()


def test_root_makes_groups_in_the_root_of_the_memory_hierarchy(kernel: Kernel) -> None:
    assert cgroup.groups_root() == kernel.memory


def test_the_controller_is_enabled_for_groups_on_v2(v2: Kernel) -> None:
    cgroup.groups_root()
    assert enabled(v2.memory) == ["memory"]
    cgroup.groups_root.cache_clear()
    v2.refused.add(v2.memory / "cgroup.subtree_control")  # it is enabled: nothing is to be written
    assert cgroup.groups_root() == v2.memory


def root_has_a_scope_outside_of_a_container(kernel: Kernel) -> Path:
    scope(kernel)
    return kernel.memory


def the_first_process_is_in_the_same_group(kernel: Kernel) -> Path:
    """As in a container without a namespace."""
    kernel.put(1, group := scope(kernel))
    return group


def the_limit_around_is_known(kernel: Kernel) -> Path:
    (kernel.memory / "cgroup.subtree_control").write_text("+memory")
    group = scope(kernel)
    cgroup.limit(group, 64 * MIB)
    return group


@pytest.mark.parametrize(
    "found",
    [
        root_has_a_scope_outside_of_a_container,
        the_first_process_is_in_the_same_group,
        the_limit_around_is_known,
    ],
)
def test_cells_stay_in_their_container(v2: Kernel, found: Callable[[Kernel], Path]) -> None:
    expected = found(v2)
    assert cgroup.groups_root() == expected


def test_a_user_has_the_scope_that_was_given_and_moves_out_of_its_groups_way(group: Path) -> None:
    for _ in range(2):  # a process in the leaf finds the scope again
        assert cgroup.groups_root() == group
        assert [each.name for each in group.iterdir() if each.is_dir()] == [LEAF]
        assert members(group / LEAF) == [os.getpid()]
        assert members(group) == []
        assert enabled(group) == ["memory"]
        cgroup.groups_root.cache_clear()


@pytest.mark.parametrize("forks", [2, 1000])
def test_processes_that_start_while_others_are_moved_are_moved_too_but_not_for_ever(
    v2: Kernel, group: Path, monkeypatch: pytest.MonkeyPatch, forks: int
) -> None:
    put, started = v2.put, iter(range(1001, 1001 + forks))

    def fork(pid: int, target: Path) -> None:
        put(pid, target)
        if target == group / LEAF and (new := next(started, None)):
            put(new, group)

    monkeypatch.setattr(v2, "put", fork)
    assert cgroup.groups_root() == (group if forks == 2 else None)
    assert forks > 2 or len(members(group / LEAF)) == 3


def test_a_process_that_ends_before_it_is_moved_does_not_keep_the_others(v2: Kernel) -> None:
    group = scope(v2, pid=1001)
    v2.put(os.getpid(), group)
    v2.ended = {1001}
    refuse_root(v2)
    assert cgroup.groups_root() == group
    assert members(group / LEAF) == [os.getpid()]


def no_memory_controller(kernel: Kernel) -> None:
    kernel.mounts.write_text("")


@pytest.mark.parametrize("change", [refuse_root, no_memory_controller])
def test_a_user_without_any_folder(kernel: Kernel, change: Callable[[Kernel], None]) -> None:
    change(kernel)
    assert cgroup.groups_root() is None


def test_a_folder_whose_controller_is_on_but_in_which_this_user_makes_nothing(v2: Kernel) -> None:
    (v2.memory / "cgroup.subtree_control").write_text("+memory")
    v2.refused.add(v2.memory)
    assert cgroup.groups_root() is None


def test_a_leaf_into_which_nothing_can_be_moved_does_not_stay(v2: Kernel, group: Path) -> None:
    v2.refused.add(group / LEAF / "cgroup.procs")
    assert cgroup.groups_root() is None
    assert not (group / LEAF).exists()


@pytest.mark.parametrize("moved", [[], [1001]], ids=["no leaf", "the leaf of an earlier run"])
def test_without_the_controller_nothing_moves(v2: Kernel, group: Path, moved: list[int]) -> None:
    for pid in moved:
        (group / LEAF).mkdir()
        v2.put(pid, group / LEAF)
        v2.busy.add(group / LEAF)
    with (group / "cgroup.controllers").open("w") as file:
        file.write("pids")
    assert cgroup.groups_root() is None
    assert members(group) == [os.getpid()]
    assert not moved or members(group / LEAF) == moved


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(environment, "free_ram_bytes", lambda: 10 * GIB)


@pytest.mark.usefixtures("machine")
def test_the_ram_of_cells_is_that_of_the_machine(kernel: Kernel) -> None:
    assert cgroup.ram_bytes() == (64 * GIB, 10 * GIB)


@pytest.mark.usefixtures("machine")
def test_a_limit_around_the_cells_takes_from_their_ram_alone(v2: Kernel) -> None:
    (v2.memory / "cgroup.subtree_control").write_text("+memory")
    group = scope(v2)
    cgroup.limit(group, 4 * GIB)
    (group / "memory.current").write_text(str(3 * GIB))
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert cgroup.ram_bytes() == (4 * GIB, 2 * GIB)
    assert cgroup.ram_bytes("docker") == (64 * GIB, 10 * GIB)
    (group / "memory.max").write_text(str(32 * GIB))
    assert cgroup.ram_bytes() == (32 * GIB, 10 * GIB)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("kernel", ["v1", "hybrid"], indirect=True)
def test_on_v1_the_limit_around_weighin_is_that_of_cells_without_groups(kernel: Kernel) -> None:
    (own := kernel.memory / "own").mkdir()
    kernel.put(os.getpid(), own)
    cgroup.limit(own, 4 * GIB)
    (own / "memory.usage_in_bytes").write_text(str(GIB))
    assert cgroup.ram_bytes() == (64 * GIB, 10 * GIB)
    cgroup.groups_root.cache_clear()
    refuse_root(kernel)
    assert cgroup.ram_bytes("process") == (4 * GIB, 3 * GIB)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket of a user manager of systemd."""
    monkeypatch.setenv("WEIGHIN_DELEGATED", "")  # so that it is restored
    monkeypatch.delenv("WEIGHIN_DELEGATED")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    (socket := tmp_path / "run" / "systemd" / "private").mkdir(parents=True)
    return socket


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch, manager: Path) -> list[str]:
    """The command in whose scope weighin goes on."""
    command: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda _, words: command.extend(words))
    run = subprocess.run
    monkeypatch.setattr("subprocess.run", lambda words, **how: run(words[-1:], **how))
    return command


@pytest.mark.parametrize("kernel", ["v1", "v2"], indirect=True)
@pytest.mark.parametrize("lacks", ["", "systemd-run", "manager", "scope", "entry", "consent"])
def test_a_user_on_v2_goes_on_in_a_delegated_scope(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, manager: Path, entered: list[str], lacks: str
) -> None:
    refuse_root(kernel)
    monkeypatch.setattr("shutil.which", lambda name: None if name == lacks else f"/bin/{name}")
    if lacks == "manager":
        manager.rmdir()
    if lacks == "entry":  # the folder is another user's, as after su
        kernel.refused.add(manager)
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


@pytest.mark.usefixtures("v2")
def test_a_user_who_may_make_groups_needs_no_scope(entered: list[str]) -> None:
    cgroup.enter_scope(["bench"])
    assert entered == []
