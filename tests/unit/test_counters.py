"""The kernel's texts, recorded or as its documentation shows them (fixtures/kernel/README.md)."""

import os
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from harness import counters
from harness.counters import MemoryCgroup, PeakMark
from harness.record import Memory

KERNEL = Path(__file__).parent / "fixtures" / "kernel"
HYBRID, V2 = "v1-hybrid", ("v2-5.10", "v2-6.12")


def text(kernel: str, name: str) -> str:
    return (KERNEL / kernel / name).read_text()


def test_a_status_in_bytes() -> None:
    assert counters.parse_status(text(HYBRID, "status")) == {
        "VmHWM": 10636 * 1024,
        "VmRSS": 10636 * 1024,
        "RssAnon": 6904 * 1024,
        "RssFile": 3732 * 1024,
        "RssShmem": 0,
        "VmSwap": 0,
    }


def test_a_zombies_status_has_no_memory() -> None:
    assert counters.parse_status(text(HYBRID, "status-zombie")) == {}


def test_memory_of_a_status() -> None:
    status = counters.parse_status(text(HYBRID, "status"))
    assert counters.memory_of(status) == Memory(10636 * 1024, 6904 * 1024, 3732 * 1024, 0, 0)


def test_memory_of_a_kernel_without_swap() -> None:
    status = {"VmRSS": 3, "RssAnon": 1, "RssFile": 1, "RssShmem": 1}
    assert counters.memory_of(status) == Memory(3, 1, 1, 1, swap_bytes=0)


def test_faults_behind_a_name_with_brackets() -> None:
    assert "(odd ) ( name)" in text(HYBRID, "stat")
    assert counters.parse_faults(text(HYBRID, "stat")) == (441, 0)


def test_faults_of_this_process_are_the_kernels_count() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    minor, major = counters.parse_faults(Path("/proc/self/stat").read_text())
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert before.ru_minflt <= minor <= after.ru_minflt
    assert before.ru_majflt <= major <= after.ru_majflt


def test_mounts_of_a_hybrid_machine() -> None:
    root = Path("/sys/fs/cgroup")
    assert counters.parse_mounts(text(HYBRID, "mountinfo")) == (root / "memory", root / "unified")


@pytest.mark.parametrize("kernel", V2)
def test_mounts_of_version_2(kernel: str) -> None:
    assert counters.parse_mounts(text(kernel, "mountinfo")) == (None, Path("/sys/fs/cgroup"))


def test_mounts_without_cgroups() -> None:
    assert counters.parse_mounts("22 27 0:21 / /proc rw - proc proc rw\n") == (None, None)


def test_a_v1_controller_whose_name_only_contains_memory_is_another() -> None:
    line = "35 31 0:32 / /sys/fs/cgroup/x rw - cgroup cgroup rw,name=memory\n"
    assert counters.parse_mounts(line) == (None, None)


def test_groups_of_a_process_on_a_hybrid_machine() -> None:
    lines = text(HYBRID, "cgroup")
    assert counters.parse_group(lines, 1) == "/weighin.1234-5678.0"
    assert counters.parse_group(lines, 2) == "/weighin.1234-5678.0"


def test_the_v1_group_may_share_its_line_with_other_controllers() -> None:
    assert counters.parse_group("4:cpu,memory:/a:b\n0::/c\n", 1) == "/a:b"


@pytest.mark.parametrize("kernel", V2)
def test_the_group_of_a_process_on_version_2(kernel: str) -> None:
    assert counters.parse_group(text(kernel, "cgroup"), 2) == "/system.slice/weighin.1234-5678.0"
    assert counters.parse_group(text(kernel, "cgroup"), 1) is None


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A v2 tree of plain files that the kernel is said to have mounted."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"31 23 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(counters, "_MOUNTS", mounts)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    return tmp_path


def test_the_v2_hierarchy_where_it_has_the_memory_controller(tree: Path) -> None:
    assert counters.memory_hierarchy() == (2, tree)
    assert counters.pressure_hierarchy() == tree


def test_no_hierarchy_where_v2_lacks_the_memory_controller(tree: Path) -> None:
    (tree / "cgroup.controllers").write_text("cpu io pids\n")
    assert counters.memory_hierarchy() is None
    assert counters.memory_cgroup_of(os.getpid()) is None


def test_the_folder_and_the_psi_file_of_a_process(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_group_of", lambda pid, version: "/cell")
    assert counters.memory_cgroup_of(1) is None  # named, but not to be seen from here
    (tree / "cell").mkdir()
    assert counters.memory_cgroup_of(1) == tree / "cell"
    assert counters.pressure_file_of(1) is None  # PSI is off
    (tree / "cell" / "memory.pressure").touch()
    assert counters.pressure_file_of(1) == tree / "cell" / "memory.pressure"


def test_the_root_groups_psi_is_nobodys(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "memory.pressure").touch()
    monkeypatch.setattr(counters, "_group_of", lambda pid, version: "/")
    assert counters.pressure_file_of(1) is None


def test_a_process_that_is_gone_has_no_groups_and_no_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert counters.memory_cgroup_of(process.pid) is None
    assert counters.pressure_file_of(process.pid) is None
    assert counters.start_time(process.pid) is None


def test_a_process_is_named_for_good() -> None:
    name = counters.this_process()
    assert counters.is_alive(name)
    pid, ticks = name.split("-")
    assert not counters.is_alive(f"{pid}-{int(ticks) + 1}")  # another that got the same pid
    assert not counters.is_alive(f"{pid}-None")
    assert not counters.is_alive("somebody")


def test_the_start_of_a_process_whose_name_has_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = text(HYBRID, "stat")
    monkeypatch.setattr(Path, "read_text", lambda path: stat)
    assert counters.start_time(28737) == 320618


def make_group(folder: Path, kernel: str) -> MemoryCgroup:
    """A folder with the files of a memory cgroup of this kernel; its numbers are 1, 2 and 3."""
    v1 = kernel == HYBRID
    names = {
        "memory.usage_in_bytes" if v1 else "memory.current": "1\n",
        "memory.limit_in_bytes" if v1 else "memory.max": "3\n",
        "memory.stat": text(kernel, "memory.stat"),
    }
    if kernel != "v2-5.10":  # memory.peak came with Linux 5.19
        names["memory.max_usage_in_bytes" if v1 else "memory.peak"] = "2\n"
    oom = "memory.oom_control" if v1 else "memory.events.local"
    for name, content in (names | {oom: text(kernel, oom)}).items():
        (folder / name).write_text(content)
    (folder / "psi").write_text(text(kernel, "memory.pressure"))
    return MemoryCgroup(folder, folder / "psi")


@pytest.mark.parametrize(
    ("kernel", "version", "refaults", "pressure_ns", "peak"),
    [
        ("v1-hybrid", 1, 0, (676_000, 676_000), 2),
        ("v2-5.10", 2, 3072, (2_400_871_000, 1_311_020_000), None),
        ("v2-6.12", 2, 3072, (2_400_871_000, 1_311_020_000), 2),
    ],
)
def test_the_figures_of_a_group(
    tmp_path: Path,
    kernel: str,
    version: int,
    refaults: int,
    pressure_ns: tuple[int, int],
    peak: int | None,
) -> None:
    group = make_group(tmp_path, kernel)
    assert group.version == version
    assert group.read_usage() == 1
    assert group.read_oom_kills() == 1
    assert group.read_refaults() == refaults
    assert group.read_pressure_ns() == pressure_ns
    with closing(PeakMark(group)) as mark:
        assert mark.read() == peak
        assert mark.resets == (peak is not None)


@pytest.mark.parametrize(("kernel", "lifted"), [("v1-hybrid", "-1"), ("v2-6.12", "max")])
def test_the_limit_is_lifted(tmp_path: Path, kernel: str, lifted: str) -> None:
    group = make_group(tmp_path, kernel)
    group.raise_limit()
    assert group.limit_path.read_text() == lifted


def test_a_group_that_is_gone_gives_none_never_zero(tmp_path: Path) -> None:
    group = MemoryCgroup(tmp_path / "gone", tmp_path / "gone" / "psi")
    assert group.read_usage() is None
    assert group.read_oom_kills() is None
    assert group.read_refaults() is None
    assert group.read_pressure_ns() == (None, None)
    group.raise_limit()
    assert MemoryCgroup(tmp_path).read_pressure_ns() == (None, None)


def test_a_kernel_without_the_refault_counter_gives_none(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("anon 1\nworkingset_refault 7\n")  # v2 before 5.9
    assert MemoryCgroup(tmp_path).read_refaults() is None


def test_pressure_of_a_kernel_that_has_no_full_line() -> None:
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total=12\n"
    assert counters.parse_pressure(line) == (12_000, None)


@pytest.mark.parametrize(("kernel", "written"), [("v1-hybrid", "0\n"), ("v2-6.12", "reset\n")])
def test_a_mark_is_reset_by_what_its_kernel_wants_written(
    tmp_path: Path, kernel: str, written: str
) -> None:
    group = make_group(tmp_path, kernel)
    with closing(PeakMark(group)) as mark:
        assert mark.reset()
    assert group.peak_path.read_text() == written


def test_a_kernel_that_refuses_the_reset_is_asked_once_only(tmp_path: Path) -> None:
    (tmp_path / "memory.peak").symlink_to("/dev/full")  # open for writing, and refuses it
    with closing(PeakMark(MemoryCgroup(tmp_path))) as mark:
        assert mark.resets
        assert not mark.reset()
        assert not mark.resets
        assert not mark.reset()


def test_no_mark_before_linux_5_19(tmp_path: Path) -> None:
    mark = PeakMark(MemoryCgroup(tmp_path))
    assert mark.read() is None
    assert not mark.reset()
    mark.close()
    mark.close()


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(30, "read-only")])
def test_a_mark_that_may_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    group, real_open = make_group(tmp_path, "v2-6.12"), os.open

    def read_only(path: Path, flags: int) -> int:
        if flags & os.O_RDWR:
            raise error
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", read_only)
    with closing(PeakMark(group)) as mark:
        assert mark.read() == 2
        assert not mark.reset()
