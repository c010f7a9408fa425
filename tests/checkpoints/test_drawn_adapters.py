"""peft decides which modules an adapter changes, and by which factors: drawn settings merge as peft does."""

import json
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from cells import CheckpointError, ConfigError, write_merged
from model_differences import state_differences
from small import FLOATS, edit, llama, rewrite, transformers

from weighin import load_pretrained

DRAWS: Final = int(os.environ.get("WEIGHIN_DRAWS", "40"))
MATRICES: Final = "adapter_model.safetensors"
SUFFIXES: Final = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"],
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte", "lm_head"],
    "t5": ["q", "v", "o", "wi", "wo", "lm_head"],
}
LAYERS: Final = {"llama": "layers", "gpt2": "h", "t5": "block"}


def model_of(kind: str) -> Any:
    package = transformers()
    if kind == "gpt2":
        sizes = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        return package.GPT2LMHeadModel(package.GPT2Config(**sizes))
    if kind == "t5":
        sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3}
        return package.T5ForConditionalGeneration(package.T5Config(num_heads=4, **sizes))
    return llama(torch.float32)


def settings_for(kind: str, draw: random.Random) -> dict[str, Any]:
    """Return drawn arguments of a LoraConfig."""
    names = draw.sample(SUFFIXES[kind], draw.randrange(1, 4))
    targets: list[Any] = [
        names, names, f"{LAYERS[kind]}.1.{names[0]}", rf".*\.({'|'.join(names)})", "all-linear",
    ]  # fmt: skip
    drawn: dict[str, Any] = {
        "target_modules": draw.choice(targets), "r": draw.choice((2, 4, 8)),
        "lora_alpha": draw.choice((1, 5, 16, 2.5)),
    }  # fmt: skip
    chances: list[tuple[float, str, Any]] = [
        (0.3, "layers_to_transform", draw.choice(([0, 2], 1, [1], 0, []))),
        (0.2, "layers_pattern", draw.choice((LAYERS[kind], [LAYERS[kind], "other"], []))),
        (0.3, "exclude_modules", draw.choice(([names[0]], rf".*\.0\..*{names[0]}", ["none"]))),
        (0.3, "rank_pattern", {draw.choice((names[0], rf".*\.1\..*{names[0]}")): 3}),
        (0.3, "alpha_pattern", {draw.choice((names[-1], rf"^{names[-1]}", r".*\.0\..*")): 11}),
        (0.3, "use_rslora", True),
        (0.3, "fan_in_fan_out", draw.choice((True, False))),
        (0.5, "init_lora_weights", draw.choice((False, "gaussian", True))),
        (0.3, "task_type", {"t5": "SEQ_2_SEQ_LM"}.get(kind, "CAUSAL_LM")),
    ]
    return drawn | {key: value for chance, key, value in chances if draw.random() < chance}


def change(config: dict[str, Any], kind: str, draw: random.Random) -> None:
    """Change a saved configuration, so that it says something else than the matrices in the file."""
    name = draw.choice(SUFFIXES[kind])
    changes: list[Callable[[], object]] = [
        lambda: config.pop("r"),
        lambda: config.pop("lora_alpha"),
        lambda: config.pop("target_modules"),
        lambda: config.update(r=draw.choice((3, 0, -1, "8", 8.0, None))),
        lambda: config.update(lora_alpha=draw.choice((3, 0, "8", None))),
        lambda: config.update(target_modules=draw.choice(([name], name, "all-linear", [], None))),
        lambda: config.update(layers_to_transform=draw.choice(([0], 1, [], [9]))),
        lambda: config.update(exclude_modules=draw.choice(([name], rf".*{name}", []))),
        lambda: config.update(rank_pattern={name: draw.choice((2, 3, 8))}),
        lambda: config.update(alpha_pattern={name: draw.choice((2, 3.5))}),
        lambda: config.update(use_rslora=not config.get("use_rslora")),
        lambda: config.update(fan_in_fan_out=not config.get("fan_in_fan_out")),
        lambda: config.update(init_lora_weights=draw.choice((False, True, None))),
        lambda: config.update(task_type=draw.choice((None, "SEQ_CLS", "NONE"))),
    ]
    for one in draw.sample(changes, draw.choice((0, 1, 1, 2))):
        one()


def save_adapter(
    folder: Path, peft: Any, model: Any, config: Any, dtype: torch.dtype = torch.float32
) -> tuple[Path, Path]:
    """Write a model and an adapter of random values; return their folders."""
    base, adapter = folder / "base", folder / "adapter"
    model.save_pretrained(base)
    made = peft.get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter).to(dtype)
    made.save_pretrained(adapter)
    return base, adapter


def draw_adapter(folder: Path, peft: Any, kind: str, draw: random.Random) -> tuple[Path, Path]:
    while True:
        try:
            config = peft.LoraConfig(**settings_for(kind, draw))
            model, dtype = model_of(kind).to(draw.choice(FLOATS)), draw.choice(FLOATS)
            base, adapter = save_adapter(folder, peft, model, config, dtype)
            break
        except ValueError:  # the settings name no module
            continue
    file = adapter / "adapter_config.json"
    change(settings := json.loads(file.read_text()), kind, draw)
    file.write_text(json.dumps(settings))
    return base, adapter


def merged_by_peft(peft: Any, model: Any, adapter: Path) -> dict[str, torch.Tensor] | str:
    """Return the merged weights; else how peft fails, empty if it gives matrices random values."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = peft.PeftModel.from_pretrained(model, adapter)
    except Exception as error:
        return f"peft fails: {type(error).__name__}"
    is_random = not loaded.peft_config["default"].init_lora_weights
    if is_random and any("missing adapter keys" in str(one.message) for one in caught):
        return ""
    state: dict[str, torch.Tensor] = loaded.merge_and_unload().state_dict()
    return state


def assert_as_by_peft(peft: Any, kind: Any, base: Path, adapter: Path, dtype: torch.dtype) -> None:
    """Both ways to merge give what peft gives, or say how it fails."""
    expected = merged_by_peft(peft, kind.from_pretrained(base, dtype=dtype), adapter)
    target = base.parent / "merged.pt"
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=f"--adapter .*{expected}"):
            load_pretrained(base, dtype=dtype, adapter=adapter)
        with pytest.raises(CheckpointError, match="--adapter "):
            write_merged(base, adapter, target, dtype)
        return
    write_merged(base, adapter, target, dtype)
    loaded = load_pretrained(base, dtype=dtype, adapter=adapter).state_dict()
    # Some models keep weights in float32; a conversion casts them, too.
    cast = {name: one.to(dtype) for name, one in expected.items()}
    for found, wanted in ((loaded, expected), (torch.load(target), cast)):
        assert state_differences(found, wanted) == []


pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.mark.parametrize("number", range(DRAWS))
def test_a_drawn_adapter_is_merged_or_refused_as_by_peft(tmp_path: Path, number: int) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    draw = random.Random(number)
    torch.manual_seed(number)
    kind = draw.choice(list(SUFFIXES))
    base, adapter = draw_adapter(tmp_path, peft, kind, draw)
    dtype = draw.choice(FLOATS)
    assert_as_by_peft(peft, type(model_of(kind)), base, adapter, dtype)


NAMED: Final[dict[str, dict[str, object]]] = {
    "as saved": {},
    "narrow targets": {"target_modules": ["q_proj"]},
    "another rank": {"r": 4},
    "no alpha": {"lora_alpha": None},
    "no rank": {"r": None},
    "rank 0": {"r": 0},
    "a rank in quotes": {"r": "8"},
    "one layer": {"layers_to_transform": [1]},
    "layer 0": {"layers_to_transform": 0},
    "an excluded module": {"exclude_modules": ["v_proj"]},
    "a pattern": {"target_modules": r".*\.1\.self_attn\.(q|v)_proj"},
    "all linear layers": {"target_modules": "all-linear"},
    "another alpha for one module": {"alpha_pattern": {"v_proj": 3}},
    "another rank for one module": {"rank_pattern": {"v_proj": 2}},
    "another begin of its training": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("name", NAMED)
def test_a_changed_adapter_is_merged_or_refused_as_by_peft(tmp_path: Path, name: str) -> None:
    """None removes a key from the adapter's settings."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = llama(torch.bfloat16)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    base, adapter = save_adapter(tmp_path, peft, model, config)
    edit(adapter / "adapter_config.json", **NAMED[name])
    assert_as_by_peft(peft, type(model), base, adapter, torch.bfloat16)


LAID: Final[dict[str, tuple[Callable[[], Any], dict[str, Any]]]] = {
    "tied embeddings": (lambda: llama(torch.float32, tie_word_embeddings=True), {"target_modules": ["q_proj", "embed_tokens"]}),
    "transposed": (lambda: model_of("gpt2"), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAID)
def test_an_adapter_of_weights_that_lie_otherwise(tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = LAID[name][0]()
    base, adapter = save_adapter(tmp_path, peft, model, peft.LoraConfig(r=6, **LAID[name][1]))
    assert_as_by_peft(peft, type(model), base, adapter, torch.float16)


HARMS: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "no configuration": (
        lambda folder: (folder / "adapter_config.json").unlink(), r"not an adapter of peft: it needs adapter_config\.json",
    ),
    "one matrix of two": (
        lambda folder: rewrite(folder / MATRICES, lambda state: {name: one for name, one in state.items() if "lora_A" in name}),
        "peft fails: the file lacks matrices",
    ),
    "another model's": (
        lambda folder: rewrite(folder / MATRICES, lambda state: {name: one.repeat(2, 2) for name, one in state.items()}),
        "peft fails: .*size mismatch for .*q_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_half_an_adapter_or_another_models_is_refused(tmp_path: Path, harm: str) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    config = peft.LoraConfig(target_modules=["q_proj"])
    base, adapter = save_adapter(tmp_path, peft, llama(torch.float32), config)
    HARMS[harm][0](adapter)
    with pytest.raises(CheckpointError, match=HARMS[harm][1]):
        load_pretrained(base, adapter=adapter)


def test_without_peft_an_adapter_is_refused_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    base, adapter = draw_adapter(tmp_path, peft, "llama", random.Random(0))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="needs the Python package peft"):
        load_pretrained(base, adapter=adapter)
