"""What weighin says on a real kernel that has cgroup v2 and nothing else, as Debian ships it.

The machine boots once for all of these tests; each of them reads what its steps left.
"""

import json
import re
from math import inf
from typing import Any

import pytest
from machine import NIGHTLY_STEPS, ROOT, STEPS, Ended
from nightly import nightly

from weighin.units import MIB

pytestmark = pytest.mark.vm

GROW = ROOT / "tests" / "vm" / "grow.py"
TAKEN = '    held = list(map(b"".join, repeat([b"1" * 1024] * 1024, 400)))  # TAKEN'
SPENT = 64 * MIB
"""The memory that the C program ``spend 48 20 16`` takes."""


def records(machine: Ended, run: str = "run") -> list[dict[str, Any]]:
    """Return the records of a run, those with the smallest limit first.

    The run of a bench has two: of the limit below the floor, and of the one above it.
    """
    text = (machine.folder / run / "records.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return sorted(found, key=lambda record: record["cell"]["ram_limit_bytes"] or inf)


@pytest.mark.parametrize("step", [*STEPS, *nightly(*NIGHTLY_STEPS)])
def test_every_step_ends_well(machine: Ended, step: str) -> None:
    assert machine.status(step) == 0, machine.console


def test_it_is_debians_kernel_with_the_unified_hierarchy_alone(machine: Ended) -> None:
    text = machine.out("kernel")
    assert "cloud-amd64" in text
    assert "cgroup2 /sys/fs/cgroup cgroup2" in text
    assert not re.search(r"^cgroup ", text, re.MULTILINE)


@pytest.mark.nightly
def test_the_doctor_proves_a_limit_and_says_which_figures_there_are(machine: Ended) -> None:
    lines = [" ".join(line.split()) for line in machine.out("doctor").splitlines()]
    whole = "exact for the whole cell, not for a phase: resetting memory.peak needs Linux 6.12"
    each = "exact for each phase: memory.peak, reset at the end of each"
    for said in (
        "a probe that allocated more than 384.000 MiB was killed, cgroup peak 384.000 MiB",
        "v2 at /sys/fs/cgroup",
        each if machine.resets_peaks else whole,
        "exact: oom_kill in memory.events.local",
        "exact: workingset_refault_file in memory.stat",
        "exact: memory.pressure of the cell's cgroup",
    ):
        assert any(said in line for line in lines), machine.out("doctor")


@pytest.mark.parametrize("step", ["instrument", *nightly("loads", "amounts")])
def test_the_tests_of_the_instrument_pass_there(machine: Ended, step: str) -> None:
    said = machine.out(step).splitlines()
    assert re.fullmatch(r"(\d+ passed)(, \d+ skipped)?(, \d+ deselected)? in .*", said[-1]), said
    print(*[line for line in said if line.startswith("SKIPPED")], said[-1], sep="\n")


@pytest.mark.parametrize("run", ["floor", *nightly("run")])
def test_records_have_every_figure_of_cgroup_v2(machine: Ended, run: str) -> None:
    for record in records(machine, run):
        environment = record["environment"]
        assert (environment["cgroup_version"], environment["psi"]) == (2, True)
        limit_bytes = record["cell"]["ram_limit_bytes"]  # a search begins with a cell without one
        assert 0 < record["peaks"]["cgroup_bytes"] <= (limit_bytes or inf)
        assert record["pressure"]["some_ns"] >= record["pressure"]["full_ns"]
        assert record["faults"]["workingset_refault_file"] is not None
        assert record["limit_events"].keys() >= {"high", "max", "oom", "oom_kill"}
        killed = record["outcome"] == "oom_killed"
        assert killed == (record["oom_kills"] > 0) == (record["limit_events"]["oom_kill"] > 0)


@pytest.mark.parametrize("run", ["floor", *nightly("run")])
def test_an_ordinary_user_is_given_a_scope(machine: Ended, run: str) -> None:
    for record in records(machine, run):
        groups = record["environment"]["isolation"]["groups"]
        assert re.search(r"/user@1000\.service/.+\.scope$", groups), groups


@pytest.mark.nightly
def test_the_floor_there_is_that_of_this_machine_within_2_percent_and_16_mib(
    machine: Ended, floor_bytes: int
) -> None:
    below, above = records(machine)
    limits = [record["cell"]["ram_limit_bytes"] for record in (below, above)]
    print(f"killed at {limits[0] / MIB:g} MiB, not at {limits[1] / MIB:g} MiB")
    assert limits[0] < floor_bytes < limits[1]
    assert (below["outcome"], above["outcome"]) == ("oom_killed", "ok")


def test_a_killed_child_is_named_with_its_limit_its_line_and_its_phase(machine: Ended) -> None:
    (record,) = records(machine, "killed")
    (kill,) = record["ran"]["kills"]
    assert (record["outcome"], record["oom_kills"]) == ("oom_killed", 1)
    assert record["ran"]["survived"]
    assert (kill["limit_of"], kill["limit_bytes"], kill["is_main"]) == ("", 256 * MIB, False)
    assert kill["anon_bytes"] > 240 * MIB
    said = (machine.folder / "killed.err").read_text()
    print(
        said, *record["warnings"], f"stacks took {record['ran']['frozen_ns'] / 1e9:.1f} s", sep="\n"
    )
    assert "The kernel killed python3 (pid " in said and "its RAM limit of 256 MiB" in said
    line = 1 + GROW.read_text().splitlines().index(TAKEN)
    assert f"`grow` (grow.py:{line}) ran" in said
    (phase,) = record["phases"]
    assert phase["name"] == record["last_phase"] == "grow"
    # Linux 6.1 cannot reset the mark of a group, so that a phase has none.
    unmarked = any("needs Linux 6.12 for it" in warning for warning in record["warnings"])
    assert (phase["peak_cgroup_bytes"] is None) == unmarked == (not machine.resets_peaks)
    assert phase["peak_rss_bytes"] > 240 * MIB


def test_the_floor_of_a_command_in_an_ordinary_users_scope_is_what_it_needs(machine: Ended) -> None:
    (found,) = json.loads((machine.folder / "floor.json").read_text())["floors"]
    print(f"spend 48 20 16 lives under {found['floor_bytes'] / MIB:g} MiB")
    assert SPENT <= found["floor_bytes"] <= SPENT + 4 * MIB
    tried = records(machine, "floor")
    assert {record["outcome"] for record in tried} == {"ok", "oom_killed"}
    for record in tried:
        needed = record["ran"]["needed_bytes"]
        if record["outcome"] == "ok":
            assert needed == pytest.approx(SPENT, abs=0.01 * SPENT + MIB)


def test_the_limit_of_the_scope_around_is_named_with_its_size(machine: Ended) -> None:
    (record,) = records(machine, "outer")
    print(record["message"], record["ran"]["kills"])
    assert record["outcome"] == "oom_killed"
    assert re.search(r"the limit of 200\.000 MiB of the outer cgroup \S+\.scope", record["message"])


@pytest.mark.nightly
def test_runs_in_two_pid_namespaces_leave_each_others_live_cells_alone(machine: Ended) -> None:
    said = machine.out("namespaces")
    print(said)
    # Each group is there with its processes after a weighin of the other namespace has looked.
    owners = re.findall(r"^weighin\.\d+-\d+-(\d+)\.\d+ \d+$", said, re.MULTILINE)
    assert len(owners) == len(set(owners)) == 2
    assert "removed" not in (machine.folder / "namespaces.err").read_text()
    for run in ("first", "second", "beside-second"):
        (record,) = records(machine, run)
        assert (record["outcome"], record["message"]) == ("ok", "")
