"""Which isolation is taken, what is said about it, and which limits it refuses, whatever this machine has."""

from pathlib import Path

import pytest
from factories import refused
from ran_commands import make_command
from snapshots import Compare, answered

from weighin.errors import IsolationUnavailable
from weighin.isolation import cgroup, select
from weighin.isolation.docker import DockerIsolation
from weighin.isolation.process import CgroupIsolation, ProcessIsolation
from weighin.isolation.select import check_limits_around
from weighin.plan import task
from weighin.probes import environment
from weighin.units import GIB, MIB

SELECTED = Path(__file__).with_name("snapshots") / "selected.txt"
KINDS = {"docker": DockerIsolation, "cgroup": CgroupIsolation, "process": ProcessIsolation}
MISSING = {
    "docker": IsolationUnavailable("no engine answers", "sudo systemctl start docker"),
    "cgroup": IsolationUnavailable("this user may make no group", "run as root"),
    "process": IsolationUnavailable("there is no /proc", "run on Linux"),
}
NODES = {
    "big": {"docker": "no engine answers", "cgroup": "", "process": ""},
    "small": {"docker": "", "cgroup": "no permission", "process": ""},
}


def selected(question: str) -> str:
    """Answer ``ISOLATION [with a limit] where ...``: the isolations that work here, or the nodes ``on`` which."""
    asked, _, where = question.partition(" where ")
    working, tried = where.split(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in KINDS.items():

            def check(_: object, name: str = name) -> None:
                tried.append(name)
                if name not in working:
                    raise MISSING[name]

            patch.setattr(kind, "check", check)
        nodes = {node: told for node, told in NODES.items() if node in working}
        name, limited = asked.split()[0], asked.endswith("with a limit")
        try:
            isolation, note = select.choose(name, limited=limited, nodes=nodes)
        except IsolationUnavailable as error:
            said = f"error {error.exit_code}: {error}"
        else:
            assert type(isolation) is KINDS[isolation.name]
            can = "can" if isolation.limits else "cannot"
            said = f"{isolation.name}, which {can} limit; note: {note or 'none'}"
    return f"{said}\ntried: {' '.join(tried) or 'none'}"


def test_the_first_isolation_that_works_is_taken_and_the_rest_is_explained(same: Compare) -> None:
    same(SELECTED.name, answered(SELECTED, selected))


def test_an_unknown_isolation_gets_the_nearest() -> None:
    assert refused(select.named, "cgruop") == (
        "no isolation is called 'cgruop'\n"
        "did you mean 'cgroup'? known: auto, cgroup, docker, process"
    )


# Limits -------------------------------------------------------------------------------------------


def test_a_limit_above_that_of_a_cgroup_around_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of the cells is below one with a limit of 2 GiB, in one with a limit of 3 GiB."""
    around = tmp_path / "outer" / "inner"
    (groups := around / "cells").mkdir(parents=True)
    (tmp_path / "outer" / "memory.max").write_text(str(3 * GIB))
    (around / "memory.max").write_text(str(2 * GIB))

    def check(*limits: int | None) -> None:
        cells = [make_command(ram_limit_bytes=limit) for limit in limits]
        check_limits_around(CgroupIsolation(), cells)

    monkeypatch.setattr(cgroup, "groups_root", lambda: groups)
    check(GIB, 2 * GIB, None)
    check()
    assert refused(check, GIB, 2 * GIB + MIB) == (
        f"--ram 2049MiB is more than the limit of the cgroup in which weighin measures, {around}"
        " (2.000 GiB)\ngive a smaller --ram, or raise the limit of that cgroup, for example the"
        " memory limit of the container"
    )
    monkeypatch.setattr(cgroup, "groups_root", lambda: None)  # where no group can be made
    check(2**60)


def test_a_limit_of_all_ram_is_accepted_and_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: GIB)
    task.check_machines([task.Demand(), task.Demand(GIB)], ())
    demands = [task.Demand(), task.Demand(GIB + MIB)]
    assert refused(task.check_machines, demands, ()) == (
        "--ram 1025MiB is more than this machine has (1.000 GiB)\n"
        "give a smaller limit, or another device or machine"
    )
