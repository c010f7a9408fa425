"""Verbs typed on small runs; nothing is measured or predicted."""

from pathlib import Path
from typing import Any

import pytest
from factories import ENVIRONMENT, make_cell, make_result, notebook_run
from ran_commands import make_ran, settings_of
from torch import save, zeros

from weighin import doctor
from weighin.cell import Cell
from weighin.plan.task import Run
from weighin.predict import client
from weighin.predict.prediction import Prediction, Work
from weighin.recommend import answer
from weighin.records import run_folder
from weighin.run import runner
from weighin.units import GIB, MIB

ROOT = Path(__file__).parents[2]
BENCH = ("bench", "gpt2-tiny", "--isolation", "process", "--out", "new")

VERBS = {
    "doctor": ("doctor",),
    "list": ("list",),
    "bench": BENCH,
    "run": ("run", "--resume", "commands", "--trust"),
    "floor": ("floor", "gpt2-tiny", "--isolation", "cgroup", "--out", "floors"),
    "report": ("report", "runs/a", "--format", "csv"),
    "compare": ("compare", "runs/a", "runs/b"),
    "check": ("check", "runs/a", "--budget", "peak_rss <= 2 x model", "--all"),
    "history": ("history", "runs"),
    "recommend": ("recommend", "gpt2-tiny", "--ram", "3g"),
    "predict": ("predict", "gpt2-tiny", "--strategies", "streaming,safetensors_mmap"),
    "inspect": ("inspect", "model.pt"),
    "convert": ("convert", "model.pt", "new.safetensors"),
    "cache list": ("cache", "list"),
    "cache clear": ("cache", "clear", "--yes"),
}
"""A whole command for each verb, in the folder that ``prepare`` makes."""


LIMIT = doctor.Capability("isolation cgroup enforces a limit", "yes", "a probe was killed")


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two runs and a checkpoint in ``folder``, enter it, and replace what takes long."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WEIGHIN_CACHE", str(folder / "cache"))
    for name, day in (("a", 1), ("b", 2)):
        for result in notebook_run():
            started = f"2026-11-{day:02}T10:00:00.000+00:00"
            again = make_result(
                result.cell, outcome=result.outcome, started_at=started, environment=ENVIRONMENT
            )
            run_folder.append(folder / "runs" / name, again)
    cells = [Cell.of_command("true", ("true",), "process", repeat=repeat) for repeat in (0, 1)]
    settings = settings_of(*cells, cwd=str(folder)).as_json()
    run_folder.write_plan(Path("commands"), cells, settings)
    save({"embedding.weight": zeros(10, 4), "head.weight": zeros(10, 4)}, "model.pt")
    found = doctor.Capability("soft limit (ram_high)", "partly", "cgroup v1 has no memory.high")
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Examination((found, LIMIT)))
    monkeypatch.setattr(runner, "run", _run)
    monkeypatch.setattr(runner, "search", _search)
    monkeypatch.setattr(client, "predict", _predict)
    monkeypatch.setattr(answer, "predict", _predict)


def _run(task: Any, _: Any) -> Any:
    results = [make_result(make_cell("streaming")), make_result(make_cell("safetensors_copy"))]
    if task.settings.commands:
        results = [make_ran(planned.cell) for planned in task.planned]
    for result in results:
        run_folder.append(task.folder, result)
    return results


def _search(task: Run, _: Any) -> Any:
    """Find the floor that a published search found of one strategy."""
    published = ROOT / "results" / "published" / "gpt2-medium-floors"
    for result in run_folder.read(published).results:
        if result.cell.strategy == "mmap_assign":
            run_folder.append(task.folder, result)
    return list(run_folder.read(task.folder).results)


def _predict(planned: Any, **_: Any) -> list[Prediction]:
    return [
        Prediction(
            one.cell,
            model_bytes=2 * GIB,
            baseline_anon_bytes=100 * MIB,
            host_anon_peak_bytes=100 * MIB + 2 * GIB,
            host_file_peak_bytes=80 * MIB,
            tensor_peak_bytes=2 * GIB,
            floor_bytes=116 * MIB + 2 * GIB,
            disk_read_bytes=2 * GIB,
            work=Work(fresh_bytes=2 * GIB),
        )
        for one in planned
    ]
