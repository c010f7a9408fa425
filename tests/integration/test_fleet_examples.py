"""The examples for clusters: the manifest of KubeRay is what Ray needs, and Slurm's script runs."""

import json
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest
import yaml
from typed import ROOT, CommandLine

from weighin.records import run_folder

EXAMPLES = ROOT / "configs" / "fleet"
SUITE = "models: gpt2-tiny\nstrategies: [baseline, sequential, streaming]\nisolation: process\n"


def kuberay() -> dict[str, Any]:
    cluster: dict[str, Any] = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    return cluster


def test_the_nodes_of_the_manifest_have_a_slot_and_no_memory_monitor() -> None:
    spec = kuberay()["spec"]
    (workers,) = spec["workerGroupSpecs"]
    # KubeRay puts each parameter into the command of a shell: ray start --resources=VALUE
    line = f"ray start --resources={workers['rayStartParams']['resources']}"
    (typed,) = [word for word in shlex.split(line) if word.startswith("--resources=")]
    assert json.loads(typed.removeprefix("--resources=")) == {"weighin_slot": 1}
    # The operator itself strips quotes from both ends and reads JSON, without unescaping anything.
    assert json.loads(workers["rayStartParams"]["resources"].strip("'\"")) == {"weighin_slot": 1}
    for group in (spec["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in container["env"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert "weighin_slot" not in str(spec["headGroupSpec"])


def array_job(command: CommandLine, task: int, count: int) -> subprocess.CompletedProcess[str]:
    """Run Slurm's script as one job of an array."""
    programs = command.folder / "bin"
    programs.mkdir(exist_ok=True)
    weighin = programs / "weighin"
    weighin.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m weighin "$@"\n')
    weighin.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "harness"),
        "WEIGHIN_CACHE": str(command.cache),
        "SLURM_ARRAY_TASK_ID": str(task),
    }
    return subprocess.run(
        [str(EXAMPLES / "slurm-array.sh"), "suite.yaml", "runs", str(count)],
        cwd=command.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
def test_the_jobs_of_slurms_script_measure_the_suite_together(command: CommandLine) -> None:
    (command.folder / "suite.yaml").write_text(SUITE)
    for task in (1, 2):
        job = array_job(command, task, 2)
        assert job.returncode == 0, job.stderr
    records = command.folder / "runs/shard-1/records.jsonl"
    first, _ = records.read_text().splitlines(keepends=True)
    records.write_text(first)  # as if the job had been stopped after its first cell
    again = array_job(command, 1, 2)
    assert again.returncode == 0, again.stderr
    assert len(records.read_text().splitlines()) == 2
    whole = command.folder / "runs/whole"
    whole.mkdir()
    texts = [path.read_text() for path in whole.parent.glob("shard-*/records.jsonl")]
    (whole / "records.jsonl").write_text("".join(texts))
    results = run_folder.read(whole).results
    assert {result.cell.strategy for result in results} == {"baseline", "sequential", "streaming"}
    assert {result.outcome for result in results} == {"ok"}
    report = command.run("report", "runs/whole", "--format", "md")
    assert report.code == 0, report.err
