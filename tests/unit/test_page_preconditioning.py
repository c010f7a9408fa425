"""Memory that is touched before a load, so that the load does not wait for a host to give it."""

import ctypes
from pathlib import Path

import pytest
from again import tried_again

from weighin.probes import environment
from weighin.probes.process import read_status
from weighin.run import loads
from weighin.units import MIB

pytestmark = pytest.mark.usefixtures("no_garbage")


def test_memory_is_held_until_the_end_of_the_block() -> None:
    before = read_status()["VmRSS"]
    with loads.held(64 * MIB) as held_bytes:
        assert held_bytes == 64 * MIB
        assert read_status()["VmRSS"] > before + 63 * MIB  # the kernel counts in batches
    assert read_status()["VmRSS"] < before + 8 * MIB


@pytest.mark.parametrize(
    ("free", "wanted", "spare", "held"),
    [(10, 64, 0, 8), (20, 64, 10, 8), (20, 64, 30, 0), (20, 0, 0, 0)],
    ids=["a full machine", "others need some", "others need all", "nothing"],
)
def test_no_more_is_touched_than_the_machine_can_spare(
    monkeypatch: pytest.MonkeyPatch, free: int, wanted: int, spare: int, held: int
) -> None:
    monkeypatch.setattr(environment, "free_ram_bytes", lambda: free * MIB)
    with loads.held(wanted * MIB, spare_bytes=spare * MIB) as held_bytes:
        assert held_bytes == held * MIB


@tried_again("memory may be fragmented")
def test_memory_is_held_in_huge_pages_as_loads_take_them() -> None:
    """A host gives a guest 4 KiB pages that it never took, but not the huge pages that the load will take."""
    text = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not text.exists() or "[never]" in text.read_text():
        pytest.skip("this kernel has no transparent huge pages")
    defrag = text.with_name("defrag").read_text()
    if "[never]" in defrag or "[defer]" in defrag:
        pytest.skip("this kernel makes no huge page at a page fault")
    with loads.held(64 * MIB):
        rollup = Path("/proc/self/smaps_rollup").read_text()
    huge = next(line for line in rollup.splitlines() if line.startswith("AnonHugePages:"))
    assert int(huge.split()[1]) * 1024 >= 32 * MIB


def test_ctrl_c_while_memory_is_touched_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ctypes, "memset", interrupt)
    with pytest.raises(KeyboardInterrupt), loads.held(MIB):
        pass
