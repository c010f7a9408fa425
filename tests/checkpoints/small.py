"""Small models and state dicts for the makers, seeded, with values of their own; and how makers write them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from layouts import Made, Maker
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], object]
"""Changes a folder that was written."""

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS: Final = "model.safetensors"
PT: Final = {"format": "pt"}
LLAMA: Final[dict[str, Any]] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def transformers() -> Any:
    """Return the package, imported when a maker runs: the list of layouts needs no package."""
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]
    disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def llama(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """Return a small Llama whose weights are in ``dtype``."""
    package = transformers()
    return package.LlamaForCausalLM(package.LlamaConfig(**LLAMA | settings)).eval().to(dtype)


def t5() -> Any:
    package = transformers()
    config = package.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return package.T5ForConditionalGeneration(config)


def clip_config(size: int, heads: int) -> Any:
    tower = {
        "hidden_size": size, "intermediate_size": size * 3 // 2, "num_hidden_layers": 2,
        "num_attention_heads": heads,
    }  # fmt: skip
    images = {"image_size": 16, "patch_size": 8}
    return transformers().CLIPConfig(
        text_config=tower | {"vocab_size": 64}, vision_config=tower | images, projection_dim=size // 2
    )  # fmt: skip


def state(dtype: torch.dtype = torch.float32) -> Tensors:
    """Return four tensors, as of an embedding and two linear layers."""
    shapes = {
        "embed.weight": (16, 8), "block.up.weight": (32, 8), "block.up.bias": (32,),
        "block.down.weight": (8, 32),
    }  # fmt: skip
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def save(tensors: Tensors, file: Path, **saving: Any) -> Made:
    """Write tensors in the format of the file's name."""
    if file.suffix == ".safetensors":
        save_file(tensors, file, **saving)
    else:
        torch.save(tensors, file, **saving)
    return Made(file, tensors)


def saved(make: Callable[[], Tensors], name: str = "model.pt", **saving: Any) -> Maker:
    return lambda folder: save(make(), folder / name, **saving)


def folder_of(model: Callable[[], Any], *changes: Change, **saving: Any) -> Maker:
    """Return the maker of the folder that ``save_pretrained`` writes, and ``changes`` change."""

    def write(folder: Path) -> Made:
        model().save_pretrained(folder, **saving)
        for change in changes:
            change(folder)
        return Made(folder)

    return write


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object in a file; None removes the key."""
    removed = [key for key, value in changes.items() if value is None]
    content = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in content.items() if key not in removed}
    path.write_text(json.dumps(kept, indent=2))


def config(**changes: Any) -> Change:
    """Return a change of keys in config.json; None removes the key."""
    return lambda folder: edit(folder / "config.json", **changes)


def rewrite(
    file: Path, change: Callable[[Tensors], Tensors], metadata: dict[str, str] | None = PT
) -> None:
    """Change the tensors in a file of safetensors."""
    save_file(change(load_file(file)), file, metadata)


def save_shards(
    folder: Path, parts: Sequence[Tensors], base: str = "model", suffix: str = ".safetensors", **saving: Any
) -> None:  # fmt: skip
    """Write the shards of a model, and their index."""
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"{base}-{number:05}-of-{len(parts):05}{suffix}"
        save(part, folder / name, **saving)
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / f"{base}{suffix}.index.json").write_text(json.dumps(index))
