"""Runs of commands in every output, without a word of loads; and the phases of programs in the gate."""

import re
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from factories import make_cell, make_result
from ran_commands import RAN, make_command, make_killed, make_ran, write_command_samples
from snapshots import Compare

from weighin.records.metrics import phases_of_load
from weighin.records.run_folder import Records
from weighin.records.series import Measured, name_of, summarise
from weighin.result import Memory, Outcome, Phase, Process, Result, Sample
from weighin.show import timeline, write
from weighin.show.findings import floors, survival
from weighin.show.plots import draw_peaks
from weighin.show.report import answer
from weighin.show.table import markdown
from weighin.units import MIB

OF_LOADS = re.compile(r"\b(model_bytes|dtype|format|device|import|x model|peak RSS|peak_rss|loading|gpt2)\b")  # fmt: skip
AT_PEAK = Sample(
    1, 6 * MIB, 2 * MIB, 0, 4 * MIB, 0, 0, 0, 160 * MIB, 9 * MIB, cgroup_shmem_bytes=4 * MIB,
    locked_bytes=MIB, freed_bytes=3 * MIB, kernel_bytes=150 * MIB, kernel_reclaimable_bytes=10 * MIB,
    socket_bytes=7 * MIB, slab_bytes=30 * MIB, page_tables_bytes=100 * MIB,
)  # fmt: skip
TWO = [make_ran(), make_killed()]
SWEEP = [
    make_ran(),
    *(make_ran(make_command(ram_limit_bytes=800 * MIB, repeat=repeat)) for repeat in range(3)),
    make_killed(make_command(ram_limit_bytes=792 * MIB)),
]
"""Both a floor at 800 MiB, and a matrix of three limits."""
SERVE = [replace(one, cell=replace(one.cell, strategy="serve.py", command=("serve",))) for one in SWEEP]  # fmt: skip
SHORT = Process(9, 4711, "cat", 0, 1)
SHELL = replace(RAN.processes[0], pid=9, command="/bin/sh -c x", anon_bytes=MIB, file_bytes=0, files=())  # fmt: skip
SMALL = make_ran(
    make_command(ram_limit_bytes=8 * MIB), Outcome.OOM_KILLED, ran=replace(RAN, needed_bytes=MIB)
)

RUNS: dict[str, list[Result]] = {
    "two of which one is killed": TWO,
    "an exact need": [make_ran(ran=replace(RAN, needed_is_sampled=False))],
    "several commands": [*TWO, make_ran(make_command("serve", command=("serve",)))],
    "many short processes and a shell of no weight": [make_ran(ran=replace(RAN, processes=(RAN.processes[0], SHELL, *12 * [SHORT])))],
    "left over": [make_ran(ran=replace(RAN, ended=("sleep 99",)))],
    "the processes of the largest cell": [SMALL, make_ran()],
    "kinds of memory at the peak": [make_ran(ran=replace(RAN, at_peak=AT_PEAK))],
    "failed": [make_ran(outcome=Outcome.COMMAND_FAILED, message="exit code 3", exit_code=3)],
    "a failed repeat": [make_ran(), make_ran(make_command(repeat=1), Outcome.COMMAND_FAILED, ran=replace(RAN, needed_bytes=MIB))],
    "a floor and a matrix": SWEEP,
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_every_output(name: str, same: Compare) -> None:
    run = Measured(RUNS[name], missing=0)
    tables = markdown([*survival(run), *floors(run)])
    texts = [write.report_md(run), tables, write.summary_csv(run), write.bencher(run)]
    text = "\n\n".join([*texts, *answer(run)])
    assert not OF_LOADS.search(text)
    same(f"command_reports/{name}.txt", text)


def test_the_csv_of_loads_has_no_columns_of_commands() -> None:
    heads = write.summary_csv(Measured([make_result(make_cell())])).splitlines()[0].split(",")
    assert not {"needed_bytes", "exit_code", "shmem_sampled_bytes"} & {*heads}


def test_commands_of_one_run_share_a_matrix() -> None:
    (matrix,) = Measured([*SWEEP, *SERVE]).matrices
    assert matrix.labels == ["train.py", "serve.py"]


def test_the_name_tells_soft_settings_and_environment_apart() -> None:
    cell = make_command(cache="cold", environment={"A": "1"})
    assert name_of(cell) == "command train.py cold cgroup ram=none A=1"


def test_the_pictures_of_commands(tmp_path: Path) -> None:
    run = Measured(TWO, folder=tmp_path)
    for result in run.results:
        write_command_samples(tmp_path, result)
    (figure,) = timeline.draw_timelines(run)
    assert any("Memory over time while running" in text.get_text() for text in figure.texts)
    first, second = figure.axes[:2]
    tips = [str(line.get_gid()) for line in first.lines]
    assert "tip:epoch 1 · at 1.00 s, a line of output" in tips
    curves = [numpy.asarray(line.get_ydata()) for line in first.lines]
    highest = max(float(curve.max()) for curve in curves if len(curve) > 2)
    assert highest == pytest.approx(957 / 1024, rel=0.01)
    (cut,) = [line for line in second.lines if line.get_label() == "cut off"]
    assert numpy.asarray(cut.get_xdata())[0] == pytest.approx(2.0)
    bars = draw_peaks(run)
    assert bars.axes[-1].get_xlabel() == "memory of all processes of the command, GiB"
    labels = [text.get_text() for legend in bars.legends for text in legend.get_texts()]
    assert "need (at least)" in labels


def phase(name: str, mib: int) -> Phase:
    end = Memory(mib * MIB, mib * MIB, 0, 0)
    return Phase(name, 0, 5, mib * MIB, end, 0, 0, peak_cgroup_bytes=2 * mib * MIB)


def test_every_phase_of_a_program_counts_whatever_its_name() -> None:
    result = make_ran(phases=(phase("prepare", 10), phase("read", 20), phase("read", 30)))
    assert [name for name, _ in phases_of_load(result)] == ["prepare", "read", "read 2"]
    (series,) = summarise([Records([result])]).values()
    assert series.phases["read 2"]["peak_cgroup"] == 60 * MIB


def test_a_stretch_between_two_phases_is_the_same_one_in_each_repeat() -> None:
    """On a busy machine there is such a stretch now and then."""
    stretch, read, apply = phase("other", 20), phase("read", 20), phase("apply", 30)
    quiet = make_ran(phases=(read, stretch, apply))
    busy = (phase("other", 5), read, stretch, apply, stretch)
    (series,) = summarise(
        [Records([quiet, make_ran(make_command(repeat=1), phases=busy)])]
    ).values()
    assert {name: figures["peak_cgroup"] // MIB for name, figures in series.phases.items()} == {
        "read": 40, "other after read": 40, "apply": 60, "other": 10, "other after apply": 40,
    }  # fmt: skip
