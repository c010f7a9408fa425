"""What a question becomes: candidates in their order, tables, JSON, and the code to paste."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from rich.console import Console
from safetensors.torch import save_file

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError, UnknownName
from weighin.models.description import spec_of
from weighin.plan.task import Planned
from weighin.predict.prediction import PredictedUse, Prediction, Work
from weighin.recommend import answer
from weighin.recommend.answer import Advice, Question, check_allowed, gather, parts
from weighin.recommend.candidates import FitVerdict, Limits, Speeds
from weighin.recommend.prior_runs import Evidence
from weighin.stream import pretrained_folder
from weighin.stream.pretrained_folder import read_folder
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

LOADED_TO_CPU = {
    name
    for name, info in registry.strategies().items()
    if "cpu" in info.devices and not info.shares_load and not info.needs_adapter
}

Asked = list[Sequence[Planned]]


@pytest.fixture(autouse=True)
def asked(monkeypatch: MonkeyPatch) -> Asked:
    """What was to be predicted; every strategy takes its copies, and a second for each GiB."""
    found: Asked = []

    def predict(planned: Sequence[Planned], **_: Any) -> list[Prediction]:
        found.append(planned)
        return [_predicted(one) for one in planned]

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


def advised(ram: int | None = None, **changes: Any) -> Advice:
    asked: dict[str, Any] = {"model": MODEL, "limits": Limits(ram), "results": Path("nowhere")}
    question = Question(**asked | changes)
    return answer.advise(question, gather(question, lambda _: None))


def printed(advice: Advice, width: int = 160, most: int | None = None) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for part in parts(advice, most):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    return console.export_text()


def test_what_fits_and_asks_for_nothing_is_named_with_its_code() -> None:
    advice = advised(3 * GIB)
    assert advice.best
    assert (advice.best.strategy, advice.best.verdict) == ("mmap_assign", FitVerdict.FITS)
    assert (
        'def load_model(build_model, checkpoint, device="cpu", dtype=torch.float32, **options):'
        in advice.code
    )
    text = printed(advice)
    assert "m as float32 on cpu, 3GiB of RAM" in text
    assert "Use mmap_assign:" in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("baseline")]
    assert "does not fit" in line
    assert "keeps two copies: 4.1 GiB" in line
    assert "Memory and time are predicted." in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("safetensors_mmap")]
    assert line.rstrip().endswith("saved as safetensors, package safetensors")


def _training(one: Planned) -> Prediction:
    """The same prediction with a step of AdamW: four times the model, whatever the load takes."""
    step = 100 * MIB + 4 * SIZE
    use = PredictedUse("adamw", step, step, 4 * SIZE, host_anon_peak_bytes=step)
    return replace(_predicted(one), use=use, floor_bytes=step + 16 * MIB)


def test_for_training_every_way_needs_the_same_and_time_decides(
    monkeypatch: MonkeyPatch,
) -> None:
    planned: list[Planned] = []

    def predict(asked: Sequence[Planned], **options: Any) -> list[Prediction]:
        planned.extend(asked)
        assert not options["forward"]
        return [_training(one) for one in asked]

    monkeypatch.setattr(answer, "predict", predict)
    advice = advised(16 * GIB, use="adamw")
    assert {one.cell.use for one in planned} == {"adamw"}
    assert {one.verdict for one in advice.candidates} == {FitVerdict.FITS}
    assert {one.why for one in advice.candidates} == {"keeps 4.0 times the model: 8.1 GiB"}
    assert advice.best
    assert advice.best.ready_s == min(one.ready_s or 0 for one in advice.candidates)
    assert "for the use adamw" in printed(advice)
    assert advice.as_json()["use"] == "adamw"
    assert advised(8 * GIB, use="adamw").best is None


def test_no_word_of_the_table_is_broken_in_80_columns() -> None:
    advice = advised(3 * GIB)
    table, _, _ = printed(advice, 80).partition("Use mmap_assign:")
    assert max(map(len, table.splitlines())) <= 80
    words = [word.strip(",") for word in table.split()]
    assert set(words) >= LOADED_TO_CPU
    broken = [word for word in words if word not in printed(advice)]
    assert broken == []


def test_below_the_models_size_the_one_that_reads_again_and_again_is_named() -> None:
    advice = advised(GIB)
    assert advice.best
    assert (advice.best.strategy, advice.best.verdict) == ("mmap_assign", FitVerdict.THRASHES)
    text = printed(advice)
    assert (
        "No strategy fits with the whole model in memory. This one works, but slowly. A smaller dtype"
        " (--dtype bf16) or a higher limit may help.\n" in text
    )
    assert "Use mmap_assign:" in text


def test_a_smaller_dtype_is_no_advice_for_a_model_that_has_it() -> None:
    assert printed(advised(64 * MIB, dtype="bfloat16")).endswith(
        "No strategy certainly fits. A higher limit may help.\n"
    )


def test_where_nothing_fits_no_code_is_given() -> None:
    advice = advised(64 * MIB)
    assert (advice.best, advice.code) == (None, "")
    text = printed(advice)
    assert text.endswith(
        "No strategy certainly fits. A smaller dtype (--dtype bf16) or a higher limit may help.\n"
    )


def test_a_reason_that_is_not_memory_gives_no_advice_on_memory(
    monkeypatch: MonkeyPatch,
) -> None:
    def unknown(planned: Sequence[Planned], **_: Any) -> list[Prediction]:
        return [Prediction(one.cell, cannot="the class is missing") for one in planned]

    monkeypatch.setattr(answer, "predict", unknown)
    assert printed(advised(8 * GIB)).endswith(
        "weighin knows of no strategy whether it loads this model: the class is missing.\n"
    )
    monkeypatch.setattr(registry, "strategies", lambda: {})
    assert printed(advised(8 * GIB, allow=())).endswith(
        "No strategy is left: --allow none leaves out all that load this model on cpu.\n"
    )


def test_a_part_of_a_training_checkpoint_is_loaded_without_a_conversion(tmp_path: Path) -> None:
    file = tmp_path / "train.pt"
    torch.save({"model": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, "step": 1}, file)
    advice = advised(8 * GIB, checkpoint=file, selection=Selection("model"), allow=("weighin",))
    asks = {one.strategy: one.asks for one in advice.candidates}
    assert asks == {"streaming": ("weighin",)}
    assert "load_streaming(build_model, " in advice.code
    assert ", key='model')" in advice.code
    everything = advised(8 * GIB, checkpoint=file, selection=Selection("model"))
    asks = {one.strategy: one.asks for one in everything.candidates}
    assert asks["baseline"] == asks["load_assign"] == ("saved as pt",)


@pytest.mark.parametrize(
    ("allow", "refused"),
    [
        ((), {"streaming", "per_param", "per_module", "safetensors_copy", "sharded", "dcp"}),
        (("weighin",), {"per_param", "per_module", "safetensors_copy", "sharded", "dcp"}),
        (("resave",), {"streaming", "safetensors_copy", "safetensors_mmap", "sharded"}),
        (("resave", "packages"), {"streaming"}),
    ],
)
def test_what_is_not_allowed_is_not_named(allow: tuple[str, ...], refused: set[str]) -> None:
    names = {one.strategy for one in advised(8 * GIB, allow=allow).candidates}
    assert not names & refused
    assert "baseline" in names


def test_a_checkpoint_of_ones_own_layout_needs_no_saving_again(
    asked: Asked, tmp_path: Path
) -> None:
    file = tmp_path / "x.safetensors"
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, file)
    advice = advised(8 * GIB, checkpoint=file)
    formats = {one.cell.strategy: one.cell.format for one in asked[0]}
    assert (formats["streaming"], formats["safetensors_copy"]) == ("safetensors", "safetensors")
    asks = {one.strategy: one.asks for one in advice.candidates}
    assert asks["streaming"] == ("weighin",)
    assert asks["safetensors_copy"] == ("safetensors",)
    assert asks["baseline"] == ("saved as pt",)


def test_the_code_of_a_strategy_that_asks_to_save_again_reads_the_saved_file(
    tmp_path: Path,
) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "x.safetensors"
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, file)
    advice = advised(8 * GIB, checkpoint=file, allow=("resave",))
    assert advice.best
    assert advice.best.format == "pt"
    assert "load_model(build_model, 'weights.pt')" in advice.code
    assert any(f"weighin convert {file} weights.pt --format pt" in note for note in advice.notes)


def test_a_gpu_limit_is_said_and_held(asked: Asked) -> None:
    question = Question(MODEL, Limits(None, GIB), device="cuda", results=Path("nowhere"))
    advice = answer.advise(question, gather(question, lambda _: None))
    assert {one.cell.device for one in asked[0]} == {"cuda"}
    assert {one.verdict for one in advice.candidates} == {FitVerdict.TOO_LARGE}
    assert "m as float32 on cuda, 1GiB of GPU memory" in printed(advice)


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


def test_a_checkpoint_alone_is_a_model_of_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(2)}, file)
    spec = registry.model(str(file))
    assert (spec.title, spec.builder) == (
        "weights.pt",
        "weighin.models.synthesised:from_tensors",
    )
    assert [*spec.kwargs] == ["tensors"]
    (tmp_path / "no.pt").write_text("no")
    with pytest.raises(CheckpointError):
        registry.model(str(tmp_path / "no.pt"))


def test_a_checkpoint_without_its_model_says_that_it_knows_less_and_why(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, file)
    alone = advised(8 * GIB, model=registry.model(str(file)), checkpoint=file)
    (note,) = alone.as_json()["notes"]
    assert note.startswith("weights.pt is a checkpoint without the code of its model")
    assert note.endswith(f"weighin recommend --model package:builder --checkpoint {file}")
    assert note in " ".join(printed(alone).split())
    known = advised(8 * GIB, checkpoint=file)
    assert "leaves out" not in printed(known)
    assert known.as_json()["notes"] == []


def test_what_may_be_asked_for_is_named_rightly() -> None:
    assert check_allowed(["none"]) == ()
    assert check_allowed(["resave", "weighin"]) == ("resave", "weighin")
    with pytest.raises(UnknownName):
        check_allowed(["resaving"])


def test_a_phrase_with_brackets_is_no_markup() -> None:
    advice = advised(8 * GIB)
    odd = replace(advice.candidates[0], why="[red]odd[/red]")
    assert "[red]odd[/red]" in printed(replace(advice, candidates=(odd,)))


def test_a_folder_is_loaded_by_one_call_where_other_strategies_are_no_faster(
    tmp_path: Path,
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    folder = read_folder(tmp_path)
    found = advised(model=spec_of(folder), checkpoint=folder.checkpoint, dtype="bfloat16")
    first = found.candidates[0]
    assert (first.strategy, first.asks) == ("transformers", ())
    assert "LlamaForCausalLM.from_pretrained(" in found.code
    by_name = {one.strategy: one.asks for one in found.candidates}
    assert by_name["safetensors_mmap"] == ("code that builds the model",)
    assert by_name["streaming"] == ("weighin",)


def test_the_conversion_of_a_folder_is_with_the_class_the_trust_and_the_adapter_that_were_asked_for(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    code = {"AutoModel": "own.BertModel"}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    folder = read_folder(tmp_path)
    model = spec_of(folder)
    model = replace(model, kwargs={**model.kwargs, "architecture": "BertModel", "code": "trusted"})
    monkeypatch.setattr(pretrained_folder, "adapter_of", lambda _: tmp_path / "lora")
    found = advised(model=model, checkpoint=folder.checkpoint)
    resaved = replace(found.candidates[0], format="per_param", asks=("saved as per_param",))
    asked = replace(found, candidates=(resaved,))
    command = next(note for note in asked.notes if "weighin convert" in note)
    chosen = f"--keys model --set model_class=BertModel --trust-remote-code --adapter {tmp_path / 'lora'}"
    assert command.endswith(chosen)
