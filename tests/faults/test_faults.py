"""A few faults end as they must, and the judge sees what is wrong; ``make faults`` tries them all."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from campaign import Campaign, missing
from faults import Fault, every

FAULTS = {one.name: one for one in every()}
SAMPLE = (
    "ends with status 0 (process)",
    "check: records are a list",
    "suite: the YAML is an object of Python",
)


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weighin-test-") as name:
        started = Campaign(Path(name))
        (started.folder / "tmp").mkdir()
        started.start()
        yield started


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_ends_as_it_must_and_leaves_nothing(name: str, campaign: Campaign) -> None:
    fault = FAULTS[name]
    if reason := missing(fault):
        pytest.skip(reason)
    tried = campaign.tried(fault)
    assert tried.right, tried


def test_the_judge_finds_what_is_wrong_lost_and_left(campaign: Campaign) -> None:
    def leave(folder: Path) -> None:
        (folder / "tmp/left").touch()
        (folder / "RAN").touch()

    lie = Fault(
        *("a lie", "The judge", ("list",)),
        code="7",
        says="never said",
        outcomes={"streaming": ("ok", "")},
        prepare=leave,
        absent=("RAN",),
        present=("NEVER RAN",),
    )
    tried = campaign.tried(lie)
    assert tried.wrong == (
        "exit code 0",
        "does not say 'never said'",
        "RAN is there",
        "no NEVER RAN",
    )
    assert (tried.lost, tried.left) == (1, ("file left",))
    assert not tried.right
    honest = replace(lie, code="0", says="", outcomes={}, present=(), prepare=lambda _: None)
    assert campaign.tried(honest).right
