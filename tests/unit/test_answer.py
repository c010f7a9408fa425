"""What a question becomes: candidates in their order, tables, JSON, and the code to paste."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from rich.console import Console
from safetensors.torch import save_file
from snapshots import Compare

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.models.description import spec_of
from weighin.plan.task import Planned
from weighin.predict.prediction import PredictedUse, Prediction, Work
from weighin.recommend import answer
from weighin.recommend.answer import Advice, Question, gather, parts
from weighin.recommend.candidates import Limits, Speeds
from weighin.recommend.prior_runs import Evidence
from weighin.stream import hugging_face_folder
from weighin.stream.hugging_face_folder import PretrainedFolder, read_folder
from weighin.stream.pretrained_library import Selection
from weighin.suite import registry
from weighin.units import GIB, MIB

MODEL = ModelSpec("m", "torch.nn:Linear", {"in_features": 2, "out_features": 2})
SIZE = 2 * GIB
COPIES = {
    "baseline": 2, "sequential": 2, "meta_copy": 2, "mmap_assign": 0, "per_param_mmap": 0,
    "safetensors_mmap": 0, "prefetch_mmap": 0, "transformers": 0, "eager": 2,
}  # fmt: skip
"""Of the weights, in memory; one for every other strategy."""

Asked = list[Sequence[Planned]]


@pytest.fixture(autouse=True)
def asked(monkeypatch: MonkeyPatch) -> Asked:
    """What was to be predicted; every strategy takes its copies, and a second for each GiB."""
    found: Asked = []

    def predict(planned: Sequence[Planned], *, forward: bool, **_: Any) -> list[Prediction]:
        found.append(planned)
        assert not forward  # no answer here is for that use
        return [_training(one) if one.cell.use else _predicted(one) for one in planned]

    monkeypatch.setattr(answer, "predict", predict)
    monkeypatch.setattr(answer, "USUAL", Speeds(GIB, GIB, GIB, GIB, GIB, GIB, 0, 0))
    return found


def _predicted(one: Planned) -> Prediction:
    held = COPIES.get(one.cell.strategy, 1) * SIZE
    return Prediction(
        one.cell,
        model_bytes=SIZE,
        baseline_anon_bytes=100 * MIB,
        host_anon_peak_bytes=100 * MIB + held,
        tensor_peak_bytes=held,
        floor_bytes=116 * MIB + held,
        cuda_reserved_bytes=SIZE if one.cell.device != "cpu" else None,
        work=Work(fresh_bytes=held) if held else Work(mapped_bytes=SIZE),
    )


def _training(one: Planned) -> Prediction:
    """The same prediction with a step of AdamW: four times the model, whatever the load takes."""
    step = 100 * MIB + 4 * SIZE
    use = PredictedUse("adamw", step, step, 4 * SIZE, host_anon_peak_bytes=step)
    return replace(_predicted(one), use=use, floor_bytes=step + 16 * MIB)


def advised(ram: int | None = None, **changes: Any) -> Advice:
    asked: dict[str, Any] = {"model": MODEL, "limits": Limits(ram), "results": Path("nowhere")}
    question = Question(**asked | changes)
    return answer.advise(question, gather(question, lambda _: None))


def printed(advice: Advice, width: int = 160, most: int | None = None) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for part in parts(advice, most):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    return console.export_text()


def saved(name: str, **more: Any) -> Path:
    """Save a state dict of ``MODEL`` in the current folder."""
    path, state = Path(name), {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"model": state, **more} if more else state, path)
    return path


def folder_of(name: str, **config: Any) -> PretrainedFolder:
    (path := Path(name)).mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(2)}, path / "model.safetensors")
    return read_folder(path)


def asked_for() -> dict[str, dict[str, Any]]:
    """Questions by their names; "..." has the first three candidates only."""
    part = {
        "ram": 8 * GIB,
        "checkpoint": saved("train.pt", step=1),
        "selection": Selection("model"),
    }
    ours = {"ram": 8 * GIB, "checkpoint": saved("x.safetensors")}
    alone, extra = saved("weights.pt"), Path("extra.pt")
    torch.save({"w": torch.zeros(2), "_extra_state": {"scale": np.float32(2)}}, extra)
    folder = folder_of("llama", architectures=["LlamaForCausalLM"], model_type="llama")
    return {
        "what fits and asks for nothing": {"ram": 3 * GIB},
        "below the model's size: the one that reads again and again ...": {"ram": GIB},
        "nothing fits ...": {"ram": 64 * MIB},
        "nothing fits, and the dtype is small ...": {"ram": 64 * MIB, "dtype": "bfloat16"},
        "too little for training ...": {"ram": 8 * GIB, "use": "adamw"},
        "for training every way needs the same, and time decides ...": {"ram": 16 * GIB, "use": "adamw"},
        "too large for the GPU ...": {"limits": Limits(None, GIB), "device": "cuda"},
        "without a limit ...": {},
        "nothing is allowed": {"allow": ()},
        "only weighin is allowed": {"allow": ("weighin",)},
        "only another layout is allowed": {"allow": ("resave",)},
        "another layout and packages are allowed": {"allow": ("resave", "packages")},
        "a part of a training checkpoint is read by others when it was saved again": part,
        "such a part without a conversion": {**part, "allow": ("weighin",)},
        "such a part after a conversion ...": {**part, "allow": ("resave",)},
        "values that torch.load may refuse are beside the tensors ...": {"ram": 8 * GIB, "checkpoint": extra},
        "a checkpoint of safetensors": ours,
        "a checkpoint of safetensors that may be saved again ...": {**ours, "allow": ("resave",)},
        "a checkpoint without its model ...": {"model": registry.model(str(alone)), "checkpoint": alone},
        "the same with its model ...": {"checkpoint": alone},
        "a folder, by one call": {"model": spec_of(folder), "checkpoint": folder.checkpoint},
    }  # fmt: skip


def test_answers_in_words_and_tables(
    same: Compare, asked: Asked, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = []
    for name, settings in asked_for().items():
        advice = advised(**settings)
        assert {one.cell.use for one in asked[-1]} == {settings.get("use", "")}
        assert {one.cell.device for one in asked[-1]} == {settings.get("device", "cpu")}
        shown = printed(advice, most=3 if name.endswith("...") else None)
        lines = [line.rstrip() for line in shown.partition("\nimport ")[0].strip().splitlines()]
        kept = advice.as_json()
        lines += [f"{key}: {kept[key]}" for key in ("recommended", "use", "notes")]
        lines += advice.code.splitlines()[-1:]
        texts.append("\n".join([f"# {name}", "", *lines, ""]))
    same("answers.txt", "\n".join(texts).replace(str(tmp_path), "HERE"))


def test_a_reason_that_is_not_memory_gives_no_advice_on_memory(monkeypatch: MonkeyPatch) -> None:
    def unknown(planned: Sequence[Planned], **_: Any) -> list[Prediction]:
        return [Prediction(one.cell, cannot="the class is missing") for one in planned]

    monkeypatch.setattr(answer, "predict", unknown)
    assert printed(advised(8 * GIB)).endswith(
        "weighin cannot tell whether any strategy loads this model: the class is missing.\n"
    )
    monkeypatch.setattr(registry, "strategies", lambda: {})
    assert printed(advised(8 * GIB, allow=())).endswith(
        "--allow none leaves out every strategy that loads this model on cpu.\n"
    )


def test_a_machine_that_was_slow_when_it_measured_is_named_the_same(
    monkeypatch: MonkeyPatch,
) -> None:
    quiet = {one.strategy: one.ready_s for one in advised(8 * GIB).candidates}
    slow = Evidence([None], [], 100 * MIB, None, {None: [4.5 * (quiet["mmap_assign"] or 0)]})
    monkeypatch.setattr(answer, "find", lambda *_: {("mmap_assign", "pt"): slow})
    advice = advised(8 * GIB)
    assert advice.best
    assert advice.best.strategy == "mmap_assign"
    times = {one.strategy: one.ready_s for one in advice.candidates}
    assert times == pytest.approx({name: 4.5 * (seconds or 0) for name, seconds in quiet.items()})


def test_a_use_that_can_only_be_measured_is_refused_until_it_was(monkeypatch: MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the use fork can only be measured"):
        advised(use="fork")
    kept = Evidence([None], [], 3 * GIB)
    monkeypatch.setattr(answer, "find", lambda *_: {("mmap_assign", "pt"): kept})
    forked = {one.strategy: one.memory_from for one in advised(use="fork").candidates}
    assert forked["mmap_assign"] == "measured"


def test_a_strategy_that_cannot_be_written_out_is_named_by_its_file(
    monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def load(job):\n    return helper(job)\n")
    mine = registry.read_strategy(path)
    monkeypatch.setattr(registry, "strategies", lambda: {"mine": mine})
    monkeypatch.setattr(registry, "strategy", lambda _: mine)
    assert advised().code == (
        "# mine cannot be written as one function: load() passes on the whole job object."
        f" Its code is in {mine.path}\n"
    )


def test_a_phrase_with_brackets_is_no_markup() -> None:
    advice = advised(8 * GIB)
    odd = replace(advice.candidates[0], why="[red]odd[/red]")
    assert "[red]odd[/red]" in printed(replace(advice, candidates=(odd,)))


def test_the_conversion_of_a_folder_is_with_the_class_the_trust_and_the_adapter_that_were_asked_for(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = {"AutoModel": "own.BertModel"}
    folder = folder_of("bert", architectures=["BertForMaskedLM"], model_type="bert", auto_map=code)
    model = spec_of(folder)
    model = replace(model, kwargs={**model.kwargs, "architecture": "BertModel", "code": "trusted"})
    monkeypatch.setattr(hugging_face_folder, "adapter_of", lambda _: tmp_path / "lora")
    found = advised(model=model, checkpoint=folder.checkpoint)
    resaved = replace(found.candidates[0], format="per_param", asks=("saved as per_param",))
    command = next(
        note for note in replace(found, candidates=(resaved,)).notes if "weighin convert" in note
    )
    chosen = f"--keys model --set model_class=BertModel --trust-remote-code --adapter {tmp_path / 'lora'}"
    assert command.endswith(chosen)
