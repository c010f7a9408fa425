"""Commands on nodes: the process of a node measures a command, as the driver of a fleet asks it to."""

from pathlib import Path

import pytest

from weighin.cell import Cell
from weighin.fleet.driver import Driver, Jobs
from weighin.plan.start import start
from weighin.plan.task import Progress
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.settings.definition import check_suite

LINE = "sleep 0.3; read line || echo nothing to read; echo 'second line'; exit 3"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))


def test_a_driver_measures_commands_on_its_nodes(tmp_path: Path) -> None:
    command = {"name": "both", "command": ["sh", "-c", LINE], "marks": ["second"]}
    settings = check_suite(
        {
            "commands": command,
            "repeats": 2,
            "timeout_s": 60,
            "isolation": "process",
            "cwd": str(tmp_path),
        }
    )
    task, _ = start(settings, tmp_path / "run")
    jobs = Jobs(1, "process", tmp_path / "caches")
    Driver(jobs, [jobs.node()], task, Progress()).run()
    results = run_folder.read(task.folder).results
    assert [(each.outcome, each.exit_code) for each in results] == 2 * [(Outcome.COMMAND_FAILED, 3)]
    first: Result = results[0]
    assert first.cell == Cell.of_command("both", ("sh", "-c", LINE), "process")
    assert first.ran
    assert [mark.text for mark in first.ran.marks] == ["second line"]
    assert first.samples_path
    assert (task.folder / first.samples_path).read_text().startswith("t_ns,")
