"""What a dead run left is removed, and nothing else; plain folders stand for groups."""

from pathlib import Path

import pytest

from weighin.isolation import cgroup, delegation
from weighin.isolation.cgroup import CgroupIsolation
from weighin.probes.cgroup import LOCK_VARIABLE, this_process


def test_only_groups_of_dead_owners_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_roots", lambda: [tmp_path])
    monkeypatch.delenv(LOCK_VARIABLE)
    dead, living = tmp_path / "weighin.1-1.0", tmp_path / f"weighin.{this_process()}.0"
    leaf = tmp_path / delegation.PARENT_LEAF  # an ordinary user's own process is in it
    for group in (dead, living, leaf, tmp_path / "init.scope"):
        group.mkdir()
    assert CgroupIsolation().remove_stale() == [f"cgroup {dead}"]
    assert not dead.exists()
    assert living.exists()
    assert leaf.exists()
