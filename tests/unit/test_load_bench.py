"""A run of loads or saves: its checkpoints, its first worker, and what each cell gets."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fakes
import pytest
from factories import refused
from fakes import BASELINE, DONE, LOADED, PlayedIsolation, Seen, begin, failed, memory, ready

from weighin import slow_disk
from weighin.checkpoint import cache, temporary_folders
from weighin.errors import CheckpointError, FormatLimit, IsolationUnavailable, StillRunning
from weighin.plan.start import start
from weighin.plan.task import Progress, Run
from weighin.probes import page_cache
from weighin.records import run_folder
from weighin.result import Outcome, Result, Sample
from weighin.run import loads, runner
from weighin.run.loads import Loads
from weighin.settings.definition import check_suite
from weighin.suite import registry
from weighin.suite.registry import versions
from weighin.units import MIB

TWO = ["baseline", "sequential"]
TEXT = "importing torch, to measure the memory that the import needs"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the checkpoint of the smallest model is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def compiled(tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Work in an empty folder, and note when code is compiled."""
    noted: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHIN_CACHE", str(checkpoints))
    monkeypatch.setattr(loads, "compile_code", lambda: noted.append("compiled"))
    monkeypatch.setattr(page_cache, "drop", lambda _: 0)
    return noted


class Told:
    """What a run tells its user."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.started: list[str] = []
        self.finished: list[Result] = []
        self.phases: list[str] = []
        self.progress = Progress(
            preparing=lambda text, _share: self.lines.append(text),
            starting=lambda cell: self.started.append(cell.strategy),
            phase=self.phases.append,
            finished=self.finished.append,
        )


def asked(*scripts: Any, **suite: Any) -> Run:
    """Plan a run of the smallest model, whose workers play the scripts."""
    options = {"models": "gpt2-tiny", "strategies": "baseline", "isolation": "process"} | suite
    run, _ = start(check_suite(options), Path("run"))
    return replace(run, isolation=PlayedIsolation(*scripts))


def played(run: Run) -> PlayedIsolation:
    assert isinstance(run.isolation, PlayedIsolation)
    return run.isolation


def jobs_of(run: Run) -> list[Any]:
    return played(run).jobs


def complaint(run: Run) -> str:
    return refused(runner.run, run, Progress())


def outcomes(results: Sequence[Result]) -> list[tuple[str, str]]:
    return [(each.outcome, each.message) for each in results]


def changed(run: Run, **cell: Any) -> Run:
    """The run of one cell with another limit, ranks or cache."""
    (planned,) = run.planned
    return replace(run, planned=[replace(planned, cell=replace(planned.cell, **cell))])


def test_a_run_removes_leftovers_tests_a_worker_and_measures_each_cell(compiled: list[str]) -> None:
    run = asked(BASELINE, DONE, strategies=TWO)
    played(run).leftovers = ["cgroup x"]
    (saving := temporary_folders.folder() / "saving" / "dead").mkdir(parents=True)
    told = Told()
    results = runner.run(run, told.progress)
    leftover = "removed a leftover of a killed run:"
    assert told.lines[:2] == [f"{leftover} cgroup x", f"{leftover} files of a save in {saving}"]
    assert not saving.exists()
    probe, *others = jobs_of(run)
    assert probe.cell.strategy == "baseline"
    assert [job.cell for job in others] == [each.cell for each in run.planned]
    for job, planned in zip(others, run.planned, strict=True):
        assert Path(job.checkpoint).exists() and Path(job.manifest).name == "manifest.json"
        assert Path(job.strategy_path).name == f"{planned.cell.strategy}.py"
        assert (job.python_path, job.mounts, job.target, job.use_path) == ((), (), "", "")
    assert outcomes(results) == [("ok", ""), ("ok", "")]
    assert results == list(run_folder.read(Path("run")).results) == told.finished
    assert (told.started, compiled) == (["baseline", "sequential"], ["compiled"])
    assert told.lines[-1:] == [TEXT]
    assert told.phases == ["import", "prepare", "read", "touch", "forward"] * 2
    environment = results[0].environment
    assert environment["isolation"] == {"engine": "played"}
    assert environment["ram_bytes"] and environment["weighin"]
    model_bytes = cache.ensure(run.planned[0].cell.model, "pt").manifest().model_bytes("float32")
    assert results[0].model_bytes == model_bytes > 0
    assert played(run).steps == ["check", "remove stale"]
    assert Path("run/samples").is_dir()


def test_the_first_worker_has_no_limit_and_a_cold_load() -> None:
    run = changed(asked(BASELINE, DONE), ram_limit_bytes=400 * MIB, cache="warm", ranks=2)
    runner.run(run, Progress())
    probe, job = jobs_of(run)
    assert job.cell == run.planned[0].cell
    assert probe.cell == replace(job.cell, ram_limit_bytes=None, cache="cold", ranks=1)


def test_the_test_of_a_worker_checks_the_limits_of_other_machines_cells_too() -> None:
    run = replace(asked(BASELINE, DONE), more_limits=[(4000 * MIB, 1), (1 * MIB, 2)])
    assert complaint(run).startswith("--ram 1MiB is less than `import torch` alone needs here (")


def test_a_run_that_was_tested_before_starts_no_worker_for_it() -> None:
    run = asked(DONE)
    told = Told()
    runner.run(replace(run, is_probed=True), told.progress)
    assert [job.cell for job in jobs_of(run)] == [run.planned[0].cell]
    assert TEXT not in told.lines


@pytest.mark.parametrize(
    ("ranks", "import_mib", "least"), [(1, 250, "500.000 MiB"), (3, 750, "1.465 GiB")]
)
def test_a_limit_below_that_of_an_import_is_refused(
    ranks: int, import_mib: int, least: str
) -> None:
    """The baseline has 200 MiB of anonymous and 50 MiB of shared memory; page cache does not count."""
    before, limit = memory(300, shmem_bytes=50 * MIB), import_mib * MIB - 1
    run = asked([fakes.event("baseline", baseline_ns=1, baseline=before)])
    enough = changed(run, ram_limit_bytes=limit + 1, ranks=ranks)
    Loads(enough, enough.planned, Progress())
    assert complaint(changed(run, ram_limit_bytes=limit, ranks=ranks)) == (
        f"--ram {limit}B is less than `import torch` alone needs here ({import_mib}.000 MiB)\n"
        f"give at least {least} plus the size of the weights"
    )
    assert not run.folder.exists()


NOTHING = "nothing can be measured under --isolation process:"
FIRST_WORKERS: dict[str, tuple[list[Any], bytes, str]] = {
    "ends": ([begin("import")], b"", f"{NOTHING} the measured process ended with exit code 0 in phase 'import'"),
    "ends with an error": ([begin("import")], b"first\nImportError: no torch\n", f"{NOTHING} the measured process ended with exit code 0 in phase 'import': ImportError: no torch"),
    "fails": ([failed("measurement_failed", "before the load: no torch")], b"", "nothing can be measured: before the load: no torch"),
    "hangs": ([TimeoutError], b"", f"{NOTHING} still running after 0.4 s, before its first phase"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_WORKERS)
def test_a_first_worker_that_fails_stops_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, stderr, said = FIRST_WORKERS[name]
    monkeypatch.setattr(loads, "_PROBE_TIMEOUT_S", 0.4)
    run = asked(script)
    played(run).stderr_tail = stderr
    assert complaint(run).split("\n")[0] == said
    assert not run.folder.exists()


def test_a_run_goes_on_where_it_was_stopped() -> None:
    run = asked(BASELINE, DONE, strategies=TWO)
    following = iter([run.planned[0], None])
    first = runner.run(run, Progress(), lambda _: next(following))
    assert [each.cell.strategy for each in first] == ["baseline"]
    again = replace(run, isolation=PlayedIsolation(BASELINE, DONE), is_new=False)
    results = runner.run(again, Progress())
    assert [each.cell.strategy for each in results] == ["baseline", "sequential"]
    assert [job.cell.strategy for job in jobs_of(again)] == ["sequential", "sequential"]
    whole = replace(run, isolation=PlayedIsolation(DONE), is_new=False)
    assert (runner.run(whole, Progress()), jobs_of(whole)) == (results, [])


def test_a_cell_that_is_skipped_has_its_reason_and_the_machine() -> None:
    run = asked(BASELINE, DONE, strategies=["baseline", "sequential", "per_module"])
    reasons = ["broken", "", "also broken"]
    planned = [replace(one, skip=why) for one, why in zip(run.planned, reasons, strict=True)]
    results = runner.run(replace(run, planned=planned), Progress())
    assert outcomes(results) == [("skipped", "broken"), ("ok", ""), ("skipped", "also broken")]
    assert results[0].environment["isolation"] == {"engine": "played"}
    assert [job.cell.strategy for job in jobs_of(run)] == ["sequential", "sequential"]


def test_a_run_of_skipped_cells_prepares_nothing() -> None:
    run = asked(DONE)
    broken = [replace(run.planned[0], skip="broken")]
    (result,) = runner.run(replace(run, planned=broken), Progress())
    assert (result.outcome, result.environment, jobs_of(run)) == (Outcome.SKIPPED, {}, [])


def test_a_users_checkpoint_that_changes_stops_the_run() -> None:
    model = registry.model("gpt2-tiny")
    own = Path("mine.pt").absolute()
    own.write_bytes(cache.ensure(model, "pt").path.read_bytes())

    def change() -> None:
        with own.open("ab") as file:
            file.write(b"\0")

    script: list[Any] = [*LOADED, change, ready(), fakes.done()]
    run = asked(BASELINE, script, checkpoint=own, strategies=TWO)
    assert complaint(run) == (
        f"{own} changed while baseline was measured\nrestore the checkpoint from a copy, and keep"
        " the strategy from writing to it"
    )
    assert jobs_of(run)[1].checkpoint == str(own)
    (result,) = run_folder.read(run.folder).results
    assert result.outcome is Outcome.STRATEGY_FAILED


def test_a_cached_checkpoint_that_changes_is_made_again() -> None:
    run = asked(BASELINE, DONE, strategies=TWO)
    path = cache.ensure(run.planned[0].cell.model, "pt").path
    before = path.read_bytes()

    def spoil() -> None:
        path.unlink()  # a cached file is read-only
        path.write_bytes(b"spoilt")

    script: list[Any] = [*LOADED, spoil, ready(), fakes.done()]
    run = replace(run, isolation=PlayedIsolation(BASELINE, script, DONE))
    results = runner.run(run, Progress())
    assert [each.outcome for each in results] == [Outcome.STRATEGY_FAILED, Outcome.OK]
    assert Path(jobs_of(run)[2].checkpoint).read_bytes() == before


@pytest.mark.parametrize("suite", [{"operation": "save"}, {"uses": "save"}])
def test_what_saves_gets_a_folder_that_is_removed(suite: dict[str, Any]) -> None:
    targets: list[bool] = []

    def look() -> None:
        (target := Path(jobs_of(run)[-1].target)).joinpath("file").touch()
        targets.append(target.is_dir())

    script: list[Any] = [*LOADED, look, ready(), fakes.done()]
    name = "torch_save" if "operation" in suite else "baseline"
    run = asked(BASELINE, script, strategies=name, **suite)
    (result,) = runner.run(run, Progress())
    assert (result.outcome, targets) == (Outcome.OK, [True])
    assert not Path(jobs_of(run)[-1].target).exists()
    assert jobs_of(run)[0].cell.operation == "load"
    assert Path(jobs_of(run)[-1].checkpoint).suffix == ".pt"


def test_the_packages_of_a_strategy_are_in_the_record() -> None:
    Path("mine.py").write_text(
        '"""Load."""\nDEVICES = ("cpu",)\nPACKAGES = ("numpy",)\n\ndef load(job): ...\n'
    )
    run = asked(BASELINE, DONE, strategies=["./mine.py", "baseline"])
    with_package, without = runner.run(run, Progress())
    assert with_package.environment["packages"] == versions(["numpy"])
    assert "packages" not in without.environment


@pytest.mark.parametrize("formats", [["safetensors"], ["safetensors", "pt"]], ids=["one", "all"])
def test_a_format_that_cannot_hold_the_model_is_skipped_unless_all_cannot(
    monkeypatch: pytest.MonkeyPatch, formats: list[str]
) -> None:
    ensure = cache.ensure

    def ensured(model: Any, fmt: str, **options: Any) -> Any:
        if fmt in formats:
            raise FormatLimit(f"{fmt} cannot hold it", "choose another")
        return ensure(model, fmt, **options)

    monkeypatch.setattr(cache, "ensure", ensured)
    run = asked(BASELINE, DONE, strategies="streaming", format=["safetensors", "pt"])
    if len(formats) == 2:
        assert complaint(run) == "safetensors cannot hold it\nchoose another"
    else:
        told = outcomes(runner.run(run, Progress()))
        assert told == [("skipped", "safetensors cannot hold it"), ("ok", "")]


def test_a_run_on_slow_disks_needs_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*, in_container: bool) -> None:
        raise IsolationUnavailable(f"no FUSE, in a container: {in_container}")

    monkeypatch.setattr(slow_disk, "check", check)
    run = asked(BASELINE, strategies=TWO)
    slow: Any = [
        replace(one, cell=replace(one.cell, disk_bytes_per_s=50_000_000)) for one in run.planned
    ]
    with pytest.raises(IsolationUnavailable, match="in a container: False"):
        Loads(run, slow, Progress())
    Loads(run, [replace(slow[0], skip="x"), run.planned[1]], Progress())


def test_a_worker_that_cannot_start_stops_the_run_and_keeps_its_records() -> None:
    class Gone(PlayedIsolation):
        def start(self, cell: Any, *arguments: Any) -> Any:
            if cell.strategy == "sequential":
                raise CheckpointError("gone", "start it")
            return super().start(cell, *arguments)

    run = replace(asked(strategies=TWO), isolation=Gone(BASELINE, DONE))
    assert complaint(run) == "gone\nstart it"
    (result,) = run_folder.read(run.folder).results
    assert result.cell.strategy == "baseline"


def test_a_worker_that_does_not_end_stops_the_run_and_is_recorded() -> None:
    run = asked(BASELINE, strategies=TWO)

    class Stuck(PlayedIsolation):
        def start(self, cell: Any, *arguments: Any) -> Any:
            running = super().start(cell, *arguments)
            if len(self.jobs) > 1:
                running.close = Mock(side_effect=StillRunning("process 5 does not end"))
            return running

    with pytest.raises(StillRunning) as caught:
        stuck = Stuck(BASELINE, DONE, inside=Seen([Sample(*range(8))]))
        runner.run(replace(run, isolation=stuck), Progress())
    (result,) = run_folder.read(run.folder).results
    samples = [str(path.relative_to(run.folder)) for path in run.folder.glob("samples/*")]
    assert (result.cell.strategy, caught.value.exit_code) == ("baseline", 4)
    assert samples == [result.samples_path]
    again = replace(run, isolation=PlayedIsolation(BASELINE, DONE), is_new=False)
    assert [each.cell.strategy for each in runner.run(again, Progress())] == TWO
    assert [job.cell.strategy for job in jobs_of(again)] == ["sequential"] * 2


def test_a_signal_during_a_cell_ends_the_run_before_the_next() -> None:
    stop = lambda: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    script: list[Any] = [*LOADED, stop, ready(), fakes.done()]
    run = asked(BASELINE, script, strategies=TWO)
    assert complaint(run) == "stopped; nothing is left running"
    assert [each.cell.strategy for each in jobs_of(run)] == ["baseline"] * 2
