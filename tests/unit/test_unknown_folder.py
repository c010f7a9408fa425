"""A folder or a file that is no model says what it is, and what to give instead."""

from pathlib import Path

import pytest
from harms import complaint
from snapshots import Compare

from weighin.stream import formats
from weighin.stream.pretrained_library import FolderChoice
from weighin.suite import registry

CONFIG = '{"architectures": ["LlamaForCausalLM"]}'
ADAPTER = {"adapter_config.json": "{}"}
FOLDERS: dict[str, dict[str, str]] = {
    "empty": {},
    "an adapter": ADAPTER | {"adapter_model.safetensors": "", "README.md": ""},
    "an adapter beside a training run": ADAPTER | {"latest": "global_step5"},
    "an adapter whose config is 5,000 brackets": {"adapter_config.json": "[" * 5000, "config.json": CONFIG},
    "a pipeline of two models": {
        "model_index.json": "{}", "text_encoder/model.safetensors": "", "scheduler/scheduler_config.json": "{}",
        "unet/diffusion_pytorch_model.safetensors": "x",
    },
    "a pipeline whose index is 5,000 brackets": {
        "model_index.json": "[" * 5000, "unet/diffusion_pytorch_model.safetensors": "x", "unet/config.json": "{}",
    },
    "a pipeline without weights": {"model_index.json": "{}", "unet/config.json": "{}"},
    "a pipeline with modules": {"modules.json": "[]", "model_index.json": "{}"},
    "five GGUF models": {f"q{bits}.gguf": "GGUF" for bits in range(2, 7)},
    "a variant": {"config.json": CONFIG, "model.fp16.safetensors": ""},
    "a variant in shards": {
        "config.json": CONFIG, "model.safetensors.index.fp16.json": "{}",
        "model.fp16-00001-of-00002.safetensors": "", "model.fp16-00002-of-00002.safetensors": "",
    },
    "shards without their index": {"config.json": CONFIG, "model-00001-of-00002.safetensors": ""},
    "a file of another name": {"mine.pt": "", "notes.txt": ""},
    "weights of Meta": {"config.json": CONFIG, "consolidated.pth": ""},
    "weights of TensorFlow": {"config.json": CONFIG, "tf_model.h5": ""},
    "a config alone": {"config.json": CONFIG},
    "checkpoints of a run": {"checkpoint-10/model.safetensors": "", "checkpoint-20/model.safetensors": ""},
    "modules and weights without a config": {"modules.json": '[{"path": ""}]', "model.safetensors": ""},
    "modules that are 5,000 brackets": {"modules.json": "[" * 5000},
    "a run of weighin": {"plan.json": "{}", "results.jsonl": ""},
    "notes": {"notes.txt": ""},
}  # fmt: skip
FILES = {
    "cut.gguf": b"GGUF\3\0\0\0",
    "gguf.safetensors": b"GGUF\3\0\0\0",
    "zip.gguf": b"PK\3\4",
    "nets.py": b"def build(): ...",
}


def test_a_folder_or_a_file_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Compare
) -> None:
    said = []
    for title, files in FOLDERS.items():
        folder = tmp_path / title / "F"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        error = str(complaint(registry.model, str(folder)))
        assert str(complaint(formats.detect, folder)) == error
        said.append(f"{title}:\n{error.replace(str(folder), 'F')}\n")
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
        said.append(f"{complaint(registry.model, name)}\n")
    same("unknown_folders.txt", "\n".join(said))


def test_the_variant_that_the_advice_names_makes_it_a_model(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    file = tmp_path / "diffusion_pytorch_model.fp16.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    repair = complaint(registry.model, str(tmp_path)).repair
    assert repair == "name the variant: --set variant=fp16 (in Python: variant='fp16')"
    chosen = registry.model_and_checkpoint(str(tmp_path), choice=FolderChoice(variant="fp16"))
    assert chosen[1] == file
