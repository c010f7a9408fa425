"""Which isolation is taken, and what is said about it, whatever this machine has."""

from collections.abc import Callable

import pytest

from weighin.errors import IsolationUnavailable, UnknownName
from weighin.isolation import select
from weighin.isolation.docker import DockerIsolation
from weighin.isolation.process import CgroupIsolation, ProcessIsolation

KINDS = {"docker": DockerIsolation, "cgroup": CgroupIsolation, "process": ProcessIsolation}
MISSING = {
    "docker": IsolationUnavailable("no engine answers", "start one"),
    "cgroup": IsolationUnavailable("this user may make no group", "run as root"),
    "process": IsolationUnavailable("there is no /proc", "run on Linux"),
}

WITHOUT_LIMIT = (
    "without a RAM limit, these work: weighin recommend, predict, and bench without --ram"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Make a machine on which only these isolations work; returns the list of those tried."""

    def make(*working: str) -> list[str]:
        tried: list[str] = []
        for name, kind in KINDS.items():

            def check(self: object, name: str = name) -> None:
                tried.append(name)
                if name not in working:
                    raise MISSING[name]

            monkeypatch.setattr(kind, "check", check)
        return tried

    return make


@pytest.mark.parametrize(
    ("working", "limited", "chosen", "note", "tried"),
    [
        (("docker", "cgroup", "process"), True, "docker", "", ["docker"]),
        (("docker", "cgroup", "process"), False, "docker", "", ["docker"]),
        (
            ("cgroup", "process"),
            True,
            "cgroup",
            "isolation cgroup: no engine answers",
            ["docker", "cgroup"],
        ),
        (
            ("process",),
            False,
            "process",
            "isolation process: no engine answers; this user may make no group",
            ["docker", "cgroup", "process"],
        ),
    ],
)
def test_auto_takes_the_first_that_works_and_says_why(
    machine: Callable[..., list[str]],
    working: tuple[str, ...],
    limited: bool,
    chosen: str,
    note: str,
    tried: list[str],
) -> None:
    order = machine(*working)
    isolation, why = select.choose("auto", limited=limited)
    assert (isolation.name, why, order) == (chosen, note, tried)


def test_auto_never_takes_a_plain_process_for_a_limit(machine: Callable[..., list[str]]) -> None:
    tried = machine("process")
    with pytest.raises(IsolationUnavailable) as caught:
        select.choose("auto", limited=True)
    assert str(caught.value) == (
        "no isolation can enforce a RAM limit here: no engine answers; this user may make no"
        " group\nrun as root, or start one; without a RAM limit, these work: weighin recommend, predict, and"
        " bench without --ram"
    )
    assert tried == ["docker", "cgroup"]


def test_a_machine_on_which_nothing_works(machine: Callable[..., list[str]]) -> None:
    machine()
    with pytest.raises(IsolationUnavailable) as caught:
        select.choose("auto", limited=False)
    assert str(caught.value) == (
        "no isolation works here: no engine answers; this user may make no group;"
        " there is no /proc\n"
        "run on Linux, or run as root, or start one"
    )


NODES = {
    "big": {"docker": "no engine answers", "cgroup": "", "process": ""},
    "small": {"docker": "", "cgroup": "no permission", "process": ""},
}


def test_auto_takes_what_works_on_every_node(machine: Callable[..., list[str]]) -> None:
    tried = machine()
    isolation, note = select.choose("auto", limited=False, nodes=NODES)
    assert isolation.name == "process"
    assert note == (
        "isolation process: docker on big: no engine answers; cgroup on small: no permission"
    )
    assert tried == []  # this machine measures nothing
    with pytest.raises(IsolationUnavailable) as caught:
        select.choose("auto", limited=True, nodes=NODES)
    assert str(caught.value) == (
        "no isolation can enforce a RAM limit on every node: docker on big: no engine answers;"
        " cgroup on small: no permission\nfind the fault (weighin doctor, on that node); without a RAM"
        " limit, these work: weighin recommend, predict, and bench without --ram"
    )


def test_an_isolation_that_was_named_needs_one_node(machine: Callable[..., list[str]]) -> None:
    machine()
    isolation, note = select.choose("cgroup", limited=True, nodes=NODES)
    assert isolation.name == "cgroup"
    assert note == "isolation cgroup: cgroup on small: no permission"
    with pytest.raises(IsolationUnavailable) as caught:
        select.choose("cgroup", limited=True, nodes={"small": NODES["small"]})
    assert str(caught.value).startswith("cgroup on small: no permission\nfind the fault")


@pytest.mark.parametrize("name", select.NAMES)
def test_one_that_was_named_is_checked_and_needs_no_note(
    machine: Callable[..., list[str]], name: str
) -> None:
    tried = machine(name)
    isolation, note = select.choose(name, limited=False)
    assert (isolation.name, note, tried) == (name, "", [name])


@pytest.mark.parametrize("name", select.NAMES)
def test_one_that_was_named_and_is_missing_is_never_replaced(
    machine: Callable[..., list[str]], name: str
) -> None:
    machine()
    with pytest.raises(IsolationUnavailable) as caught:
        select.choose(name, limited=False)
    assert str(caught.value) == f"{MISSING[name]}, or use --isolation auto"


def test_a_limit_that_cannot_be_held_says_what_works_without_one(
    machine: Callable[..., list[str]],
) -> None:
    machine("process")
    with pytest.raises(IsolationUnavailable) as caught:
        select.choose("docker", limited=True)
    assert str(caught.value) == (
        f"no engine answers\nstart one, or use --isolation auto; {WITHOUT_LIMIT}"
    )


def test_a_plain_process_refuses_a_limit(machine: Callable[..., list[str]]) -> None:
    machine("cgroup", "process")
    with pytest.raises(IsolationUnavailable) as caught:
        select.choose("process", limited=True)
    assert str(caught.value) == (
        "--isolation process cannot enforce a RAM limit\nuse --isolation auto; without a RAM"
        " limit, these work: weighin recommend, predict, and bench without --ram"
    )


def test_an_unknown_isolation_gets_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        select.named("cgruop")
    assert str(caught.value) == (
        "no isolation is called 'cgruop'\n"
        "did you mean 'cgroup'? known: auto, cgroup, docker, process"
    )


@pytest.mark.parametrize("name", select.NAMES)
def test_each_name_is_its_isolations_own(name: str) -> None:
    isolation = select.named(name)
    assert isinstance(isolation, KINDS[name])
    assert isolation.name == name
    assert isolation.limits == (name != "process")
