"""From what was asked for to a run, and from its folder back to the same run; shards of a plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from weighin.checkpoint import temporary_folders
from weighin.isolation.process import ProcessIsolation
from weighin.plan.start import resume, start
from weighin.plan.task import Run
from weighin.probes import environment, gpu_memory
from weighin.records.run_folder import in_shard
from weighin.settings.definition import Settings, check_suite
from weighin.units import GIB

LOAD = '"""Load."""\nDEVICES = ("cpu",)\n\ndef load(job): ...\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    for name in ("nets", "other"):
        (tmp_path / "my").mkdir(exist_ok=True)
        (tmp_path / f"my/{name}.py").write_text("def build(): ...\n")
    torch.save({"weight": torch.zeros(2)}, "weights.pt")
    return tmp_path


def asked(**options: Any) -> Settings:
    usual = {"models": "gpt2-tiny", "strategies": "baseline", "isolation": "process"}
    return check_suite(usual | options)


def started(folder: str | None = "run", **options: Any) -> Run:
    return start(asked(**options), Path(folder) if folder else None)[0]


def test_a_resumed_run_is_the_run_that_was_planned(here: Path) -> None:
    (here / "mine.py").write_text(LOAD)
    run = started(
        strategies=["./mine.py", "baseline"],
        repeats=2,
        timeout_s=5,
        cache="warm",
        seed=7,
        checkpoint=Path("weights.pt"),
        kwargs={"n_layers": 2},
    )
    assert [(one.cell.strategy, one.cell.repeat) for one in run.planned] == [
        ("mine", 0), ("baseline", 0), ("mine", 1), ("baseline", 1),
    ]  # fmt: skip
    plan = json.loads((here / "run/plan.json").read_text())
    assert plan["settings"].pop("strategy_paths")["mine"] == f"{here}/mine.py"
    assert plan["settings"] == {
        "models": [{"name": "gpt2-tiny"}],
        "strategies": [{"name": "./mine.py"}, {"name": "baseline"}],
        "isolation": "process",
        "cache": "warm",
        "repeats": 2,
        "timeout_s": 5.0,
        "kwargs": {"n_layers": 2},
        "seed": 7,
        "checkpoint": f"{here}/weights.pt",
    }
    assert plan["cells"][0]["model"]["kwargs"]["n_layers"] == 2
    resumed = resume(Path("run"), trusted=True)
    assert resumed.planned == run.planned
    assert resumed.settings == run.settings
    assert isinstance(resumed.isolation, ProcessIsolation)
    assert isinstance(run.isolation, ProcessIsolation)


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
        "with its option --key=ema, strategy streaming reads your own file, and not a copy that weighin makes\n"
        "give the run the same part and format: --checkpoint PATH --key=ema, without --format"
    )
    alone = [{"name": "baseline", "options": {"key": "model"}}]
    for start_it in (
        lambda: started(strategies=alone),
        lambda: training("model", format="safetensors"),
    ):
        assert refused(start_it).startswith("with its option --key=model, strategy ")
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
def test_a_plan_that_somebody_else_wrote_is_not_resumed(
    here: Path, settings: dict[str, Any]
) -> None:
    started()
    plan = json.loads((here / "run/plan.json").read_text())
    (here / "run/plan.json").write_text(json.dumps(plan | {"settings": settings}))
    said = refused(resume, Path("run"))
    assert said.startswith("run/plan.json lacks the strategy or command ")
    assert said.endswith("\nstart a new run")


def test_a_gpu_cell_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_memory, "look", lambda: gpu_memory.GpuAnswer((gpu_memory.Gpu("Example", 8 * GIB),))
    )
    run = started(device="cuda", vram=["8g", "none"])
    assert [one.cell.vram_limit_bytes for one in run.planned] == [8 * GIB, None]


def test_a_user_without_a_home_starts_and_resumes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", "~nobody-of-this-name/cache")
    assert resume(started().folder).planned
    text = refused(temporary_folders.folder)
    assert text.startswith("there is no folder for weighin's cache: ")
    assert text.endswith("name a folder: WEIGHIN_CACHE=/path weighin ...")


@given(cells=st.integers(0, 60), count=st.integers(1, 12))
def test_every_cell_is_in_one_shard(cells: int, count: int) -> None:
    plan = list(range(cells))
    shards = [in_shard(plan, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted(cell for shard in shards for cell in shard) == plan
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_run_of_a_shard_has_the_whole_plan_and_its_own_cells() -> None:
    names = ["baseline", "streaming", "sequential"]
    assert refused(started, strategies=names, shard="4/4") == (
        "shard 4/4: the plan has only 3 cells\ndivide the plan into 3 shards at most"
    )
    assert not Path("run").exists()
    run = started(strategies=names, shard="2/2")
    assert [each.cell.strategy for each in run.planned] == ["streaming"]
    plan = json.loads(Path("run/plan.json").read_text())
    assert [cell["strategy"] for cell in plan["cells"]] == names
    assert plan["settings"]["shard"] == "2/2"
    assert resume(Path("run")).planned == run.planned
