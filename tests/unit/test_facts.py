"""What the record of a command proves: where its memory was taken, and how large its parts were."""

from dataclasses import replace

import pytest
from command_records import made, process, samples_of, stack

from weighin.records.explanation.facts import Facts, Place
from weighin.records.explanation.frames import read_all
from weighin.result import Outcome
from weighin.units import MIB

FRAMES = ("<module> (script.py:14)", "<module> (main.py:3)")
CODE = "state = torch.load(path)"


def place(number: int, code: str, function: str = "") -> Place:
    """The place that is the frame with this number, counted from the innermost."""
    frames = tuple(read_all(FRAMES))
    return Place(stack(100, *FRAMES, code=code), frames, frames[number], function)


@pytest.mark.parametrize(
    ("found", "title"),
    [
        (place(0, CODE), f"`{CODE}` (script.py:14)"),
        (place(0, "x" * 48), f"`{'x' * 48}` (script.py:14)"),
        (place(0, "x" * 49), "script.py:14"),  # too long for a sentence
        (place(1, CODE), "main.py:3"),  # the code is that of the innermost line
        (place(1, CODE, "load"), "`load` (main.py:3)"),
    ],
)
def test_a_place_shows_its_function_or_its_short_code(found: Place, title: str) -> None:
    assert found.title == title


def test_a_command_of_which_nothing_was_seen_has_no_parts() -> None:
    result = made(Outcome.OK, needed=5 * MIB)
    assert result.ran
    facts = Facts(result, replace(result.ran, processes=()))
    assert facts.split is None
    assert (facts.anon_bytes, facts.shmem_bytes, facts.held_bytes) == (0, 0, 0)


def test_the_parts_are_those_of_the_sample_nearest_to_the_peak() -> None:
    samples = samples_of([10 * MIB, 30 * MIB, 20 * MIB], shmem=MIB)
    result = made(Outcome.OK, needed=31 * MIB)
    assert result.ran
    ran = replace(result.ran, peak_ns=samples[1].t_ns + 10)
    facts = Facts(result, ran, samples)
    assert (facts.anon_bytes, facts.shmem_bytes) == (30 * MIB, MIB)
    assert facts.held_bytes == 31 * MIB


def test_without_samples_the_parts_are_those_of_the_processes_that_were_there() -> None:
    processes = (
        process(anon=7 * MIB),
        process(pid=101, anon=2 * MIB),
        replace(process(pid=102, anon=1), anon_bytes=None),
    )
    result = made(Outcome.OK, needed=9 * MIB, processes=processes)
    assert result.ran
    facts = Facts(result, result.ran)
    assert facts.anon_bytes == 9 * MIB
    assert [each.pid for each in facts.present] == [processes[0].pid, 101]
