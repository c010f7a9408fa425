"""A node that measures commands for a driver; and the examples for clusters: KubeRay's manifest, Slurm's script."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typed import ROOT, CommandLine

from weighin.cell import Cell
from weighin.fleet.driver import Driver, Jobs
from weighin.plan.start import start
from weighin.plan.task import Progress
from weighin.records import run_folder
from weighin.result import Outcome
from weighin.settings.definition import check_suite

EXAMPLES = ROOT / "configs" / "fleet"
LINE = "sleep 0.3; read line || echo nothing to read; echo 'second line'; exit 3"


def test_a_driver_measures_commands_on_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    command = {"name": "both", "command": ["sh", "-c", LINE], "marks": ["second"]}
    asked = {"commands": command, "repeats": 2, "isolation": "process", "cwd": str(tmp_path)}
    task, _ = start(check_suite(asked), tmp_path / "run")
    jobs = Jobs(1, "process", tmp_path / "caches")
    Driver(jobs, [jobs.node()], task, Progress()).run()
    results = run_folder.read(task.folder).results
    assert [(each.outcome, each.exit_code) for each in results] == 2 * [(Outcome.COMMAND_FAILED, 3)]
    first = results[0]
    assert first.cell == Cell.of_command("both", ("sh", "-c", LINE), "process")
    assert first.ran
    assert [mark.text for mark in first.ran.marks] == ["second line"]
    assert first.samples_path
    assert (task.folder / first.samples_path).read_text().startswith("t_ns,")


def test_the_nodes_of_kuberays_manifest_have_a_slot_and_no_memory_monitor() -> None:
    spec = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())["spec"]
    (workers,) = spec["workerGroupSpecs"]
    # KubeRay puts each parameter into the command of a shell: ray start --resources=VALUE
    resources = workers["rayStartParams"]["resources"]
    (typed,) = [word for word in shlex.split(f"ray --resources={resources}") if "resources" in word]
    assert json.loads(typed.removeprefix("--resources=")) == {"weighin_slot": 1}
    # The operator itself strips quotes from both ends and reads JSON, without unescaping anything.
    assert json.loads(resources.strip("'\"")) == {"weighin_slot": 1}
    for group in (spec["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in container["env"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert "weighin_slot" not in str(spec["headGroupSpec"])


def run_array_job(command: CommandLine, task: int) -> None:
    """Run Slurm's script as one of the two jobs of an array."""
    weighin = command.folder / "bin" / "weighin"
    weighin.parent.mkdir(exist_ok=True)
    weighin.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m weighin "$@"\n')
    weighin.chmod(0o755)
    path = f"{weighin.parent}:{os.environ['PATH']}"
    job = subprocess.run(
        [EXAMPLES / "slurm-array.sh", "suite.yaml", "runs", "2"],
        cwd=command.folder,
        env=command.environment | {"PATH": path, "SLURM_ARRAY_TASK_ID": str(task)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 0, job.stderr


@pytest.mark.nightly
def test_the_jobs_of_slurms_script_measure_the_suite_together(command: CommandLine) -> None:
    (command.folder / "suite.yaml").write_text(
        "models: gpt2-tiny\nstrategies: [baseline, sequential, streaming]\nisolation: process\n"
    )
    run_array_job(command, 1)
    records = command.folder / "runs/shard-1/records.jsonl"
    first, _ = records.read_text().splitlines(keepends=True)
    records.write_text(first)  # as if the job had been stopped after its first cell
    for task in (1, 2):
        run_array_job(command, task)
    found = [*command.records("runs/shard-1"), *command.records("runs/shard-2")]
    assert {one["outcome"] for one in found} == {"ok"}
    names = ["baseline", "sequential", "streaming"]
    assert sorted(one["cell"]["strategy"] for one in found) == names
