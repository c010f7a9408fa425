import pytest

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


def test_no_more_is_touched_than_the_machine_can_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "free_ram_bytes", lambda: 10 * MIB)
    with loads.held(64 * MIB) as held_bytes:
        assert held_bytes == 8 * MIB


def test_what_others_will_need_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "free_ram_bytes", lambda: 20 * MIB)
    with loads.held(64 * MIB, spare_bytes=10 * MIB) as held_bytes:
        assert held_bytes == 8 * MIB
    with loads.held(64 * MIB, spare_bytes=30 * MIB) as held_bytes:
        assert held_bytes == 0


def test_nothing_to_touch() -> None:
    with loads.held(0) as held_bytes:
        assert held_bytes == 0
