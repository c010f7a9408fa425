"""A memory cgroup as a folder of files: its figures, its limit, and its high-water mark."""

import os
from contextlib import closing
from pathlib import Path

import pytest
from test_counters import HYBRID, text

from harness import counters
from harness.counters import MemoryCgroup, PeakMark


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
