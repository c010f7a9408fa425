"""Phases of a program in a real cgroup: known amounts of memory, taken by it and by its children."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cells import keeps_marks_of_phases

from weighin.isolation.cgroup import temporary_group
from weighin.probes.cgroup import MemoryCgroup
from weighin.result import Phase
from weighin.run.program_phases import PhaseListener
from weighin.units import MIB

pytestmark = pytest.mark.cgroup

HARNESS = Path(__file__).resolve().parents[2] / "harness"
ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
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


@contextmanager
def measured(folder: Path, program: str) -> Iterator[tuple[PhaseListener, MemoryCgroup]]:
    """Run a program in a cgroup to its end, while a listener takes its phases."""
    with temporary_group() as group:
        cgroup = MemoryCgroup(group)
        listener = PhaseListener(folder)
        command = [sys.executable, "-c", program]
        running = subprocess.Popen(
            ["/bin/sh", "-c", ENTER, "sh", str(group), *command],
            env=os.environ | {"PYTHONPATH": str(HARNESS)} | listener.environment,
        )
        listener.watch(cgroup)
        running.wait(60)
        yield listener, cgroup
        listener.close()


def near(mib: int) -> object:
    return pytest.approx(mib * MIB, abs=(0.01 * mib + 1) * MIB)


def test_the_peaks_of_phases_are_the_amounts_that_were_taken(tmp_path: Path) -> None:
    with measured(tmp_path, PROGRAM) as (listener, _):
        phases, (child,) = listener.close()
    *of_group, of_child = listener.warnings
    assert of_child == (
        f"process {child.pid} ended inside its phase 'child', whose peak RSS is therefore sampled"
    )
    assert (not of_group) == keeps_marks_of_phases()
    start = phases[0].end.rss_bytes
    rises = {phase.name: phase.peak_rss_bytes - start for phase in phases}
    assert rises == {
        "before": near(0),
        "spike of 300": near(300),
        "kept 200": near(200),
        "nothing": near(200),
        "150 of a child": near(200),
        "after": near(200),
    }
    if not keeps_marks_of_phases():
        assert {phase.peak_cgroup_bytes for phase in phases} == {None}
        return
    assert charge_rises(phases) == {
        "before": near(0),
        "spike of 300": near(300),
        "kept 200": near(200),
        "nothing": near(200),
        "150 of a child": near(350),
        "after": near(200),
    }
    assert [phase.peak_cgroup_bytes for phase in child.phases] == [None]


def charge_rises(phases: tuple[Phase, ...]) -> dict[str, int | None]:
    """Return by how much the peak charge of each phase is above the charge before all."""
    start = phases[0].end.cgroup_bytes
    assert start is not None
    return {
        phase.name: None if phase.peak_cgroup_bytes is None else phase.peak_cgroup_bytes - start
        for phase in phases
    }


def test_the_peak_of_the_whole_command_is_not_lost(tmp_path: Path) -> None:
    program = PROGRAM.split('with weighin.phase("150', maxsplit=1)[0]
    before = "early = take(400); early.close()\nwith weighin.phase"
    with measured(tmp_path, program.replace("with weighin.phase", before, 1)) as (listener, group):
        phases, _ = listener.close()
        start = phases[0].end.cgroup_bytes
        assert start is not None
        assert listener.peak_bytes is not None
        assert listener.peak_bytes - start == near(400)
        if group.version == 1:  # there is one mark, and the phases have reset it
            assert int(group.peak_path.read_text()) - start < 220 * MIB
    assert max(listener.highest_rss_bytes.values()) - phases[0].end.rss_bytes == near(400)


def test_the_charge_of_a_phase_in_which_the_program_dies_is_exact(tmp_path: Path) -> None:
    program = PROGRAM.split('with weighin.phase("spike', maxsplit=1)[0]
    dies = 'with weighin.phase("dies"):\n    take(300).close()\n    os.kill(os.getpid(), 9)\n'
    with measured(tmp_path, program + dies) as (listener, _):
        (before, died), _ = listener.close()
    assert listener.last_phase == died.name == "dies"
    assert died.end_ns > died.start_ns > before.end_ns
    if keeps_marks_of_phases():
        assert charge_rises((before, died))["dies"] == near(300)
