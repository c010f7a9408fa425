"""What may be typed for a model: names, builders, files, folders, indexes; one function for all verbs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from safetensors.torch import save_file
from snapshots import Compare

from weighin import load_pretrained, load_streaming
from weighin.cell import SYNTHESISED
from weighin.settings.definition import check_suite
from weighin.stream.pretrained_library import DIFFUSERS, Selection
from weighin.suite import registry
from weighin.suite.chosen_models import ChosenModels, choose

TENSORS = {"a": torch.zeros(3, 2), "b": torch.zeros(2)}


def chosen(name: object, **options: object) -> ChosenModels:
    return choose(check_suite({"models": name, **options}))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is also that of the user: a file w.pt, a folder of shards, and a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    torch.save(TENSORS, "w.pt")
    write_shards(Path("shards"))
    Path("mine.py").write_text("def build(): ...\n")
    return tmp_path


def write_shards(folder: Path, stem: str = "model") -> None:
    folder.mkdir()
    shard = f"{stem}-00001-of-00001.safetensors"
    save_file(TENSORS, folder / shard)
    index = {"weight_map": dict.fromkeys(TENSORS, shard)}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["w.pt", "./w.pt", "from:w.pt", "~/w.pt", "from:~/w.pt", "w.safetensors", "./odd"]
)
def test_a_file_is_a_model_of_its_tensors(name: str) -> None:
    shutil.copy("w.pt", "odd")
    save_file(TENSORS, "w.safetensors")
    found = chosen(name)
    path = Path(name.removeprefix("from:")).expanduser()
    assert found.checkpoint == path
    assert [(spec.name, spec.builder) for spec in found.specs] == [(path.name, SYNTHESISED)]
    assert list(found.dtypes.values()) == ["float32"]


@pytest.mark.parametrize("name", ["shards", "shards/model.safetensors.index.json", "from:shards"])
def test_an_index_stands_for_its_folder(name: str) -> None:
    found = chosen(name)
    assert (found.checkpoint, found.specs[0].name) == (Path("shards"), "shards")
    of_builder = chosen("mine:build", checkpoint=Path(name.removeprefix("from:")))
    assert of_builder.checkpoint == Path("shards")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_part_of_a_pipeline_is_a_model_of_diffusers(sharded: bool) -> None:
    one = Path("unet/diffusion_pytorch_model.safetensors")
    if sharded:
        write_shards(one.parent, "diffusion_pytorch_model")
    else:
        one.parent.mkdir()
        save_file(TENSORS, one)
    Path("unet/config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    found = chosen("unet/")
    assert found.specs[0].builder == DIFFUSERS.builder and [*found.dtypes.values()] == ["float32"]
    assert chosen("from:unet/").specs[0].builder == SYNTHESISED
    assert found.checkpoint == (Path("unet") if sharded else one)


def test_a_built_in_name_comes_before_a_path_of_the_same_name() -> None:
    write_shards(Path("gpt2-tiny"))
    assert chosen("gpt2-tiny").checkpoint is None
    assert chosen("./gpt2-tiny").checkpoint == Path("gpt2-tiny")


def test_each_model_of_a_suite_may_have_weights_and_a_dtype_of_its_own() -> None:
    torch.save(TENSORS, "v.pt")
    w: dict[str, Any] = {"name": "w", "checkpoint": "w.pt", "builder": "torch.nn:Module"}
    found = chosen(["gpt2-tiny", w, w | {"name": "v", "checkpoint": "v.pt", "dtype": "bf16"}])
    assert found.checkpoint is None
    assert found.checkpoints == {"w": Path("w.pt"), "v": Path("v.pt")}
    assert found.dtypes == {"gpt2-tiny": "float32", "w": "float32", "v": "bfloat16"}
    assert found.own_formats == {"w": "pt", "v": "pt"}


def test_a_key_selects_weights_of_a_checkpoint() -> None:
    torch.save({"net": TENSORS}, "train.pt")
    selected = registry.model("from:train.pt", None, Selection("net"))
    assert chosen("train.pt", key="net").specs == (selected,)


MINE = {"name": "mine", "builder": "torch.nn:Module", "checkpoint": "w.pt"}
ODD = ("a\0b", "~nobody-of-this-name/x", "x" * 300)
BY_LOADER = ("mine/model", "./gone", "./owner/gone", "./owner/cached", *ODD)
CHOSEN: list[tuple[Any, dict[str, Any]]] = [
    *((f"{path}gone", {}) for path in ("../", "/", "~/", "shards/", "a/b/")),
    *((name, {}) for name in ("gone.safetensors", "Some/Model", "./float64", *ODD)),
    *((name, {"kwargs": {"width": 2}}) for name in ("w.pt", "from:w.pt")),
    *((name, {"key": "a"}) for name in ("gpt2-tiny", [MINE, "gpt2-tiny"])),
]


def test_what_is_no_model_and_what_a_model_does_not_take_is_named(
    here: Path, same: Compare
) -> None:
    """In Python a path is no id of the Hub, either."""
    (here / "mine" / "model").mkdir(parents=True)
    (here / "hub/models--owner--cached/snapshots/main").mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float64"}
    Path("float64").mkdir()
    Path("float64/config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.zeros(2)}, "float64/model.safetensors")
    said = [
        f"$ choose {name} {options or ''}".rstrip() + f"\n{refused(chosen, name, **options)}"
        for name, options in CHOSEN
    ]
    said += [f"$ load_pretrained {name}\n{refused(load_pretrained, name)}" for name in BY_LOADER]
    for name in ODD:
        said.append(f"$ weights_of {name}\n{refused(registry.weights_of, Path(name))}")
        assert refused(load_streaming, torch.nn.Linear(2, 2), name) == (
            f"{name}: no such file or folder\ncheck the path"
        )
    text = "\n\n".join(said).replace(str(here), "HERE").replace("\0", "NUL")
    same("no_models.txt", f"{text}\n")


def test_the_current_folder_is_searched_only_for_a_model_of_a_module(here: Path) -> None:
    assert (chosen("gpt2-tiny").python_path, chosen("w.pt").python_path) == ((), ())
    assert str(here) in chosen("mine:build").python_path
