"""From what was asked for, loads or commands, to a run, and from its folder back to the same run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from hypothesis import given
from hypothesis import strategies as st
from ran_commands import make_command, settings_of
from safetensors.torch import save_file
from snapshots import Compare, answered

from weighin.checkpoint import temporary_folders
from weighin.isolation.process import ProcessIsolation
from weighin.plan.start import foreign, label_of, resume, start
from weighin.plan.task import Run
from weighin.probes import environment, gpu_memory
from weighin.records import run_folder
from weighin.settings.definition import Settings, check_suite
from weighin.units import GIB

LOAD = '"""Load."""\nDEVICES = ("cpu",)\n\ndef load(job): ...\n'


@pytest.fixture(autouse=True)
def _machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    (here / "my").mkdir()
    (here / "my/nets.py").write_text("def build(): ...\n")
    torch.save({"weight": torch.zeros(2)}, "weights.pt")


def asked(**options: Any) -> Settings:
    usual = {"models": "gpt2-tiny", "strategies": "baseline", "isolation": "process"}
    return check_suite(usual | options)


def started(folder: str | None = "run", **options: Any) -> Run:
    return start(asked(**options), Path(folder) if folder else None)[0]


def test_a_resumed_run_is_the_run_that_was_planned(here: Path) -> None:
    (here / "mine.py").write_text(LOAD)
    run = started(
        strategies=["./mine.py", "baseline"], repeats=2, timeout_s=5, cache="warm", seed=7,
        checkpoint=Path("weights.pt"), kwargs={"n_layers": 2},
    )  # fmt: skip
    assert [(one.cell.strategy, one.cell.repeat) for one in run.planned] == [
        ("mine", 0), ("baseline", 0), ("mine", 1), ("baseline", 1),
    ]  # fmt: skip
    plan = json.loads((here / "run/plan.json").read_text())
    assert plan["settings"].pop("strategy_paths")["mine"] == f"{here}/mine.py"
    assert plan["settings"] == {
        "models": [{"name": "gpt2-tiny"}], "strategies": [{"name": "./mine.py"}, {"name": "baseline"}],
        "isolation": "process", "cache": "warm", "repeats": 2, "timeout_s": 5.0, "seed": 7,
        "kwargs": {"n_layers": 2}, "checkpoint": f"{here}/weights.pt",
    }  # fmt: skip
    assert plan["cells"][0]["model"]["kwargs"]["n_layers"] == 2
    resumed = resume(Path("run"), trusted=True)
    assert (resumed.planned, resumed.settings) == (run.planned, run.settings)
    assert type(resumed.isolation) is type(run.isolation) is ProcessIsolation


NAMES: list[tuple[str | list[str], str]] = [
    ("gpt2-tiny", "gpt2-tiny"), (["gpt2-tiny", "tied-tiny"], "gpt2-tiny-tied-tiny"),
    ("my.nets:build", "my.nets_build"), ("./tinyqwen/", "tinyqwen"), ("{here}/tinyqwen", "tinyqwen"),
    ("from:tinyqwen/model.safetensors", "model.safetensors"),
    ("from:{here}/my weights.pt", "my_weights.pt"), ("tinyqwen/nets.py:build", "nets_build"),
    ("{here}/tinyqwen/nets.py:build", "nets_build"), ("acme/tiny", "acme_tiny"),
]  # fmt: skip


@pytest.mark.parametrize(("models", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_run_is_named_after_its_time_and_its_models(
    here: Path, models: str | list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    for folder in (here / "tinyqwen", here / "hub/models--acme--tiny/snapshots/1"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
        save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    (here / "hub/models--acme--tiny/refs").mkdir()
    (here / "hub/models--acme--tiny/refs/main").write_text("1")
    (here / "tinyqwen/nets.py").write_text("def build(): ...\n")
    torch.save({"weight": torch.zeros(2)}, "my weights.pt")
    if isinstance(models, str):
        models = models.format(here=here)
    run = started(None, models=models)
    date, _, rest = run.folder.name.partition("-")
    assert len(date) == len("20261120T093000")
    assert (run.folder.parent, rest) == (Path("results"), name)


def training(key: str, name: str = "streaming", *, legacy: bool = False, **options: Any) -> Run:
    strategy = {"name": name, "options": {"key": key}}
    state = {"model": torch.nn.Linear(4, 4).state_dict(), "epoch": 1}
    torch.save(state, "train.pt", _use_new_zipfile_serialization=not legacy)
    return started(strategies=[strategy], checkpoint=Path("train.pt"), key="model", **options)


def test_a_strategy_that_reads_another_part_or_format_than_the_run_starts_nothing(
    here: Path,
) -> None:
    assert refused(training, "ema") == (
        "strategy streaming has the option --key=ema, for which it must read your own file, but this run would convert it\n"
        "give the option to the whole run, and leave --format out: --checkpoint PATH --key=ema"
    )
    alone = [{"name": "baseline", "options": {"key": "model"}}]
    said = [refused(started, strategies=alone), refused(training, "model", format="safetensors")]
    assert all("has the option --key=model, for which it must read" in one for one in said)
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("fmt", "wanted"), [("pt", []), ("pt_legacy", []), ("pt_legacy", ["pt", "pt_legacy"])]
)
def test_a_strategy_reads_its_own_part_in_the_files_format(fmt: str, wanted: list[str]) -> None:
    (planned,) = training("model", legacy=fmt == "pt_legacy", format=wanted).planned
    assert (planned.cell.format, planned.skip) == (fmt, "")


def test_two_strategies_of_one_name_cannot_be_told_apart(here: Path) -> None:
    (here / "baseline.py").write_text(LOAD)
    ours = started("other").planned[0].strategy.path
    assert refused(started, strategies=["baseline", "./baseline.py"]) == (
        f"two strategies are called 'baseline': {ours} and {here}/baseline.py\n"
        "rename one of the two, or measure them in two runs"
    )


@pytest.mark.parametrize("settings", [{}, {"seed": 0}, {"strategy_paths": {}}])
def test_a_plan_that_somebody_else_wrote_is_not_resumed(settings: dict[str, Any]) -> None:
    started()
    plan = json.loads((file := Path("run/plan.json")).read_text())
    file.write_text(json.dumps(plan | {"settings": settings}))
    said = refused(resume, Path("run"))
    assert said.startswith("run/plan.json lacks the strategy or command ")
    assert said.endswith("\nstart a new run")


def test_a_gpu_cell_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_memory.GpuAnswer((gpu_memory.Gpu("Example", 8 * GIB),))
    monkeypatch.setattr(gpu_memory, "look", lambda: found)
    run = started(device="cuda", vram=["8g", "none"])
    assert [one.cell.vram_limit_bytes for one in run.planned] == [8 * GIB, None]


def test_a_user_without_a_home_starts_and_resumes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", "~nobody-of-this-name/cache")
    assert resume(started().folder).planned
    text = refused(temporary_folders.folder)
    assert text.startswith("weighin has no folder for its cache: ")
    assert text.endswith("name a folder for it: WEIGHIN_CACHE=/path weighin ...")


@given(cells=st.integers(0, 60), count=st.integers(1, 12))
def test_every_cell_is_in_one_shard(cells: int, count: int) -> None:
    plan = list(range(cells))
    shards = [run_folder.in_shard(plan, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted(cell for shard in shards for cell in shard) == plan
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_run_of_a_shard_has_the_whole_plan_and_its_own_cells() -> None:
    names = ["baseline", "streaming", "sequential"]
    run = started(strategies=names, shard="2/2")
    assert [each.cell.strategy for each in run.planned] == ["streaming"]
    plan = json.loads(Path("run/plan.json").read_text())
    assert [cell["strategy"] for cell in plan["cells"]] == names
    assert plan["settings"]["shard"] == "2/2"
    assert resume(Path("run")).planned == run.planned


# -- commands


LABELS = Path(__file__).with_name("snapshots") / "labels.txt"


def test_the_label_is_the_script_or_the_program_and_never_code(same: Compare) -> None:
    same(LABELS.name, answered(LABELS, lambda command: label_of(command.split())))


def of_command(name: str = "x", own: dict[str, Any] | None = None, **options: Any) -> Settings:
    """Return the settings of one command; ``own`` are options of the command itself."""
    command = {"name": name, "command": ["sh", "x"]} | (own or {})
    return check_suite({"commands": [command], "isolation": "process", "cwd": "/"} | options)


def test_a_command_becomes_a_plan_of_one_cell_for_each_repeat_and_limit() -> None:
    settings = of_command(repeats=2, own={"environment": {"A": "1"}})
    run, note = start(settings, Path("run"))
    assert note == ""
    cells = [planned.cell for planned in run.planned]
    assert [(cell.repeat, cell.ram_limit_bytes) for cell in cells] == [(0, None), (1, None)]
    (alike,) = {(cell.strategy, cell.command, cell.cache) for cell in cells}
    assert alike == ("x", ("sh", "x"), "as found")
    assert cells[0].environment == {"A": "1"}
    assert isinstance(run.isolation, ProcessIsolation)
    assert (run.folder, run.is_new) == (Path("run"), True)
    assert run.settings == settings
    assert run_folder.read_plan(Path("run")).cells == tuple(cells)


def test_a_shard_of_commands_is_of_the_whole_plan() -> None:
    run, _ = start(of_command(repeats=4, shard="2/2"), Path("run"))
    assert len(run.planned) == 2
    assert len(run_folder.read_plan(Path("run")).cells) == 4


def test_a_label_and_what_was_dropped_are_of_the_cell(here: Path) -> None:
    (here / "data").touch()
    run, _ = start(of_command("mine", {"cold": ["data"]}), Path("run"))
    (planned,) = run.planned
    assert (planned.cell.strategy, planned.cell.cache) == ("mine", "cold")


@pytest.mark.parametrize(
    ("was", "wrong", "name"),
    [
        ('"strategy": "mine"', '"strategy": "other"', "other"),
        ('"operation": "command"', '"operation": "load"', "mine"),  # no load passes for a command
    ],
)
def test_a_plan_that_lacks_the_command_of_a_cell_is_not_resumed(
    was: str, wrong: str, name: str
) -> None:
    start(of_command("mine"), Path("run"))
    text = (path := Path("run/plan.json")).read_text()
    assert was in text
    path.write_text(text.replace(was, wrong))
    assert refused(resume, Path("run")) == (
        f"run/plan.json lacks the strategy or command {name!r}\nstart a new run"
    )


def test_a_folder_without_a_name_is_named_after_the_labels() -> None:
    commands = [{"name": letter * 50, "command": "true"} for letter in "ab"]
    run, _ = start(check_suite({"commands": commands, "isolation": "process"}))
    assert run.folder.parent == Path("results")
    assert run.folder.name.partition("-")[2] == f"{'a' * 50}-{'b' * 9}"
    assert [planned.cell.strategy for planned in run.planned] == ["a" * 50, "b" * 50]


def test_a_planned_command_is_restored_only_if_it_is_trusted() -> None:
    cells = [make_command(repeat=repeat, command=("sh", "x y")) for repeat in range(3)]
    settings = settings_of(cells[0], cwd="/work").as_json()
    planned = [replace(cell, isolation="process") for cell in cells]
    for more, repeats in (({"shard": "2/2"}, [1]), ({}, [0, 1, 2])):
        run_folder.write_plan(Path("run"), planned, settings | more)
        assert "command sh 'x y'" in refused(resume, Path("run"))
        run = resume(Path("run"), trusted=True)
        assert [planned.cell.repeat for planned in run.planned] == repeats
        assert isinstance(run.isolation, ProcessIsolation)
        assert not run.is_new


def test_what_a_plan_would_run_is_listed_once() -> None:
    cells = [make_command(repeat=0), make_command(repeat=1), make_command(command=("a b",))]
    settings = settings_of(*cells, cwd="/work", image="img:1", mounts=("/data",))
    commands = ["command python train.py --epochs 1", "command 'a b'"]
    assert foreign(cells, settings) == ["image img:1", *commands]
    installing = [replace(cells[0], releases="stranger==1.0")]
    assert foreign(installing, settings)[1] == "packages from the index stranger==1.0"
