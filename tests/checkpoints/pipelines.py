"""Pipelines of diffusers, and their parts, each of which is a model."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from layouts import NO_FOLDER, Layout, Made, Maker, all_but, refused
from small import Tensors, clip_config, config, folder_of, rewrite, transformers

GROUP: Final = "Pipelines of diffusers"
PACKAGES: Final = ("diffusers", "accelerate")
WEIGHTS: Final = "diffusion_pytorch_model.safetensors"


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=8,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
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


def _text_encoder() -> Any:
    package = transformers()
    config = package.CLIPTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return package.CLIPTextModel(config)


def _safety_checker() -> Any:
    """Return a model of transformers whose class is in diffusers, beside a pipeline."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    return StableDiffusionSafetyChecker(clip_config(16, 2))


def _half_unet() -> Any:
    return unet().to(torch.float16)


def _pipeline(folder: Path) -> Made:
    unet().save_pretrained(folder / "unet")
    vae().half().save_pretrained(folder / "vae")
    _text_encoder().save_pretrained(folder / "text_encoder")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {
        "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"], "scheduler": ["diffusers", "PNDMScheduler"],
        "safety_checker": [None, None], "requires_safety_checker": False,
    }  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index))
    return Made(folder, {}, is_folder=True)


def _part_of_a_pipeline(name: str) -> Maker:
    return lambda folder: Made(_pipeline(folder).path / name)


def _add_variant(folder: Path) -> None:
    """Write other values in float16 beside the usual file."""
    _half_unet().save_pretrained(folder, variant="fp16")


def _name_as_before_0_17(folder: Path) -> None:
    new = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def rename(state: Tensors) -> Tensors:
        for name, old in new.items():
            state = {key.replace(f".{name}.", f".{old}."): one for key, one in state.items()}
        assert any(".query." in key for key in state)
        return state

    rewrite(folder / WEIGHTS, rename)


def _add_key(folder: Path) -> None:
    rewrite(folder / WEIGHTS, lambda state: state | {"position_ids": torch.ones(4)}, None)


def _drop_weight(folder: Path) -> None:
    def drop(state: Tensors) -> Tensors:
        return {key: one for key, one in state.items() if key != "conv_in.weight"}

    rewrite(folder / WEIGHTS, drop, None)


def _add_shards(folder: Path) -> None:
    """Write shards beside a file of other values: diffusers takes the shards, unlike transformers."""
    kept = (folder / WEIGHTS).read_bytes()
    unet().save_pretrained(folder, max_shard_size="100KB")
    (folder / WEIGHTS).write_bytes(kept)


_RIGHT: Final[dict[str, Maker]] = {
    "the unet of a pipeline": _part_of_a_pipeline("unet"),
    "the vae of a pipeline, in float16": _part_of_a_pipeline("vae"),
    "a unet in float16": folder_of(_half_unet),
    "a unet in shards": folder_of(unet, max_shard_size="100KB"),
    "a unet in .bin": folder_of(unet, safe_serialization=False),
    "a unet in shards beside a file of other values": folder_of(unet, _add_shards),
    "attention under its names before diffusers 0.17": folder_of(vae, _name_as_before_0_17),
    "keys that no module of diffusers has": folder_of(unet, _add_key),
    "weights that stay in float32, and computed buffers": folder_of(wan),
    "positions as a persistent buffer": folder_of(sd3),
    "a computed buffer in float64": folder_of(cogvideo),
}
_REFUSED: Final[dict[str, tuple[Maker, str]]] = {
    "a weight that diffusers would leave without values": (folder_of(unet, _drop_weight), "conv_in.weight"),
    "a class that diffusers does not have": (folder_of(unet, config(_class_name="UNetOfTomorrow")), "has no model class 'UNetOfTomorrow'"),
    "a quantised part": (folder_of(unet, config(quantization_config={"quant_method": "torchao"})), "quantised by torchao"),
}  # fmt: skip

LAYOUTS: Final = [
    *(Layout(name, GROUP, make, NO_FOLDER, packages=PACKAGES) for name, make in _RIGHT.items()),
    Layout("the variant fp16 of a unet", GROUP, folder_of(unet, _add_variant), NO_FOLDER, {"variant": "fp16"}, PACKAGES),
    Layout("the text encoder of a pipeline", GROUP, _part_of_a_pipeline("text_encoder"), packages=PACKAGES),
    Layout("a class of transformers in diffusers", GROUP, folder_of(_safety_checker), packages=PACKAGES),
    Layout("a whole pipeline", GROUP, _pipeline, refused(r"a diffusers pipeline of 3 models: unet .*.*largest is .*unet"), packages=PACKAGES),
    *(
        Layout(name, GROUP, make, refused(words, all_but("inspect")), packages=PACKAGES)
        for name, (make, words) in _REFUSED.items()
    ),
]  # fmt: skip
