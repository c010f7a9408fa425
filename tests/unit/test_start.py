"""From what was asked for to a run, and from its folder back to the same run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weighin.checkpoint import staging
from weighin.errors import HarnessError, RecordError
from weighin.isolation.process import ProcessIsolation
from weighin.plan.start import resume, start
from weighin.plan.task import Run
from weighin.probes import environment, gpu_memory
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


def complaint(act: Callable[[], object]) -> str:
    with pytest.raises(HarnessError) as caught:
        act()
    return str(caught.value)


def test_settings_become_a_run() -> None:
    settings = asked(strategies=["baseline", "streaming"], repeats=2, timeout_s=5)
    run, note = start(settings, Path("run"))
    assert note == ""
    assert [(p.cell.strategy, p.cell.repeat) for p in run.planned] == [
        ("baseline", 0),
        ("streaming", 0),
        ("baseline", 1),
        ("streaming", 1),
    ]
    assert isinstance(run.isolation, ProcessIsolation)
    assert run.folder == Path("run")
    assert run.settings.timeout_s == 5
    assert (run.settings.seed, run.settings.checkpoint) == (0, None)


def test_the_plan_holds_what_a_resumed_run_must_repeat(here: Path) -> None:
    (here / "mine.py").write_text(LOAD)
    started(
        strategies="./mine.py",
        seed=7,
        checkpoint=Path("weights.pt"),
        kwargs={"n_layers": 2},
    )
    plan = json.loads((here / "run/plan.json").read_text())
    assert plan["settings"] == {
        "models": [{"name": "gpt2-tiny"}],
        "strategies": [{"name": "./mine.py"}],
        "isolation": "process",
        "kwargs": {"n_layers": 2},
        "seed": 7,
        "checkpoint": f"{here}/weights.pt",
        "strategy_paths": {"mine": f"{here}/mine.py"},
    }
    assert plan["cells"][0]["model"]["kwargs"]["n_layers"] == 2


def test_a_resumed_run_is_the_run_that_was_planned(here: Path) -> None:
    (here / "mine.py").write_text(LOAD)
    run = started(
        strategies=["./mine.py", "baseline"],
        repeats=2,
        timeout_s=5,
        cache="warm",
        seed=7,
        checkpoint=Path("weights.pt"),
    )
    resumed = resume(Path("run"), trusted=True)
    assert resumed.planned == run.planned
    assert resumed.settings == run.settings
    assert (resumed.settings.seed, resumed.settings.timeout_s) == (7, 5)
    assert isinstance(resumed.isolation, ProcessIsolation)


@pytest.mark.parametrize(
    ("models", "ram", "name"),
    [
        ("gpt2-tiny", "none", "gpt2-tiny"),
        (["gpt2-tiny", "tied-tiny"], "none", "gpt2-tiny-tied-tiny"),
        ("my.nets:build", "none", "my.nets_build"),
        ("./tinyqwen/", "none", "tinyqwen"),
        ("{here}/tinyqwen", "none", "tinyqwen"),
        ("from:tinyqwen/model.safetensors", "none", "model.safetensors"),
        ("from:{here}/my weights.pt", "none", "my_weights.pt"),
        ("tinyqwen/nets.py:build", "none", "nets_build"),
        ("{here}/tinyqwen/nets.py:build", "none", "nets_build"),
        ("./tinyqwen/nets.py:build", "none", "nets_build"),
        ("acme/tiny", "none", "acme_tiny"),
    ],
)
def test_a_run_is_named_after_its_time_and_its_models(
    here: Path, models: str | list[str], ram: str, name: str, monkeypatch: pytest.MonkeyPatch
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
    run = started(None, models=models, ram=ram)
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
    assert complaint(lambda: training("ema")) == (
        "with its option --key=ema, strategy streaming reads your checkpoint itself\n"
        "give the run the same part and format: --checkpoint PATH --key=ema, without --format"
    )
    alone = [{"name": "baseline", "options": {"key": "model"}}]
    for start_it in (
        lambda: started(strategies=alone),
        lambda: training("model", format="safetensors"),
    ):
        assert complaint(start_it).startswith("with its option --key=model, strategy ")
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
    assert complaint(lambda: started(strategies=["baseline", "./baseline.py"])) == (
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
    with pytest.raises(RecordError) as caught:
        resume(Path("run"))
    assert caught.value.message.startswith("run/plan.json lacks the strategy or command ")
    assert caught.value.repair == "start a new run"


def test_a_gpu_cell_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_memory, "look", lambda: gpu_memory.GpuAnswer((gpu_memory.Gpu("Example", 8 * GIB),))
    )
    run = started(device="cuda", vram=["8g", "none"])
    assert [one.cell.vram_limit_bytes for one in run.planned] == [8 * GIB, None]


def test_a_user_without_a_home_starts_and_resumes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", "~nobody-of-this-name/cache")
    assert resume(started().folder).planned
    text = complaint(staging.folder)
    assert text.startswith("there is no folder for weighin's cache: ")
    assert text.endswith("name a folder: WEIGHIN_CACHE=/path weighin ...")
