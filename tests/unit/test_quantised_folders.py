"""Quantised checkpoints: codes are never loaded as weights, and from_pretrained's load is measured.

Dequantised models of each method, in other dtypes and sizes, are drawn by tests/checkpoints/conversions.py.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from factories import planned, refused
from model_differences import differences, state_differences
from nightly import nightly
from pytest import MonkeyPatch
from quantised_folders import (
    DEQUANTISED,
    LAYOUTS,
    LLAMA,
    OURS,
    UNREAD,
    fp8_blocks,
    plain_model,
    quantised_state,
    write_folder,
)
from safetensors.torch import load_file, save_file
from typed_here import typed
from worker_jobs import checked_load

from weighin import load_pretrained, load_streaming
from weighin.checkpoint.generate import index
from weighin.models import pretrained
from weighin.models.pretrained import arguments_to_dequantise, pretrained_class
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.stream import formats, quantised
from weighin.stream.hugging_face_folder import read_folder
from weighin.suite import registry
from weighin.worker import verify

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that writes a folder of ``LAYOUTS``, once."""
    root = tmp_path_factory.mktemp("quantised")

    def written(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        return folder if folder.exists() else write_folder(folder, name)

    return written


def run(*words: object) -> tuple[int, str]:
    code, text = typed(*words, columns=200)
    return code, " ".join(text.split())


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def cells_of(folder: Path, *strategies: str, operation: Any = "load") -> list[Planned]:
    pairs: list[tuple[registry.StrategyInfo, dict[str, Any]]] = [
        (registry.strategy(name, operation), {}) for name in strategies
    ]
    spec = registry.model(str(folder))
    return planned((spec,), pairs, operation=operation, own_formats={spec.title: "safetensors"})


@pytest.mark.parametrize("name", ["fp8", "gptq"])
def test_neither_a_builder_nor_a_module_nor_a_file_alone_takes_codes(make: Make, name: str) -> None:
    words, folder = "which mean nothing without their scales", make(name)
    models: list[Any] = [partial(plain_model, "fp8"), torch.nn.ModuleDict()]
    for model in models:
        assert words in refused(load_streaming, model, folder)
    file, spec = folder / "model.safetensors", registry.model("gpt2-tiny")
    assert words in refused(registry.model, str(file))
    assert words in refused(index, spec, checkpoint=file, fmt="safetensors", folder=folder)


def test_a_model_that_has_the_scales_takes_codes_as_they_are(tmp_path: Path) -> None:
    class Quantised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.zeros(4, 6, dtype=torch.float8_e4m3fn)
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.weight_scale_inv = torch.nn.Parameter(torch.zeros(1, 1))

    state = fp8_blocks("layer", torch.randn(4, 6))
    save_file(state, file := tmp_path / "model.safetensors")
    model = load_streaming(lambda: torch.nn.ModuleDict({"layer": Quantised()}), file)
    assert state_differences(model.state_dict(), state) == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, *nightly(torch.int8)])
@pytest.mark.parametrize("method", [None, "fp8", *nightly("of-another-library")])
def test_codes_of_unknown_names_are_refused_for_the_key_that_is_left_out(
    tmp_path: Path, method: str | None, dtype: torch.dtype
) -> None:
    state = plain_model("fp8").state_dict()
    name = "model.layers.0.mlp.up_proj"
    codes = state.pop(f"{name}.weight").float().mul(100).round().to(dtype)
    state |= {f"{name}.weight": codes, f"{name}.step": torch.ones(1)}
    plain_model("fp8").save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    if method:
        configure(tmp_path, quantization_config={"quant_method": method})
    kind = str(dtype).removeprefix("torch.")
    words = f"{name}.weight is {kind} in the file, but the model has no {name}.step: these are quantised values, which mean nothing without this scale"
    file, target = tmp_path / "model.safetensors", tmp_path / "written.safetensors"
    assert refused(load_pretrained, tmp_path).split("\n")[0] == f"{file}: {words}"
    code, text = run("convert", file, target, "--keys", "model", "--verify")
    assert code == 2
    assert words in text
    assert not target.exists()


def test_a_key_that_from_pretrained_leaves_out_is_left_out(tmp_path: Path) -> None:
    (model := plain_model("fp8")).save_pretrained(tmp_path)
    state = model.state_dict() | {"model.layers.0.mlp.step": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    wanted, told = type(model).from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert set(told["unexpected_keys"]) == {"model.layers.0.mlp.step"}
    assert differences(load_pretrained(tmp_path), wanted, tensors_only=True) == []


def test_scales_beside_usual_weights_are_no_quantisation(tmp_path: Path) -> None:
    state = {"up.weight": torch.randn(4, 4), "up.weight_scale": torch.ones(4)}
    state |= {"counts": torch.arange(4), "counts_scale": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors")
    assert quantised.in_checkpoint(tmp_path, formats.read(tmp_path / "model.safetensors")) is None
    assert registry.model(str(tmp_path / "model.safetensors")).builder


def dequantised(folder: Path) -> Any:
    """Return what load_pretrained gives, which is what from_pretrained gives, bit by bit."""
    arguments = arguments_to_dequantise(folder / "model.safetensors")
    assert arguments["quantization_config"].dequantize
    kind = pretrained_class(read_folder(folder).wanted)
    wanted, found = kind.from_pretrained(folder, dtype="auto", **arguments), load_pretrained(folder)
    assert differences(found, wanted, tensors_only=True) == []
    assert found.config.to_dict() == wanted.config.to_dict()
    assert not hasattr(found, "hf_quantizer")
    assert found.is_quantized is False
    return found


@pytest.mark.filterwarnings("ignore")  # of from_pretrained, about the configuration
@pytest.mark.parametrize("name", [*DEQUANTISED, "fp8 beside weights of other dtypes"])
def test_the_dequantised_model_is_that_of_from_pretrained(
    make: Make, name: str, tmp_path: Path
) -> None:
    """Weights that are no codes keep the dtypes of the file."""
    folder = make(name.partition(" ")[0])
    if name not in DEQUANTISED:
        folder = shutil.copytree(folder, tmp_path / "folder")
        state = load_file(folder / "model.safetensors")
        state["model.norm.weight"] = state["model.norm.weight"].float()
        state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].half()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    found = dequantised(folder)
    if name not in DEQUANTISED:
        kept = [found.model.norm.weight.dtype, found.model.embed_tokens.weight.dtype]
        assert kept == [torch.float32, torch.float16]


SEVERAL_SCALES = {
    **LLAMA,
    "hidden_size": 256,
    "intermediate_size": 384,
    "tie_word_embeddings": True,
}
"""Settings of matrices of several blocks of 128 x 128, the largest of which is read in two pieces."""
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 5, "decoder_sparse_step": 1}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True},
    "Qwen3MoeForCausalLM": EXPERTS,
}


@pytest.mark.filterwarnings("ignore")  # of from_pretrained, about the configuration
@pytest.mark.parametrize("scales", ["of blocks", "of channels", "one of the matrix"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_fp8_has_its_own_scales_also_with_ties_biases_and_experts(
    kind: str, scales: str, tmp_path: Path
) -> None:
    made = pretrained_class(kind)
    torch.manual_seed(0)
    model = made(made.config_class(**SEVERAL_SCALES, **KINDS[kind])).to(torch.bfloat16)
    model.save_pretrained(tmp_path)  # which writes each expert by itself
    state: dict[str, torch.Tensor] = {}
    for key, value in load_file(tmp_path / "model.safetensors").items():
        is_packed = key.endswith("_proj.weight")
        packed = fp8_blocks(key.removesuffix(".weight"), value.float()) if is_packed else {}
        state |= packed or {key: value}
        if packed and scales != "of blocks":
            rows = len(value) if scales == "of channels" else 1
            state[f"{key}_scale_inv"] = torch.rand(rows, 1) / 1000
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    configure(tmp_path, architectures=[kind], **LAYOUTS["fp8"].config)
    found = dequantised(tmp_path)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    if kind == "LlamaForCausalLM":
        assert found.model.layers[0].self_attn.q_proj.bias is not None
    else:
        assert found.model.layers[0].mlp.experts.gate_up_proj.shape == (5, 256, 256)


def test_codes_whose_configuration_names_another_method_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "compressed fp8")
    configure(folder, **LAYOUTS["fp8"].config)
    assert "mean nothing without this scale" in refused(load_pretrained, folder)


def test_a_load_that_fails_to_dequantise_says_what_the_model_is(
    make: Make, monkeypatch: MonkeyPatch
) -> None:
    fail = Mock(side_effect=ImportError("needs the package kernels"))
    monkeypatch.setattr(pretrained, "arguments_to_dequantise", fail)
    said = refused(load_pretrained, make("fp8"))
    assert "from_pretrained fails: ImportError: needs the package kernels" in said
    assert f"; the model is quantised with {LAYOUTS['fp8'].method}: " in said
    assert said.endswith("\ninstall the packages that the library names")


def test_the_configuration_of_the_text_model_is_read(make: Make, tmp_path: Path) -> None:
    config = json.loads((make("fp8") / "config.json").read_text())
    settings = {"quantization_config": config.pop("quantization_config")}

    def found(part: str) -> Any:
        return quantised.of_folder(tmp_path, config | {part: settings}, formats.read(make("fp8")))

    of_text = found("text_config")
    assert (of_text.method, of_text.obstacle) == ("fp8", "")
    said = "transformers does not read quantization_config of vision_conf"
    assert found("vision_config").obstacle.startswith(said)


@pytest.mark.parametrize("name", LAYOUTS)
def test_who_cannot_load_is_not_planned(make: Make, name: str) -> None:
    ours, theirs, another = cells_of(make(name), "streaming", "transformers", "baseline")
    assert f"quantised with {LAYOUTS[name].method}" in another.skip
    if name not in DEQUANTISED and (name not in OURS or not find_spec("compressed_tensors")):
        assert f"quantised with {LAYOUTS[name].method}" in ours.skip
    if name in UNREAD:
        assert UNREAD[name] in theirs.skip
    elif name in DEQUANTISED:
        assert another.skip.endswith("; only streaming and transformers can load them")
        assert not ours.skip
        assert not theirs.skip
    (save,) = cells_of(make(name), "torch_save", operation="save")
    assert save.skip.endswith("; weighin saves only weights that are not quantised")


@pytest.mark.usefixtures("torch_threads_restored")
@pytest.mark.filterwarnings("ignore")  # of from_pretrained, about quantised modules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *nightly(torch.float16)])
@pytest.mark.parametrize("strategy", ["streaming", *nightly("transformers")])
@pytest.mark.parametrize("name", DEQUANTISED)
def test_the_load_is_measured_and_verified(
    make: Make, name: str, strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, entry = make(name), tmp_path / "entry"
    entry.mkdir()
    spec, checkpoint = registry.model_and_checkpoint(str(folder))
    assert checkpoint
    manifest = index(
        spec, checkpoint=checkpoint, fmt="safetensors", folder=entry, dtype=str(dtype)[6:]
    )
    assert manifest.keys == f"quantised with {LAYOUTS[name].method}"
    checked_load(spec, checkpoint, manifest, dtype, strategy)
    wanted = pretrained_class(read_folder(folder).wanted).from_pretrained(folder, dtype=dtype)
    sizes = {id(one): one.nbytes for one in verify.named_tensors(wanted).values()}
    found, given = manifest.model_bytes(str(dtype)[6:]), sum(sizes.values())
    assert found == pytest.approx(given, rel=0.01)  # buffers have a dtype of their own


@pytest.mark.parametrize("name", ["fp8", "quanto", *nightly("compressed int8", "bitsandbytes nf4")])
def test_a_conversion_copies_codes_as_they_are_or_refuses(
    make: Make, name: str, tmp_path: Path
) -> None:
    folder, method = make(name), f"quantised with {LAYOUTS[name].method}: "
    code, text = run("convert", folder, tmp_path / "raw.safetensors", "--verify")
    assert code == 0
    assert method in text
    copied = load_file(tmp_path / "raw.safetensors")
    assert state_differences(copied, quantised_state(name)) == []
    code, text = run("convert", folder, tmp_path / "cast.safetensors", "--dtype", "bf16")
    assert code == 2
    assert "in another dtype, the quantised values would be useless" in text
    assert not (tmp_path / "cast.safetensors").exists()


@pytest.mark.parametrize("verb", ["recommend", "predict"])
@pytest.mark.parametrize("name", ["quanto", "modelopt"])
def test_neither_code_nor_memory_is_told_for_a_load_of_codes(
    make: Make, name: str, verb: str
) -> None:
    code, text = run(verb, make(name))
    assert code == 2
    assert f"quantised with {LAYOUTS[name].method}: 14 tensors of quantised values" in text
    assert UNREAD.get(name, f"weighin bench {make(name)} --strategies transformers") in text


@pytest.mark.parametrize("name", ["mxfp4", "compressed int4", *nightly("fp8")])
def test_the_prediction_of_a_load_that_dequantises_has_the_size_of_the_result(
    make: Make, name: str
) -> None:
    streaming, other = predict(
        cells_of(make(name), "streaming", "transformers"),
        checkpoint=read_folder(make(name)).checkpoint,
    )
    assert not streaming.cannot
    loaded = load_pretrained(make(name), dtype=torch.float32).state_dict()
    wanted = sum(one.nbytes for one in loaded.values())
    assert streaming.model_bytes == pytest.approx(wanted, abs=4096)  # and its rotary frequencies
    assert "weighin cannot predict how transformers loads weights" in other.cannot


@pytest.mark.parametrize("peft", [ModuleType("peft"), None])
def test_an_adapter_is_refused_if_from_pretrained_adds_it_else_named(
    peft: ModuleType | None,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (model := plain_model("fp8")).save_pretrained(tmp_path)
    (file := tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.setattr("weighin.stream.hugging_face_folder.find_spec", lambda _: peft)
    if peft:
        said = refused(load_pretrained, tmp_path)
        assert "peft is installed here" in said
        assert said.endswith(f"for the model alone, set it aside: mv {file} {file}.off")
        assert "peft is installed here" in run("predict", tmp_path)[1]
        return
    note = f"{file} lies beside the model: from_pretrained adds this adapter if"
    with caplog.at_level(logging.WARNING, logger="weighin"):
        loaded = load_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert any(note in text for text in caplog.messages)
    for command in (("inspect", tmp_path), ("predict", tmp_path, "--strategies", "streaming")):
        assert note in run(*command)[1]


def test_no_prediction_is_told_for_files_that_are_read_instead_of_mapped(make: Make) -> None:
    (one,) = cells_of(make("fp8"), "transformers")
    spec = replace(one.cell.model, kwargs={"architecture": "", "config": {"architectures": None}})
    cell = replace(one.cell, model=spec, options={"disable_mmap": True})
    (told,) = predict([replace(one, cell=cell, skip="")])
    assert "which of the files' bytes disable_mmap keeps in memory" in told.cannot
