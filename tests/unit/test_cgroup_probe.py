"""The kernel's texts, as they were recorded (fixtures/kernel/README.md)."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from snapshots import Compare

from weighin.phase_reporter import parse_faults, parse_status
from weighin.probes import cgroup, environment
from weighin.probes.process import memory_of
from weighin.result import Memory

KERNEL = Path(__file__).parent / "fixtures" / "kernel"
V1 = ("hybrid-6.18", "hybrid-5.10-without-psi", "v1-6.1")
V2 = ("v2-5.10", "v2-6.1", "v2-6.1-without-psi", "v2-6.12", "v2-6.18")
GROUPS = Path("/sys/fs/cgroup")


def text(kernel: str, name: str) -> str:
    return (KERNEL / kernel / name).read_text()


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(cgroup, "MOUNTS", table)
    return table


@pytest.mark.parametrize("kernel", [*V1, *V2])
def test_what_is_read_of_a_kernels_texts(
    kernel: str, mounts: Path, monkeypatch: pytest.MonkeyPatch, same: Compare
) -> None:
    mounts.write_text(text(kernel, "mountinfo"))
    monkeypatch.setattr(cgroup, "read_text", lambda path: text(kernel, Path(path).name))
    assert "(odd ) ( name)" in text(kernel, "stat")
    told: dict[str, Any] = {
        **parse_status(text(kernel, "status")),
        "status of a zombie": parse_status(text(kernel, "status-zombie")),
        "minor and major faults": parse_faults(text(kernel, "stat")),
        "start": cgroup.start_time(7),
        "groups of a process": [cgroup._group_of(7, version) for version in (1, 2)],
        "hierarchy of pressure": cgroup.pressure_hierarchy(),
    }
    if kernel in V1:  # on v2, the controllers of this machine decide
        told["hierarchy of memory"] = cgroup.memory_hierarchy()
    same(f"kernels/{kernel}.txt", "".join(f"{name}: {value}\n" for name, value in told.items()))


def test_the_memory_of_a_process_without_swap() -> None:
    sizes = {"VmRSS": 6, "RssAnon": 1, "RssFile": 2, "RssShmem": 3}
    assert memory_of(sizes) == Memory(6, 1, 2, 3, swap_bytes=0)
    assert memory_of(sizes | {"VmSwap": 4}) == Memory(6, 1, 2, 3, swap_bytes=4)


def test_faults_of_this_process_are_the_kernels_count() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    minor, major = parse_faults(Path("/proc/self/stat").read_text())
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert before.ru_minflt <= minor <= after.ru_minflt
    assert before.ru_majflt <= major <= after.ru_majflt


def test_a_process_that_is_gone_has_no_groups_and_no_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cgroup.memory_cgroup_of(process.pid) is None
    assert cgroup.pressure_file_of(process.pid) is None
    assert cgroup.start_time(process.pid) is None


def test_a_process_is_named_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cgroup.LOCK_VARIABLE, raising=False)
    pid, ticks, namespace = cgroup.this_process().split("-")
    assert not cgroup.is_left_behind(f"{pid}-{ticks}-{namespace}.0")
    later = int(ticks) + 1
    assert cgroup.is_left_behind(f"{pid}-{later}-{namespace}.0")  # another with the same pid
    assert not cgroup.is_left_behind(f"{pid}-{later}-{int(namespace) + 1}.0")  # not to be seen here
    for odd in ("somebody", "", "-1", "\u00b2-1-2", "1" * 5000, f"{pid}-1", f"{pid}-1-x"):
        assert not cgroup.is_left_behind(f"{odd}.3"), odd


def test_a_lock_tells_its_own_leftovers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cgroup.LOCK_VARIABLE, "/run/a.lock")
    name = cgroup.owned_name(3)
    pid, _, rest = name.split("-", 2)
    ended = f"{pid}-1-{rest}"  # the pid belongs to another process now
    assert cgroup.is_left_behind(ended)
    assert not cgroup.is_left_behind(name)
    monkeypatch.setenv(cgroup.LOCK_VARIABLE, "/run/b.lock")
    assert not cgroup.is_left_behind(ended)
    monkeypatch.delenv(cgroup.LOCK_VARIABLE)
    assert cgroup.is_left_behind(ended)
    assert not cgroup.is_left_behind(name)
    assert cgroup.is_left_behind(f"{pid}-1-{rest.partition('.')[0]}.3")


@pytest.mark.parametrize(
    "table",
    [
        "22 27 0:21 / /proc rw - proc proc rw\n",
        # A v1 controller whose name only contains memory is another.
        "35 31 0:32 / /sys/fs/cgroup/x rw - cgroup cgroup rw,name=memory\n",
    ],
    ids=["none", "another controller"],
)
def test_a_machine_without_hierarchies(mounts: Path, table: str) -> None:
    mounts.write_text(table)
    assert (cgroup.memory_hierarchy(), cgroup.pressure_hierarchy()) == (None, None)


@pytest.mark.parametrize(
    "name",
    [b"/mnt/caf\xe9", "/mnt/line\u2028end".encode(), "/mnt/no\u00a0break".encode(), b"/a\x0bb"],
    ids=["no UTF-8", "line end", "no break", "vertical tab"],
)
def test_a_mount_point_of_any_bytes_ends_nothing(name: bytes, mounts: Path) -> None:
    mounts.write_bytes(
        b"24 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"25 1 8:1 / " + name + b" rw - ext4 /dev/sda1 rw\n"
        b"26 1 0:24 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        b"27 1 0:25 / " + name + b"/unified rw - cgroup2 cgroup2 rw\n"
    )
    assert environment.file_system_of(mounts.parent) == "ext4"
    assert cgroup.memory_hierarchy() == (1, GROUPS / "memory")
    assert cgroup.pressure_hierarchy() == Path(os.fsdecode(name)) / "unified"


def test_a_group_that_v1s_controllers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "read_text", lambda path: "4:cpu,memory:/a:b\n0::/c\n")
    assert [cgroup._group_of(7, version) for version in (1, 2)] == ["/a:b", "/c"]


@pytest.fixture
def tree(tmp_path: Path, mounts: Path) -> Path:
    """A v2 tree of plain files that the kernel is said to have mounted."""
    mounts.write_text(f"31 23 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    return tmp_path


def test_the_v2_hierarchy_counts_memory_only_with_the_memory_controller(tree: Path) -> None:
    assert cgroup.memory_hierarchy() == (2, tree)
    assert cgroup.pressure_hierarchy() == tree
    (tree / "cgroup.controllers").write_text("cpu io pids\n")
    assert cgroup.memory_hierarchy() is None
    assert cgroup.memory_cgroup_of(os.getpid()) is None


def test_the_folder_and_psi_of_a_process(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_group_of", lambda pid, version: "/cell")
    assert cgroup.memory_cgroup_of(1) is None  # named, but not to be seen from here
    (tree / "cell").mkdir()
    assert cgroup.memory_cgroup_of(1) == tree / "cell"
    assert cgroup.pressure_file_of(1) is None  # PSI is off
    for folder in (tree, tree / "cell"):
        (folder / "memory.pressure").touch()
    assert cgroup.pressure_file_of(1) == tree / "cell" / "memory.pressure"
    monkeypatch.setattr(cgroup, "_group_of", lambda pid, version: "/")
    assert cgroup.pressure_file_of(1) is None  # the root group's PSI is nobody's


@pytest.mark.parametrize(
    ("root", "group", "folder"),
    [
        ("/docker/0a1b", "/docker/0a1b", "."),  # in a container: its own group is all that it sees
        ("/docker/0a1b", "/docker/0a1b/below", "below"),
        ("/docker/0a1b", "/docker/0a1bc", "docker/0a1bc"),  # another that only begins so
        ("/", "/docker/0a1b", "docker/0a1b"),
        ("/", "/", "."),
    ],
)
def test_the_folder_where_only_a_part_of_the_hierarchy_is_mounted(
    tree: Path, monkeypatch: pytest.MonkeyPatch, root: str, group: str, folder: str
) -> None:
    (tree / "mountinfo").write_text(f"31 23 0:28 {root} {tree} ro - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(cgroup, "_group_of", lambda pid, version: group)
    (tree / folder).mkdir(parents=True, exist_ok=True)
    assert cgroup.memory_cgroup_of(1) == tree / folder
