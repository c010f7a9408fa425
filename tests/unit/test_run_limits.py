"""Limits of cells that the machine, or a cgroup around the cells, cannot hold."""

from pathlib import Path

import pytest
from ran_commands import make_command

from weighin.errors import ConfigError
from weighin.isolation import cgroup
from weighin.isolation.process import CgroupIsolation
from weighin.isolation.select import check_limits_around
from weighin.plan import task
from weighin.probes import environment
from weighin.units import GIB, MIB


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group of the cells, below one with a limit of 2 GiB, in one with a limit of 3 GiB."""
    (groups := tmp_path / "outer" / "inner" / "cells").mkdir(parents=True)
    (tmp_path / "outer" / "memory.max").write_text(str(3 * GIB))
    (tmp_path / "outer" / "inner" / "memory.max").write_text(str(2 * GIB))
    monkeypatch.setattr(cgroup, "groups_root", lambda: groups)
    return tmp_path / "outer" / "inner"


def test_a_limit_above_that_of_a_cgroup_around_is_refused(around: Path) -> None:
    limits = (GIB, 2 * GIB, None)
    check_limits_around(
        CgroupIsolation(), [make_command(ram_limit_bytes=limit) for limit in limits]
    )
    check_limits_around(CgroupIsolation(), [])
    with pytest.raises(ConfigError) as caught:
        check_limits_around(
            CgroupIsolation(),
            [make_command(ram_limit_bytes=limit) for limit in (GIB, 2 * GIB + MIB)],
        )
    assert str(caught.value) == (
        f"--ram 2049MiB is more than the limit of the cgroup in which weighin measures, {around}"
        " (2.000 GiB)\ngive a smaller --ram, or raise the limit of that cgroup, for example the"
        " memory limit of the container"
    )


def test_where_no_group_can_be_made_nothing_is_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "groups_root", lambda: None)
    check_limits_around(CgroupIsolation(), [make_command(ram_limit_bytes=2**60)])


def test_a_limit_of_all_ram_is_accepted_and_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: GIB)
    task.check_machines([task.Demand(), task.Demand(GIB)], ())
    with pytest.raises(ConfigError) as caught:
        task.check_machines([task.Demand(), task.Demand(GIB + MIB)], ())
    assert str(caught.value) == (
        "--ram 1025MiB is more than this machine has (1.000 GiB)\n"
        "give a smaller limit, or another device or machine"
    )
