"""What weighin says on a real kernel that has cgroup v2 and nothing else, as Debian ships it.

The machine boots once for all of these tests; each of them reads what its steps left.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from machine import STEPS, Ended

from weighin.units import MIB

pytestmark = pytest.mark.vm


def records(machine: Ended) -> list[dict[str, Any]]:
    """Return the records of the bench: of the limit below the floor, and of the one above it."""
    text = (machine.folder / "run" / "records.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return sorted(found, key=lambda record: record["cell"]["ram_limit_bytes"])


@pytest.mark.parametrize("step", STEPS)
def test_every_step_ends_well(machine: Ended, step: str) -> None:
    assert machine.status(step) == 0, machine.console


def test_it_is_debians_kernel_with_the_unified_hierarchy_alone(machine: Ended) -> None:
    text = machine.out("kernel")
    assert "cloud-amd64" in text
    assert "cgroup2 /sys/fs/cgroup cgroup2" in text
    assert not re.search(r"^cgroup ", text, re.MULTILINE)


def test_the_doctor_proves_a_limit_and_says_which_figures_there_are(machine: Ended) -> None:
    lines = [" ".join(line.split()) for line in machine.out("doctor").splitlines()]
    for said in (
        "a probe that allocated more than 384.000 MiB was killed, cgroup peak 384.000 MiB",
        "v2 at /sys/fs/cgroup",
        "exact for the whole cell, not for a phase: resetting memory.peak needs Linux 6.12",
        "exact: oom_kill in memory.events.local",
        "exact: workingset_refault_file in memory.stat",
        "memory.high, with --isolation cgroup",
        "exact: memory.pressure of the cell's cgroup",
    ):
        assert any(said in line for line in lines), machine.out("doctor")


def test_the_tests_of_the_instrument_pass_there(machine: Ended) -> None:
    said = machine.out("instrument").splitlines()
    assert re.fullmatch(r"(\d+ passed)(, \d+ skipped)?(, \d+ deselected)? in .*", said[-1]), said
    print(*[line for line in said if line.startswith("SKIPPED")], said[-1], sep="\n")


def test_records_have_every_figure_of_cgroup_v2(machine: Ended) -> None:
    for record in records(machine):
        environment = record["environment"]
        assert (environment["cgroup_version"], environment["psi"]) == (2, True)
        assert 0 < record["peaks"]["cgroup_bytes"] <= record["cell"]["ram_limit_bytes"]
        assert record["pressure"]["some_ns"] >= record["pressure"]["full_ns"]
        assert record["faults"]["workingset_refault_file"] is not None
        assert record["limit_events"].keys() >= {"high", "max", "oom", "oom_kill"}
        killed = record["outcome"] == "oom_killed"
        assert killed == (record["oom_kills"] > 0) == (record["limit_events"]["oom_kill"] > 0)


def test_an_ordinary_user_is_given_a_scope(machine: Ended) -> None:
    for record in records(machine):
        groups = record["environment"]["isolation"]["groups"]
        assert re.search(r"/user@1000\.service/.+\.scope$", groups), groups


def test_the_floor_there_is_that_of_this_machine_within_2_percent_and_16_mib(
    machine: Ended, floor_bytes: int
) -> None:
    below, above = records(machine)
    limits = [record["cell"]["ram_limit_bytes"] for record in (below, above)]
    print(f"killed at {limits[0] / MIB:g} MiB, not at {limits[1] / MIB:g} MiB")
    assert limits[0] < floor_bytes < limits[1]
    assert (below["outcome"], above["outcome"]) == ("oom_killed", "ok")
