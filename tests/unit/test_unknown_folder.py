"""A folder or a file that is no model says what it is, and what to give instead."""

from pathlib import Path

import pytest

from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.stream.pretrained_library import FolderChoice
from weighin.suite import registry

AGAIN = "copy or download the file again"
MERGE = (
    "merge it into its base, and give the merged model's folder: merge_and_unload() of peft, then"
    " save_pretrained(FOLDER)"
)
CONFIG = '{"architectures": ["LlamaForCausalLM"]}'


@pytest.mark.parametrize(
    ("files", "what", "repair"),
    [
        ({}, "an empty folder", "give a checkpoint file, or the folder of a model"),
        (
            {"adapter_config.json": "{}", "adapter_model.safetensors": "", "README.md": ""},
            "an adapter, not a whole model",
            MERGE,
        ),
        (
            {"adapter_config.json": "{}", "latest": "global_step5"},
            "an adapter, not a whole model",
            MERGE,
        ),
        (
            {"adapter_config.json": "[" * 5000, "config.json": CONFIG},
            "an adapter, not a whole model",
            MERGE,
        ),
        (
            {
                "model_index.json": "{}",
                "text_encoder/model.safetensors": "",
                "unet/diffusion_pytorch_model.safetensors": "x",
                "scheduler/scheduler_config.json": "{}",
            },
            "a diffusers pipeline of 2 models: unet (1 B), text_encoder (0 B)",
            "give one of them; the largest: F/unet",
        ),
        (
            {"model_index.json": "{}", "unet/config.json": "{}"},
            "a diffusers pipeline without weights",
            "give the folder that has the weights, too",
        ),
        (
            {f"q{bits}.gguf": "GGUF" for bits in range(2, 7)},
            "holds 5 GGUF models: q2.gguf, q3.gguf, q4.gguf and 2 more",
            "give the path of one model: F/q2.gguf",
        ),
        (
            {"config.json": CONFIG, "model.fp16.safetensors": ""},
            "only fp16 variants of the weights: model.fp16.safetensors",
            "name the variant: --set variant=fp16 (in Python: variant='fp16')",
        ),
        (
            {
                "config.json": CONFIG,
                "model.fp16-00001-of-00002.safetensors": "",
                "model.fp16-00002-of-00002.safetensors": "",
                "model.safetensors.index.fp16.json": "{}",
            },
            "only fp16 variants of the weights: model.fp16-00001-of-00002.safetensors,"
            " model.fp16-00002-of-00002.safetensors",
            "name the variant: --set variant=fp16 (in Python: variant='fp16')",
        ),
        (
            {"config.json": CONFIG, "model-00001-of-00002.safetensors": ""},
            "shards without their index model.safetensors.index.json",
            "add the index: F/model.safetensors.index.json",
        ),
        (
            {"mine.pt": "", "notes.txt": ""},
            "no config.json and no index beside mine.pt",
            "give the file itself: F/mine.pt",
        ),
        (
            {"config.json": CONFIG, "consolidated.pth": ""},
            "no index beside consolidated.pth",
            "give the file itself: F/consolidated.pth",
        ),
        (
            {"config.json": CONFIG, "tf_model.h5": ""},
            "weights of another framework than PyTorch: tf_model.h5",
            "load the model into PyTorch, and save it: model.save_pretrained(FOLDER)",
        ),
        (
            {"config.json": CONFIG},
            "has config.json but no weights: neither model.safetensors, nor pytorch_model.bin, nor"
            " an index of one of them",
            "add the weights, or save the model there: model.save_pretrained(FOLDER)",
        ),
        (
            {"checkpoint-10/model.safetensors": "", "checkpoint-20/model.safetensors": ""},
            "no config.json, but folders with models: checkpoint-10, checkpoint-20",
            "give one of them: F/checkpoint-10",
        ),
        (
            {"modules.json": '[{"path": ""}]', "model.safetensors": ""},
            "no config.json and no index beside model.safetensors",
            "give the file itself: F/model.safetensors",
        ),
        (
            {"modules.json": "[" * 5000},
            "a sentence-transformers folder without weights",
            "copy the whole folder",
        ),
        (
            {"modules.json": "[]", "model_index.json": "{}"},
            "a diffusers pipeline without weights",
            "give the folder that has the weights, too",
        ),
        (
            {"plan.json": "{}", "results.jsonl": ""},
            "the folder of a run of weighin, not a model",
            "show its results: weighin report F",
        ),
        (
            {"notes.txt": ""},
            "not a checkpoint: no config.json, no index and no weights in it",
            "give the checkpoint file itself, or a folder that save_pretrained or `weighin convert` made",
        ),
    ],
)
def test_a_folder_says_what_lies_in_it(
    tmp_path: Path, files: dict[str, str], what: str, repair: str
) -> None:
    folder = tmp_path / "F"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for look in (lambda: registry.model(str(folder)), lambda: formats.detect(folder)):
        with pytest.raises(CheckpointError) as caught:
            look()
        assert str(caught.value).replace(f"{tmp_path}/", "") == f"F: {what}\n{repair}"


def test_the_variant_that_the_advice_names_makes_it_a_model(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    file = tmp_path / "diffusion_pytorch_model.fp16.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError) as caught:
        registry.model(str(tmp_path))
    assert caught.value.repair == "name the variant: --set variant=fp16 (in Python: variant='fp16')"
    chosen = registry.model_and_checkpoint(str(tmp_path), choice=FolderChoice(variant="fp16"))
    assert chosen[1] == file


@pytest.mark.parametrize(
    ("name", "content", "what", "repair"),
    [
        ("m.gguf", b"GGUF\3\0\0\0", "truncated: the file ends at byte 8, within its tables", AGAIN),
        (
            "m.safetensors",
            b"GGUF\3\0\0\0",
            "truncated: the file ends at byte 8, within its tables",
            AGAIN,
        ),
        (
            "m.gguf",
            b"PK\3\4",
            "not a GGUF file, although its name ends like one: the file does not begin with GGUF",
            "rename it, with the suffix of its real format",
        ),
        (
            "nets.py",
            b"def build(): ...",
            "a Python file, not a checkpoint",
            "name the function in this file that builds the model: --model nets.py:FUNCTION",
        ),
    ],
)
def test_a_file_says_what_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    what: str,
    repair: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        registry.model(name)
    assert str(caught.value) == f"{name}: {what}\n{repair}"
