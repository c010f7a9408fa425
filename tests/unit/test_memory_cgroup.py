"""A memory cgroup as a folder of files: its figures, its limit, and its high-water mark."""

import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_cgroup_probe import KERNEL, V1, V2

from weighin.probes.cgroup import Cgroup, Counters
from weighin.units import MIB


def make_group(folder: Path, kernel: str) -> Cgroup:
    """A folder with the recorded files of a memory cgroup of this kernel."""
    for file in (KERNEL / kernel).glob("memory.*"):
        shutil.copy(file, folder)
    return Cgroup(folder, folder / "memory.pressure")


@dataclass(frozen=True)
class Figures:
    """What was recorded of a group with a limit of 24 MiB, in which one process was killed."""

    usage: int
    refaults: int | None
    stalled_us: tuple[int | None, int | None]
    met_limit: int | None = None
    peak: int | None = 24 * MIB


RECORDED = {
    "v2-5.10": Figures(380928, 16434, (231256, 68078), met_limit=619, peak=None),
    "v2-6.1": Figures(417792, 16444, (361953, 361953), met_limit=619),
    "v2-6.1-without-psi": Figures(266240, 16498, (None, None), met_limit=620),
    "v2-6.12": Figures(466944, 14565, (566380, 566380), met_limit=391),
    "v2-6.18": Figures(512000, 15171, (97563, 97563), met_limit=507),
    "v1-6.1": Figures(421888, 16414, (None, None)),
    "hybrid-5.10-without-psi": Figures(393216, None, (None, None)),  # v1 counts none there
    "hybrid-6.18": Figures(425984, 16288, (36085, 36085)),
}


@pytest.mark.parametrize("kernel", [*V1, *V2])
def test_the_figures_of_a_group(tmp_path: Path, kernel: str) -> None:
    group, recorded = make_group(tmp_path, kernel), RECORDED[kernel]
    assert group.version == (2 if kernel in V2 else 1)
    assert group.read("usage") == recorded.usage
    assert int(group.file("limit").read_text()) == 24 * MIB
    with closing(group):
        now = group.counters()
        assert group.reset_peak() == (recorded.peak is not None)
    assert (now.peak_bytes, now.oom_kills) == (recorded.peak, 1)
    assert now.refaults == recorded.refaults
    expected = tuple(None if us is None else us * 1000 for us in recorded.stalled_us)
    assert (now.some_ns, now.full_ns) == expected
    events = now.limit_events
    assert (events and events["max"]) == recorded.met_limit
    assert (events and events["oom_kill"]) == (1 if kernel in V2 else None)


@pytest.mark.parametrize(("kernel", "lifted"), [("hybrid-6.18", "-1"), ("v2-6.12", "max")])
def test_the_limit_is_lifted(tmp_path: Path, kernel: str, lifted: str) -> None:
    group = make_group(tmp_path, kernel)
    for file in ("memory.high", "memory.swap.max"):  # as under a soft limit
        (tmp_path / file).write_text("0")
    group.raise_limit()
    assert group.file("limit").read_text() == lifted
    if group.version == 2:
        assert (tmp_path / "memory.high").read_text() == "max"
        assert group.file("swap").read_text() == "0"  # what thrashes must not swap instead


def test_a_group_that_is_gone_gives_none_never_zero(tmp_path: Path) -> None:
    group = Cgroup(tmp_path / "gone", tmp_path / "gone" / "psi")
    for each in (group, Cgroup(tmp_path)):
        with closing(each):
            assert each.counters() == Counters()
    group.raise_limit()


def test_a_kernel_without_the_refault_counter_gives_none(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("anon 1\nworkingset_refault 7\n")  # v2 before 5.9
    with closing(Cgroup(tmp_path)) as group:
        assert group.counters().refaults is None


@pytest.mark.parametrize(("kernel", "written"), [("hybrid-6.18", "0"), ("v2-6.12", "reset\n")])
def test_a_mark_is_reset_by_what_its_kernel_wants_written(
    tmp_path: Path, kernel: str, written: str
) -> None:
    group = make_group(tmp_path, kernel)
    with closing(group):
        assert group.reset_peak()
    # A plain file keeps what stood behind it.
    assert group.file("peak").read_text().startswith(written)


def test_no_mark_before_linux_5_19(tmp_path: Path) -> None:
    group = Cgroup(tmp_path)
    assert group.read_peak() is None
    assert not group.reset_peak()
    group.close()
    group.close()


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
    with closing(group):
        assert group.read_peak() == 24 * MIB
        assert not group.reset_peak()
