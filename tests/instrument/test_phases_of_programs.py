"""Phases of a program in a real cgroup: known amounts of memory, taken by it and by its children."""

import sys
from pathlib import Path
from typing import Any

import pytest
import typed
from cells import MIB, keeps_marks_of_phases

pytestmark = pytest.mark.cgroup

PROGRAM = """
import mmap, os, subprocess, sys, weighin

def take(mib):
    area = mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE)
    for offset in range(0, mib << 20, mmap.PAGESIZE):
        area[offset] = 1
    return area

with weighin.phase("before"):
    pass
with weighin.phase("spike of 300"):
    take(300).close()
with weighin.phase("kept 200"):
    kept = take(200)
with weighin.phase("nothing"):
    pass
with weighin.phase("150 of a child"):
    if (child := os.fork()) == 0:
        with weighin.phase("child"):
            take(150)
            os._exit(0)
    os.waitpid(child, 0)
with weighin.phase("after"):
    kept.close()
"""


def measured(folder: Path, program: str, code: int = 0) -> dict[str, Any]:
    """Run a program under ``weighin run`` until it ends with ``code``, and return its record."""
    found = typed.measured(folder / "run", (sys.executable, "-c", program))
    assert found.code == code, found.said
    return found.record


def near(mib: int) -> object:
    return pytest.approx(mib * MIB, abs=(0.01 * mib + 1) * MIB)


def test_the_peaks_of_phases_are_the_amounts_that_were_taken(tmp_path: Path) -> None:
    found = measured(tmp_path, PROGRAM)
    phases, (child,) = found["phases"], found["ran"]["tracks"]
    *of_group, of_child = found["warnings"]
    assert of_child == (
        f"process {child['pid']} ended inside its phase 'child', whose peak RSS is therefore sampled"
    )
    assert (not of_group) == keeps_marks_of_phases()
    start = phases[0]["end"]["rss_bytes"]
    rises = {phase["name"]: phase["peak_rss_bytes"] - start for phase in phases}
    expected = {
        "before": near(0),
        "spike of 300": near(300),
        "kept 200": near(200),
        "nothing": near(200),
        "150 of a child": near(200),
        "after": near(200),
    }
    assert rises == expected
    if not keeps_marks_of_phases():
        assert {phase["peak_cgroup_bytes"] for phase in phases} == {None}
        return
    assert charge_rises(phases) == expected | {"150 of a child": near(350)}
    assert [phase["peak_cgroup_bytes"] for phase in child["phases"]] == [None]


def charge_rises(phases: list[dict[str, Any]]) -> dict[str, int]:
    """Return by how much the peak charge of each phase is above the charge before all."""
    start = phases[0]["end"]["cgroup_bytes"]
    return {phase["name"]: phase["peak_cgroup_bytes"] - start for phase in phases}


def test_the_peak_of_the_whole_command_is_not_lost(tmp_path: Path) -> None:
    program = PROGRAM.split('with weighin.phase("150', maxsplit=1)[0]
    before = "early = take(400); early.close()\nwith weighin.phase"
    found = measured(tmp_path, program.replace("with weighin.phase", before, 1))
    start = found["phases"][0]["end"]
    assert found["peaks"]["cgroup_bytes"] - start["cgroup_bytes"] == near(400)
    (process,) = found["ran"]["processes"]
    assert process["highest_rss_bytes"] - start["rss_bytes"] == near(400)


DIES = """
with weighin.phase("dies"):
    take(100).close()
    os.kill(os.getpid(), 9)
"""


def test_the_charge_of_a_phase_in_which_the_program_dies_is_exact_and_its_own(
    tmp_path: Path,
) -> None:
    program = PROGRAM.split('with weighin.phase("kept', maxsplit=1)[0]
    found = measured(tmp_path, program + DIES, 128 + 9)
    before, spike, died = found["phases"]
    start = before["end"]["rss_bytes"]
    assert spike["peak_rss_bytes"] - start == near(300)
    assert died["peak_rss_bytes"] - start < 110 * MIB  # it is sampled, so it may be too low
    assert found["last_phase"] == died["name"] == "dies"
    assert died["end_ns"] > died["start_ns"] >= spike["end_ns"]
    if keeps_marks_of_phases():
        assert charge_rises([before, died])["dies"] == near(100)


def test_what_runs_on_in_the_background_counts(tmp_path: Path) -> None:
    taking = f"area = bytearray(b'1') * ({60 * MIB}); import time; time.sleep(0.05)"
    shell = ("sh", "-c", '"$@" & exit 0', "sh")
    found = typed.measured(tmp_path / "run", (*shell, sys.executable, "-c", taking))
    assert (found.code, found.record["outcome"], found.record["message"]) == (0, "ok", "")
    assert found.record["peaks"]["cgroup_bytes"] > 60 * MIB


IMPOSSIBLE = """
import json, os, socket, time, weighin

with weighin.phase("good"):
    pass
begin = {"event": "begin", "name": "bad", "t_ns": 1, "id": 1, "faults": [0, 0]}
theirs = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
theirs.connect(os.environ["WEIGHIN_PHASES"])
theirs.send(json.dumps(begin | {CHANGES}).encode())
theirs.recv(1)
time.sleep(0.2)  # in which weighin samples the open phase
os._exit(0)
"""


CHANGES = [
    "'peak_rss_bytes': -1",
    "'peak_rss_bytes': 2**63",
    "'memory': dict.fromkeys(['rss_bytes', 'anon_bytes', 'file_bytes', 'shmem_bytes'], -1)",
    "'faults': [10**18, 10**18]",
]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_program_that_sends_impossible_figures_keeps_its_record(
    tmp_path: Path, changes: str
) -> None:
    found = measured(tmp_path, IMPOSSIBLE.replace("CHANGES", changes))
    assert (found["outcome"], found["message"]) == ("ok", "")
    good, *bad = found["phases"]
    assert good["name"] == "good"
    if bad:
        assert (bad[0]["minor_faults"], bad[0]["major_faults"]) == (0, 0)
    else:
        assert any("sent a message with an impossible" in one for one in found["warnings"])
