"""Pipelines of diffusers, and their parts, each of which is a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from layouts import NO_FOLDER, Layout, Made, all_but, refused
from small import edit, transformers

GROUP: Final = "Pipelines of diffusers"
PACKAGES: Final = ("diffusers", "accelerate")
WEIGHTS: Final = "diffusion_pytorch_model.safetensors"


def unet(**settings: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=8,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, **settings,
    )  # fmt: skip


def vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=[8, 16], down_block_types=["DownEncoderBlock2D"] * 2, latent_channels=4,
        up_block_types=["UpDecoderBlock2D"] * 2, norm_num_groups=4,
    )  # fmt: skip


def wan() -> Any:
    """Return a small transformer of Wan, some of whose weights stay in float32, with computed buffers."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=16, ffn_dim=16, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip


def sd3() -> Any:
    """Return a small transformer of Stable Diffusion 3, whose positions are a persistent buffer."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip


def cogvideo() -> Any:
    """Return a small transformer of CogVideoX, whose positions are a computed buffer in float64."""
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=4,
        text_embed_dim=8, num_layers=1, sample_width=8, sample_height=8, sample_frames=8, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=8,
    )  # fmt: skip


def text_encoder() -> Any:
    package = transformers()
    config = package.CLIPTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return package.CLIPTextModel(config)


def pipeline(folder: Path) -> Path:
    unet().save_pretrained(folder / "unet")
    vae().half().save_pretrained(folder / "vae")
    text_encoder().save_pretrained(folder / "text_encoder")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {
        "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"], "scheduler": ["diffusers", "PNDMScheduler"],
        "safety_checker": [None, None], "requires_safety_checker": False,
    }  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _part(model: Callable[[], Any], **options: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        model().save_pretrained(folder, **options)
        return Made(folder)

    return make


def _in_dtype(folder: Path) -> Made:
    unet().to(torch.float16).save_pretrained(folder)
    return Made(folder)


def _variant(folder: Path) -> Made:
    """Write other values in float16 beside the usual file."""
    unet().save_pretrained(folder)
    unet().to(torch.float16).save_pretrained(folder, variant="fp16")
    return Made(folder)


def _old_names(folder: Path) -> Made:
    """Write a VAE with the names that attention had before diffusers 0.17."""
    from safetensors.torch import load_file, save_file

    vae().save_pretrained(folder)
    new = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(folder / WEIGHTS)
    for name, old in new.items():
        state = {key.replace(f".{name}.", f".{old}."): one for key, one in state.items()}
    assert any(".query." in key for key in state)
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    return Made(folder)


def _more_keys(folder: Path) -> Made:
    from safetensors.torch import load_file, save_file

    unet().save_pretrained(folder)
    save_file(load_file(folder / WEIGHTS) | {"position_ids": torch.ones(4)}, folder / WEIGHTS)
    return Made(folder)


def _file_beside_index(folder: Path) -> Made:
    """Write shards and a file of other values: diffusers takes the shards, unlike transformers."""
    unet().save_pretrained(folder)
    kept = (folder / WEIGHTS).read_bytes()
    unet().save_pretrained(folder, max_shard_size="100KB")
    (folder / WEIGHTS).write_bytes(kept)
    return Made(folder)


def _missing_key(folder: Path) -> Made:
    from safetensors.torch import load_file, save_file

    unet().save_pretrained(folder)
    state = load_file(folder / WEIGHTS)
    del state["conv_in.weight"]
    save_file(state, folder / WEIGHTS)
    return Made(folder)


def _unknown_class(folder: Path) -> Made:
    unet().save_pretrained(folder)
    edit(folder / "config.json", _class_name="UNetOfTomorrow")
    return Made(folder)


def _quantised(folder: Path) -> Made:
    unet().save_pretrained(folder)
    edit(folder / "config.json", quantization_config={"quant_method": "torchao"})
    return Made(folder)


def _safety_checker(folder: Path) -> Made:
    """Write a model of transformers whose class is in diffusers, beside a pipeline."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers().CLIPConfig(
        text_config=tower | {"num_attention_heads": 2, "vocab_size": 64},
        vision_config=tower | {"num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    StableDiffusionSafetyChecker(config).save_pretrained(folder)
    return Made(folder)


def _pipeline(folder: Path) -> Made:
    return Made(pipeline(folder), {}, is_folder=True)


def _part_of_a_pipeline(name: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        return Made(pipeline(folder) / name)

    return make


_RIGHT: Final[dict[str, Callable[[Path], Made]]] = {
    "the unet of a pipeline": _part_of_a_pipeline("unet"),
    "the vae of a pipeline, in float16": _part_of_a_pipeline("vae"),
    "a unet in float16": _in_dtype,
    "a unet in shards": _part(unet, max_shard_size="100KB"),
    "a unet in .bin": _part(unet, safe_serialization=False),
    "a unet in shards beside a file of other values": _file_beside_index,
    "attention under its names before diffusers 0.17": _old_names,
    "keys that no module of diffusers has": _more_keys,
    "weights that stay in float32, and computed buffers": _part(wan),
    "positions as a persistent buffer": _part(sd3),
    "a computed buffer in float64": _part(cogvideo),
}

LAYOUTS: Final = [
    *(Layout(name, GROUP, make, NO_FOLDER, packages=PACKAGES) for name, make in _RIGHT.items()),
    Layout("the variant fp16 of a unet", GROUP, _variant, NO_FOLDER, {"variant": "fp16"}, PACKAGES),
    Layout("the text encoder of a pipeline", GROUP, _part_of_a_pipeline("text_encoder"), packages=PACKAGES),
    Layout("a class of transformers in diffusers", GROUP, _safety_checker, packages=PACKAGES),
    Layout(
        "a whole pipeline", GROUP, _pipeline,
        refused(r"a diffusers pipeline of 3 models: unet .*.*largest.*: .*unet"), packages=PACKAGES,
    ),
    Layout(
        "a weight that diffusers would leave without values", GROUP, _missing_key,
        refused("conv_in.weight", all_but("inspect")), packages=PACKAGES,
    ),
    Layout(
        "a class that diffusers does not have", GROUP, _unknown_class,
        refused("has no model class 'UNetOfTomorrow'", all_but("inspect")), packages=PACKAGES,
    ),
    Layout("a quantised part", GROUP, _quantised, refused("quantised by torchao", all_but("inspect")), packages=PACKAGES),
]  # fmt: skip
