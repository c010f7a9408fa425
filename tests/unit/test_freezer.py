"""The files that freeze a group, of both versions."""

from pathlib import Path

import pytest

from weighin.probes.freezer import Freezer


@pytest.mark.parametrize(
    ("control", "thawed", "status", "frozen"),
    [
        ("cgroup.freeze", "0", "cgroup.events", "populated 1\nfrozen 1\n"),
        ("freezer.state", "THAWED", "freezer.state", "FROZEN"),
    ],
)
def test_each_version_has_its_words(
    tmp_path: Path, control: str, thawed: str, status: str, frozen: str
) -> None:
    (tmp_path / control).write_text(thawed)
    (tmp_path / status).write_text(frozen)
    freezer = Freezer([tmp_path / "without", tmp_path])
    assert freezer.works
    with freezer.frozen() as is_frozen:
        assert is_frozen
        assert (tmp_path / control).read_text() in ("1", "FROZEN")
    assert (tmp_path / control).read_text() == thawed


def test_what_does_not_freeze_in_time_is_thawed_too(tmp_path: Path) -> None:
    (tmp_path / "cgroup.freeze").write_text("0")
    (tmp_path / "cgroup.events").write_text("frozen 0\n")
    with Freezer([tmp_path]).frozen() as is_frozen:
        assert not is_frozen
    assert (tmp_path / "cgroup.freeze").read_text() == "0"


def test_a_cell_without_a_freezer_is_not_stopped(tmp_path: Path) -> None:
    freezer = Freezer([tmp_path])
    assert not freezer.works
    with freezer.frozen() as is_frozen:
        assert not is_frozen
