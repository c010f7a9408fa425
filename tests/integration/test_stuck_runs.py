"""A whole run whose second worker does not die, or whose engine stops: what is kept, and how it goes on."""

from pathlib import Path
from typing import Any

import pytest

from weighin.errors import HarnessError, IsolationUnavailable, StillRunning
from weighin.isolation.process import ProcessIsolation, Started
from weighin.plan.start import resume
from weighin.plan.start import start as plan
from weighin.plan.task import Progress
from weighin.records import run_folder
from weighin.run import runner
from weighin.settings.definition import check_suite

STUCK = StillRunning("the measured process 5 does not end, not even after SIGKILL")
GONE = IsolationUnavailable("the Docker engine has stopped", "start it again")


class _Stuck(Started):
    """It cannot be removed; all that can be is."""

    def close(self) -> None:
        super().close()
        raise STUCK


class _Lost(Started):
    """Its engine does not say how it ended."""

    def wait(self, timeout_s: float) -> Any:
        raise GONE


@pytest.mark.parametrize(
    ("kind", "error", "code", "kept"),
    [(_Stuck, STUCK, 4, ["baseline", "sequential"]), (_Lost, GONE, 3, ["baseline"])],
)
def test_a_run_that_cannot_go_on_keeps_its_records_and_is_resumed(
    kind: type[Started],
    error: HarnessError,
    code: int,
    kept: list[str],
    disk: Path,
    shared_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(shared_cache))
    names = ["baseline", "sequential", "meta_copy"]
    suite = check_suite({"models": "gpt2-tiny", "strategies": names, "isolation": "process"})
    task, _ = plan(suite, tmp_path / "run")
    # The first worker only imports torch; the third is the second cell's.
    kinds = [Started, Started, kind]
    with monkeypatch.context() as patched:
        start = ProcessIsolation.start

        def start_next(self: ProcessIsolation, *arguments: Any) -> Started:
            patched.setattr("weighin.isolation.process.Started", kinds.pop(0))
            return start(self, *arguments)

        patched.setattr(ProcessIsolation, "start", start_next)
        with pytest.raises(type(error)) as caught, runner.resumable("bench", task):
            runner.run(task, Progress())
    assert caught.value.exit_code == code
    assert caught.value.repair.endswith(f"; then resume: weighin bench --resume {tmp_path / 'run'}")
    results = run_folder.read(task.folder).results
    assert [(one.cell.strategy, one.outcome) for one in results] == [(name, "ok") for name in kept]
    for one in results:
        assert one.samples_path
        assert (task.folder / one.samples_path).exists()
    runner.run(resume(task.folder), Progress())
    assert [one.cell.strategy for one in run_folder.read(task.folder).results] == names
