"""A pipeline of diffusers is shown by its parts; a verb that takes one model names the largest part."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from click.testing import CliRunner
from factories import make_cell
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.cli.app import app
from weighin.errors import CheckpointError
from weighin.predict.prediction import PredictedPhase, Prediction
from weighin.predict.tables import ONE_AFTER_THE_OTHER, TOGETHER, combined, strategies_for
from weighin.settings.definition import Settings, SuiteStrategy
from weighin.stream import pipeline

WEIGHTS = "diffusion_pytorch_model.safetensors"
GIB = 1024**3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a pipeline of a unet and a smaller vae, without a tokenizer's folder."""
    index = {
        "_class_name": "TestPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "PNDMScheduler"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "safety_checker": [None, None],
        "../outside": ["diffusers", "UNet2DModel"],
        "force_zeros": True,
    }
    root = tmp_path / "pipe line"
    for name in ("vae", "unet", "scheduler"):
        (root / name).mkdir(parents=True)
    for name, size in (("unet", 64), ("vae", 16)):
        save_file({"w": torch.ones(size)}, root / name / WEIGHTS)
        (root / name / "config.json").write_text('{"_class_name": "X"}')
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=True)
    if isinstance(result.exception, CheckpointError):
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_parts_of_a_pipeline_are_shown_with_their_sizes(folder: Path) -> None:
    shown = json.loads(run("inspect", str(folder), "--json", "-"))
    assert [(one["name"], one["class"], one["totals"]["bytes"]) for one in shown["parts"]] == [
        ("unet", "UNet2DConditionModel", 256),
        ("vae", "AutoencoderKL", 64),
    ]
    assert (shown["pipeline"], shown["totals"]["bytes"]) == ("TestPipeline", 320)
    assert (shown["without_weights"], shown["missing"]) == (["scheduler"], ["tokenizer"])
    text = " ".join(run("inspect", str(folder)).split())
    assert "unet UNet2DConditionModel safetensors float32 1 256 B" in text
    assert "a pipeline of diffusers, TestPipeline, 2 models, 320 B" in text
    assert f"weighin inspect {shlex.quote(str(folder / 'unet'))}" in text


def test_a_part_that_cannot_be_read_does_not_hide_the_others(folder: Path) -> None:
    (folder / "vae" / WEIGHTS).write_bytes(b"x" * 100)
    shown = json.loads(run("inspect", str(folder), "--json", "-"))
    unet, vae = shown["parts"]
    assert unet["error"] is None and str(folder / "vae" / WEIGHTS) in vae["error"]
    assert shown["totals"]["bytes"] == 256


@pytest.mark.parametrize(
    ("words", "more"),
    [(("bench",), ("--ram", "8g")), (("floor",), ()), (("convert",), ("out.safetensors",))],
)
def test_a_verb_that_takes_one_model_names_the_largest(
    folder: Path, words: tuple[str, ...], more: tuple[str, ...]
) -> None:
    assert run(*words, str(folder), *more) == (
        f"{folder}: a diffusers pipeline of 2 models: unet (328 B), vae (128 B)\ngive one of them;"
        f" the largest: {folder / 'unet'}"
    )


def test_load_pretrained_names_the_parts(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="a diffusers pipeline of 2 models: unet"):
        load_pretrained(folder)


def test_a_damaged_index_leaves_the_folders_with_weights(folder: Path) -> None:
    (folder / "model_index.json").write_text("[" * 5000)
    assert [part.name for part in pipeline.read(folder).models] == ["unet", "vae"]


def predicted(strategy: str, peak: int, stays: int, model: int) -> Prediction:
    """Return the prediction of a load above a baseline of 1 GiB, all sizes in GiB."""
    cell = replace(make_cell(strategy), ram_limit_bytes=None)
    touch = PredictedPhase(
        "touch", host_anon_peak_bytes=(1 + stays) * GIB, host_file_peak_bytes=3 * GIB
    )
    return Prediction(
        cell,
        model_bytes=model * GIB,
        baseline_anon_bytes=GIB,
        baseline_file_bytes=2 * GIB,
        host_anon_peak_bytes=(1 + peak) * GIB,
        host_anon_most_bytes=(1 + peak) * GIB,
        host_file_peak_bytes=3 * GIB,
        floor_bytes=(1 + peak) * GIB + 1,
        phases=(touch,),
    )


def test_parts_that_stay_add_up_and_one_load_comes_on_top() -> None:
    parts = {
        "unet": [predicted("baseline", peak=8, stays=4, model=4)],
        "vae": [predicted("baseline", peak=3, stays=1, model=1)],
    }
    together, alone = combined(parts)
    assert (together.held, alone.held) == (TOGETHER, ONE_AFTER_THE_OTHER)
    assert together.host_anon_peak_bytes == (1 + (4 + 1) + (8 - 4)) * GIB
    assert together.host_file_peak_bytes == (2 + 1 + 1) * GIB
    assert alone.host_anon_peak_bytes == (1 + 8) * GIB
    assert (together.model_bytes, alone.model_bytes) == (5 * GIB, 4 * GIB)
    assert alone.floor_bytes == (1 + 8) * GIB + 1
    assert together.floor_bytes == 10 * GIB + 1 + GIB // 512


def test_a_part_without_a_prediction_leaves_the_pipeline_without_one() -> None:
    why = Prediction(make_cell("baseline"), cannot="no such class")
    (together, _) = combined({"unet": [predicted("baseline", 1, 1, 1)], "vae": [why]})
    assert (together.cannot, together.floor_bytes) == ("vae: no such class", None)


def test_each_part_is_predicted_with_the_loader_of_its_own_library() -> None:
    streaming, transformers, diffusers = (
        SuiteStrategy(name=name, options={"disable_mmap": name})
        for name in ("streaming", "transformers", "diffusers")
    )
    plain = SuiteStrategy(name="diffusers")
    assert strategies_for([streaming, transformers], "diffusers") == [streaming, plain]
    assert strategies_for([diffusers, transformers], "transformers") == [transformers]
    assert strategies_for([streaming, transformers], "") == [streaming, transformers]


@pytest.mark.parametrize("model", ['"pipe line"', '["pipe line"]'])
@pytest.mark.parametrize("names", ['"transformers,streaming"', '["transformers", "streaming"]'])
def test_the_strategies_of_a_file_are_those_of_each_parts_library_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, names: str
) -> None:
    asked = dict[str, list[str]]()

    def predictions(_: object, settings: Settings, prefix: str = "") -> list[Prediction]:
        asked[prefix] = [each.name for each in settings.strategies]
        return [predicted("baseline", 1, 1, 1)]

    monkeypatch.setattr("weighin.cli.predict._predictions", predictions)
    monkeypatch.chdir(folder.parent)
    Path("pyproject.toml").write_text(f"[tool.weighin]\nmodel = {model}\nstrategies = {names}\n")
    run("predict")
    assert asked == {"unet, ": ["diffusers", "streaming"], "vae, ": ["diffusers", "streaming"]}
    run("predict", "pipe line", "--strategies", "streaming")
    assert asked == {"unet, ": ["streaming"], "vae, ": ["streaming"]}


@pytest.mark.parametrize("verb", ["predict", "recommend"])
def test_a_suites_pipeline_keeps_its_settings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    asked: list[Settings] = []

    def take(_: object, settings: Settings, *_prefix: str) -> NoReturn:
        asked.append(settings)
        raise CheckpointError("enough")

    name = {"predict": "predict._predictions", "recommend": "recommend.question_of"}[verb]
    monkeypatch.setattr(f"weighin.cli.{name}", take)
    monkeypatch.chdir(tmp_path)
    about = f"folder: {json.dumps(str(folder))}, name: mine, dtype: bf16, adapter: lora"
    entry = f"models: [{{{about}}}]\nstrategies: [{{name: streaming, options: {{threads: 2}}}}]\n"
    if verb == "predict":
        Path("suite.yaml").write_text(entry)
        assert run(verb, "--suite", "suite.yaml") == "enough"
        assert asked[0].strategies[0].options == {"threads": 2}
    else:
        table = about.replace(": ", " = ").replace("= mine", "= 'mine'")
        table = table.replace("= bf16", "= 'bf16'").replace("= lora", "= 'lora'")
        Path("pyproject.toml").write_text(f"[tool.weighin]\nmodel = [{{{table}}}]\n")
        assert run(verb) == "enough"
    [model] = asked[0].models
    assert (model.source, model.dtype, model.adapter) == (str(folder / "unet"), "bfloat16", "lora")
