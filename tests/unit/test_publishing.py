"""make publish: what measures each published run, and which are older than their code."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_cell, make_result, make_skipped, write_samples
from safetensors.torch import save_file
from sweeps import a_sweep

from pages import publish
from weighin.cell import Cell, ModelSpec
from weighin.cli import app
from weighin.isolation import select
from weighin.isolation.process import ProcessIsolation
from weighin.probes import environment, gpu_memory
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.run import runner
from weighin.settings.definition import COMMANDS, read_suite
from weighin.stream import formats
from weighin.suite import registry
from weighin.units import GIB

ROOT = Path(__file__).parents[2]


def git(root: Path, *arguments: str) -> str:
    who = ("user.name=a", "user.email=a@b", "commit.gpgsign=false", "safe.directory=*")
    settings = [word for setting in who for word in ("-c", setting)]
    command = ["git", "-C", str(root), *settings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A git work tree with a copy of our code, of which sources and strategies are taken."""
    root = tmp_path / "copy"
    root.mkdir()
    for folder in ("harness", "strategies", "configs"):
        subprocess.run(["cp", "-r", ROOT / folder, root], check=True)
    git(root, "init", "--quiet")
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def change(root: Path, name: str, text: str = "CHANGED = 1\n") -> None:
    with (root / name).open("a") as file:
        file.write(text)


def measured(strategy: str, commit: str | None = None) -> Result:
    cell = replace(make_cell(strategy), model=registry.model("gpt2-tiny"))
    return replace(make_result(cell), environment={"git_commit": commit, "git_dirty": False})


def test_the_status_names_what_is_stale_with_commit_and_day(copy: Path) -> None:
    head = git(copy, "rev-parse", "HEAD")
    folder = copy / "results" / "published"
    for name, strategy in {"a": "baseline", "b": "streaming"}.items():
        run_folder.append(folder / name, measured(strategy, head))
    run_folder.append(folder / "d", measured("baseline", "d" * 40))
    (folder / "runs.yaml").write_text("a: bench a\nb: bench b\nc: floor c\nd: bench d\n")
    told = {"predicted_at": "2026-11-24T01:02:03+00:00", "environment": {"git_commit": head}}
    (folder / "a" / "predicted.json").write_text(json.dumps(told))
    change(copy, "harness/weighin/show/table.py")
    change(copy, "strategies/streaming.py")
    git(copy, "add", ".")
    git(copy, "commit", "--quiet", "-m", "second")
    code = f"measured 2025-01-02 with weighin commit {head[:10]}"
    predictions = f"  its predictions: 2026-11-24 with weighin commit {head[:10]}"
    assert publish.status(publish.read(copy), copy) == [
        f"a: {code}: the current code",
        f"{predictions}: the current code",
        f"b: {code}: OLDER than the current code (streaming.py changed)",
        "c: never measured",
        "d: measured 2025-01-02 with weighin commit dddddddddd:"
        " cannot tell: git does not know commit dddddddddd",
        "3 of 4 are older than the current code or were never measured: b, c, d",
    ]
    (run,) = publish.read(copy, ["a"])
    assert publish.status([run], copy)[2] == "all 1 are of the current code"
    change(copy, "harness/weighin/predict/allocators.py")
    assert publish.status([run], copy)[1:] == [
        f"{predictions}: OLDER than the current code (allocators.py changed)",
        "1 of 1 are older than the current code or were never measured: a",
    ]
    change(copy, "harness/weighin/worker/loading.py")
    assert publish.status([run], copy)[0].endswith(
        "OLDER than the current code (loading.py changed)"
    )


def series(cells: Sequence[Cell]) -> set[str]:
    """What tells the series apart; another limit of a floor's search is no other series."""
    apart = ("repeat", "isolation")
    names = ({k: v for k, v in asdict(cell).items() if k not in apart} for cell in cells)
    return {json.dumps(name, sort_keys=True) for name in names}


def with_folder(command: Sequence[str], model: ModelSpec, place: Path) -> list[str]:
    """A command whose Hugging Face folder, if it has one, is in ``place``, with its configuration."""
    words = list(command)
    for index, word in enumerate(words):
        if word.startswith("results/folders/"):
            path = place / Path(word).name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(model.kwargs["config"]))
            save_file({"w": torch.zeros(1)}, path / "model.safetensors")
            words[index] = str(path)
    return words


def needs_folders(command: Sequence[str]) -> bool:
    if command[0] == "run":
        return True  # programs that read these folders
    suites = [read_suite(ROOT / word) for word in command if word.endswith(".yaml")]
    return any(model.folder for suite in suites for model in suite.models)


def test_each_command_plans_the_cells_that_were_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(select, "choose", lambda name, **_: (ProcessIsolation(), ""))
    monkeypatch.setattr(runner, "run", stop)
    monkeypatch.setattr("weighin.plan.task.check_machines", lambda *_: None)
    gpu = gpu_memory.Gpu("NVIDIA H200", 139 * GIB)
    monkeypatch.setattr(gpu_memory, "look", lambda: gpu_memory.GpuAnswer((gpu,)))
    monkeypatch.chdir(ROOT)
    for run in publish.read(ROOT):
        if not run.results or needs_folders(run.command):
            continue  # nobody has measured it yet, or its plan needs folders of GiB (the next test)
        folder = tmp_path / run.name
        words = with_folder(run.command, run.results[0].cell.model, tmp_path)
        monkeypatch.setattr(sys, "argv", ["weighin", *words, "--out", str(folder)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert ended.value.code == 0
        cells = run_folder.read_plan(folder).cells
        assert not {cell.format for cell in cells} & {*formats.READ_ONLY}, "weighin cannot make it"
        planned = series(cells)
        is_search = run.command[0] == "floor"
        told = [
            one.cell
            for one in run.results
            if (not is_search or not one.cell.ram_limit_bytes)
            and one.cell.format not in formats.READ_ONLY
        ]
        assert series(told) <= planned
        if "ram-sweep" not in " ".join(run.command):
            assert series(told) == planned


def test_the_converting_loads_that_were_published_are_those_of_the_suite() -> None:
    (run,) = publish.read(ROOT, ["converting"])
    suite = read_suite(ROOT / run.command[-1])
    cells = [one.cell for one in run.results]
    told = {(one.model.name, one.strategy, str(one.options)) for one in cells}
    assert told == {
        (model.name, strategy.name, str(strategy.options))
        for model in suite.models
        for strategy in suite.strategies
    }
    asked = {model.name: model.dtype for model in suite.models if model.dtype}
    assert {one.model.name: one.dtype for one in cells if one.model.name in asked} == asked


def test_the_programs_that_were_published_are_those_of_the_suite() -> None:
    (run,) = publish.read(ROOT, ["converting-files"])
    suite = read_suite(ROOT / run.command[-1], COMMANDS)
    told = {one.cell.strategy: list(one.cell.command) for one in run.results}
    assert told == {one.name: one.command for one in suite.commands}


def test_a_run_on_a_gpu_is_left_out_where_there_is_none() -> None:
    cpu = publish.Run("cpu", ("bench", "a"), (make_result(),))
    gpu = publish.Run("gpu", ("bench", "a"), (make_result(make_cell(device="cuda")),))
    assert publish.measurable([cpu, gpu], "") == ([cpu, gpu], [])
    left_out = ["left out, because torch finds no CUDA GPU: gpu"]
    assert publish.measurable([cpu, gpu], "torch finds no CUDA GPU") == ([cpu], left_out)


@pytest.mark.parametrize(
    ("load", "dirty", "said"),
    [
        (0.1, False, ""),
        (1.5, False, "this machine is busy: load average 1.50, above 0.3"),
        (0.1, True, "tracked files differ from the commit"),
        (0.1, None, "tracked files differ from the commit"),
    ],
)
def test_a_busy_machine_or_uncommitted_code_publishes_nothing(
    load: float, dirty: bool | None, said: str
) -> None:
    why = publish.why_not(load, {"git_commit": "a", "git_dirty": dirty})
    assert why.startswith(said)
    assert bool(why) == bool(said)


class Weighin:
    """Stands for `python -m weighin ...`: notes how it is called, and leaves a run's folder."""

    def __init__(self, results: Sequence[Result], code: int = 0) -> None:
        self.results, self.code = results, code
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.calls.append(command[3:])
        folder = Path(command[command.index("--out" if "--out" in command else "--resume") + 1])
        run_folder.write_plan(folder, [one.cell for one in self.results])
        for one in self.results:
            run_folder.append(folder, one)
        return subprocess.CompletedProcess(command, self.code)


def test_a_stopped_run_goes_on_and_other_code_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "code", lambda: {"git_commit": "a" * 40})
    result = replace(make_result(), environment={"git_commit": "a" * 40})
    run = publish.Run("x", ("bench", "gpt2-tiny"), (result,))
    weighin = Weighin([result], code=130)
    monkeypatch.setattr(subprocess, "run", weighin)
    with pytest.raises(SystemExit, match="The same command resumes it"):
        publish.measure(run)
    weighin.code = 0
    publish.measure(run)
    assert weighin.calls == [
        ["bench", "gpt2-tiny", "--out", "results/publishing/x"],
        ["bench", "--resume", "results/publishing/x"],
    ]
    monkeypatch.setattr(environment, "code", lambda: {"git_commit": "b" * 40})
    with pytest.raises(
        SystemExit, match="was started at commit aaaaaaaaaa, but this is bbbbbbbbbb"
    ):
        publish.measure(run)
    assert len(weighin.calls) == 2


def test_a_strategy_may_be_skipped_for_one_model_of_a_run_but_not_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    measured, skipped = make_result(make_cell("streaming")), make_skipped("streaming", "needs GPT")
    monkeypatch.setattr("subprocess.run", Weighin([measured, skipped]))
    publish.measure(publish.Run("x", ("bench", "gpt2-tiny"), ()))
    monkeypatch.setattr("subprocess.run", Weighin([measured, make_skipped("baseline")]))
    with pytest.raises(SystemExit, match="baseline is skipped"):
        publish.measure(publish.Run("y", ("bench", "gpt2-tiny"), ()))


def test_what_should_not_be_published_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = replace(make_result(), outcome=Outcome.WRONG_WEIGHTS, message="h.0 differs")
    monkeypatch.setattr(subprocess, "run", Weighin([wrong]))
    with pytest.raises(SystemExit, match="is wrong_weights: h"):
        publish.measure(publish.Run("x", ("bench", "gpt2-tiny"), (make_result(),)))


def test_a_whole_run_takes_the_place_of_the_published_one(tmp_path: Path) -> None:
    measured, published = tmp_path / "measured", tmp_path / "published"
    old, new = make_result(make_cell("baseline")), make_result(make_cell("streaming"))
    run_folder.append(published, old)
    write_samples(published, old)
    for name in ("report.md", "timeline.png", "predicted.json"):
        (published / name).write_text("old")
    run_folder.write_plan(measured, [new.cell])
    run_folder.append(measured, new)
    write_samples(measured, new)
    (measured / "report.md").write_text("new")
    publish.put_in_place(measured, published)
    found = {str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()}
    assert found == {"records.jsonl", "timeline.svg"}
    assert [one.cell.strategy for one in run_folder.read(published).results] == ["streaming"]
    picture = (published / "timeline.svg").read_text()
    assert "streaming: ok" in picture
    assert "no samples" not in picture


def test_a_run_under_several_limits_or_on_several_disks_keeps_no_timeline(tmp_path: Path) -> None:
    for result in a_sweep():
        run_folder.append(tmp_path / "measured", result)
    publish.put_in_place(tmp_path / "measured", tmp_path / "published")
    assert [path.name for path in (tmp_path / "published").iterdir()] == ["records.jsonl"]
    cells = [make_cell("streaming", disk_bytes_per_s=rate) for rate in (50_000_000, 100_000_000)]
    assert (publish.has_timeline(cells[:1]), publish.has_timeline(cells)) == (True, False)


def test_git_keeps_no_more_of_a_published_run_than_is_said() -> None:
    shown = "".join(
        page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    )
    files = [Path(name) for name in git(ROOT, "ls-files", "results/published").splitlines()]
    for run in publish.read(ROOT):
        if not run.results:
            continue  # nobody has measured it yet
        operations = {one.cell.operation for one in run.results}
        cells = [one.cell for one in run.results]
        kept = {"records.jsonl"} | ({"predicted.json"} if operations == {"load"} else set())
        found = {path.name for path in files if path.parent.name == run.name}
        pictures = {name for name in found if f"{run.name}/{name}" in shown}
        timelines = {name for name in found if name.startswith("timeline.")}
        assert found == kept | pictures | timelines
        assert len(timelines) == publish.has_timeline(cells)
