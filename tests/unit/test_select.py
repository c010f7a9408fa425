"""Which isolation is taken, what is said about it, and which limits it refuses, whatever this machine has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import refused
from ran_commands import make_command

from weighin.errors import IsolationUnavailable
from weighin.isolation import cgroup, select
from weighin.isolation.docker import DockerIsolation
from weighin.isolation.process import CgroupIsolation, ProcessIsolation
from weighin.isolation.select import check_limits_around
from weighin.plan import task
from weighin.probes import environment
from weighin.units import GIB, MIB

KINDS = {"docker": DockerIsolation, "cgroup": CgroupIsolation, "process": ProcessIsolation}
MISSING = {
    "docker": IsolationUnavailable("no engine answers", "start one"),
    "cgroup": IsolationUnavailable("this user may make no group", "run as root"),
    "process": IsolationUnavailable("there is no /proc", "run on Linux"),
}
NODES = {
    "big": {"docker": "no engine answers", "cgroup": "", "process": ""},
    "small": {"docker": "", "cgroup": "no permission", "process": ""},
}
Machine = Callable[[str], list[str]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make a machine on which only these isolations work; returns the list of those tried."""

    def make(working: str) -> list[str]:
        tried: list[str] = []
        for name, kind in KINDS.items():

            def check(self: object, name: str = name) -> None:
                tried.append(name)
                if name not in working.split():
                    raise MISSING[name]

            monkeypatch.setattr(kind, "check", check)
        return tried

    return make


@pytest.mark.parametrize(
    ("name", "working", "limited", "chosen", "note", "tried"),
    [
        ("auto", "docker cgroup process", True, "docker", "", "docker"),
        ("auto", "docker cgroup process", False, "docker", "", "docker"),
        ("auto", "cgroup process", True, "cgroup", "isolation cgroup: no engine answers", "docker cgroup"),
        ("auto", "process", False, "process", "isolation process: no engine answers; this user may make no group", "docker cgroup process"),
        ("docker", "docker", False, "docker", "", "docker"),
        ("cgroup", "cgroup", False, "cgroup", "", "cgroup"),
        ("process", "process", False, "process", "", "process"),
    ],
)  # fmt: skip
def test_the_first_that_works_is_taken_and_the_note_says_why(
    machine: Machine, name: str, working: str, limited: bool, chosen: str, note: str, tried: str
) -> None:
    order = machine(working)
    isolation, why = select.choose(name, limited=limited)
    assert (isolation.name, why, " ".join(order)) == (chosen, note, tried)
    assert isinstance(isolation, KINDS[chosen])
    assert isolation.limits == (chosen != "process")


@pytest.mark.parametrize(
    ("name", "limited", "chosen", "note"),
    [
        ("auto", False, "process", "isolation process: docker on big: no engine answers; cgroup on small: no permission"),
        ("cgroup", True, "cgroup", "isolation cgroup: cgroup on small: no permission"),  # it needs one node
    ],
)  # fmt: skip
def test_auto_takes_what_works_on_every_node(
    machine: Machine, name: str, limited: bool, chosen: str, note: str
) -> None:
    tried = machine("")
    isolation, why = select.choose(name, limited=limited, nodes=NODES)
    assert (isolation.name, why) == (chosen, note)
    assert tried == []  # this machine measures nothing


WITHOUT = "without a RAM limit, these work: weighin recommend, predict, and bench without --ram"


@pytest.mark.parametrize(
    ("name", "working", "limited", "nodes", "said"),
    [
        ("auto", "process", True, {}, f"no isolation can enforce a RAM limit here: no engine answers; this user may make no group\nrun as root, or start one; {WITHOUT}"),
        ("auto", "", False, {}, "no isolation works here: no engine answers; this user may make no group; there is no /proc\nrun on Linux, or run as root, or start one"),
        ("auto", "", True, NODES, f"no isolation can enforce a RAM limit on every node: docker on big: no engine answers; cgroup on small: no permission\nfind the fault (weighin doctor, on that node); {WITHOUT}"),
        ("docker", "process", True, {}, f"no engine answers\nstart one, or use --isolation auto; {WITHOUT}"),
        ("process", "cgroup process", True, {}, f"--isolation process cannot enforce a RAM limit\nuse --isolation auto; {WITHOUT}"),
        ("docker", "", False, {}, "no engine answers\nstart one, or use --isolation auto"),
        ("cgroup", "", False, {}, "this user may make no group\nrun as root, or use --isolation auto"),
        ("process", "", False, {}, "there is no /proc\nrun on Linux, or use --isolation auto"),
    ],
)  # fmt: skip
def test_a_limit_that_nothing_holds_and_a_missing_isolation_say_what_to_do(
    machine: Machine, name: str, working: str, limited: bool, nodes: Any, said: str
) -> None:
    tried = machine(working)
    assert refused(select.choose, name, limited=limited, nodes=nodes) == said
    assert name != "auto" or not limited or "process" not in tried  # never for a limit


def test_a_named_isolation_that_works_on_no_node_is_refused(machine: Machine) -> None:
    machine("")
    nodes = {"small": NODES["small"]}
    said = refused(select.choose, "cgroup", limited=True, nodes=nodes)
    assert said.startswith("cgroup on small: no permission\nfind the fault")


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
