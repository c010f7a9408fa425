"""GGUF files, as llama.cpp's converter writes them: its names, its order of values and its types."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from cells import UNDECODED
from layouts import Layout, Made, Maker, all_but, refused
from small import llama, transformers

GROUP: Final = "GGUF files"
PACKAGES: Final = ("gguf", "accelerate")
SMALL: Final = {"intermediate_size": 64}  # rows of whole blocks of 32 elements
WIDE: Final[dict[str, Any]] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
SCALES: Final = {"Q4_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "IQ4_XS": (0,)}
"""The places of the scales in a block of a type that the package gguf does not quantise to."""

_OF_LLAMA: Final = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_SKIPPED: Final = refused("does not read gguf, only .*--format", ("baseline",))
_LOAD: Final = {
    "load": r"is quantised to .*\nconvert it once, and load the new folder: weighin convert"
}


def write(
    file: Path,
    architecture: str,
    tensors: Mapping[str, Any],
    kind: str = "F32",
    model: Any = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Write numpy arrays, the matrices in the type ``kind``; return the values that the file holds.

    ``model`` is the one of transformers whose configuration the file describes.
    """
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, architecture, **options)
    if model:
        _describe(writer, model.config)
    halves = {"F16": torch.float16, "BF16": torch.bfloat16}
    values = {}
    for name, array in tensors.items():
        if kind == "F32" or array.ndim <= 1:
            writer.add_tensor(name, array)
            values[name] = torch.from_numpy(array)
            continue
        written = gguf.GGMLQuantizationType[kind]
        try:
            codes = gguf.quants.quantize(array, written)
        except NotImplementedError:
            codes = random_blocks(array.shape, kind)
        writer.add_tensor(name, codes, raw_dtype=written)
        if kind == "Q8_K":
            values[name] = torch.zeros(array.shape)  # nobody has its values
        else:
            with np.errstate(all="ignore"):  # random codes have infinite scales
                value = np.array(gguf.quants.dequantize(codes, written))
            values[name] = torch.from_numpy(value).to(halves.get(kind, torch.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def random_blocks(shape: tuple[int, ...], kind: str) -> Any:
    """Return random codes for a tensor, with scales of 0.01."""
    import gguf
    import numpy as np

    written = gguf.GGMLQuantizationType[kind]
    bytes_ = gguf.quants.quant_shape_to_byte_shape(shape, written)
    blocks = np.random.default_rng(7).integers(0, 256, bytes_, np.uint8)
    rows = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[written][1])
    for at in SCALES.get(kind, ()):
        rows[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks


def names_of(model: Any, architecture: str) -> dict[str, str]:
    import gguf

    (kind,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    return {key: table.get_name(key, (".weight", ".bias")) or key for key in model.state_dict()}


def _describe(writer: Any, config: Any) -> None:
    """Write what transformers reads of a configuration."""
    words, heads = config.vocab_size, config.num_attention_heads
    described = {
        "name": "random weights",  # transformers 4.48 reads the name of each file
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "head_count": heads,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "head_count_kv": getattr(config, "num_key_value_heads", heads),
    }  # fmt: skip
    if hasattr(config, "rms_norm_eps"):
        described |= {"layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": 10000.0}
        described |= {"vocab_size": words}
    else:
        described |= {"layer_norm_eps": config.layer_norm_epsilon}
    if head_dim := getattr(config, "head_dim", None):
        described |= {"key_length": head_dim, "value_length": head_dim}
    if used := getattr(config, "num_experts_per_tok", None):
        described |= {"expert_count": config.num_experts, "expert_used_count": used}
    described |= {
        "tokenizer_model": "gpt2", "token_list": [f"t{number}" for number in range(words)],
        "token_merges": ["t 0"], "token_types": [1] * words,
    }  # fmt: skip
    for name, value in described.items():
        getattr(writer, f"add_{name}")(value)


def of_llama(model: Any) -> dict[str, Any]:
    """Return a Llama's arrays under llama.cpp's names, with the rows of q and k in its order."""
    names, arrays = names_of(model, "llama"), {}
    is_tied = model.config.tie_word_embeddings
    for key, tensor in model.state_dict().items():
        if is_tied and key == "lm_head.weight":
            continue
        name, array = names[key], tensor.float().numpy()
        for part, heads in _OF_LLAMA.items():
            if f".{part}." in name:
                count = getattr(model.config, heads)
                pairs = array.reshape(count, 2, -1, array.shape[1])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        arrays[name] = array
    return arrays


def _file(kind: str, name: str = "model.gguf", **settings: Any) -> Maker:
    def make(folder: Path) -> Made:
        model = llama(torch.float32, **SMALL | settings)
        return Made(folder / name, write(folder / name, "llama", of_llama(model), kind, model))

    return make


def reference(folder: Path, **options: Any) -> Any:
    """Return the model that from_pretrained makes of ``model.gguf``."""
    import numpy as np

    kind = transformers().AutoModelForCausalLM
    with np.errstate(all="ignore"):  # random codes have infinite scales
        return kind.from_pretrained(folder, gguf_file="model.gguf", **options)


def loaded(folder: Path) -> Made:
    state = reference(folder, dtype=torch.float32).state_dict(keep_vars=True)
    return Made(folder, dict(state), is_folder=True)


def read_types() -> list[str]:
    """Return the types of GGUF that from_pretrained reads."""
    import gguf

    left_out = UNDECODED | {"F64", "I8", "I16", "I32", "I64"}
    return [kind.name for kind in gguf.GGMLQuantizationType if kind.name not in left_out]


def _folder(kind: str, *, with_config: bool = False, **settings: Any) -> Maker:
    def make(folder: Path) -> Made:
        model = llama(torch.float32, **SMALL | settings)
        write(folder / "model.gguf", "llama", of_llama(model), kind, model)
        if with_config:
            model.config.save_pretrained(folder)
        made = loaded(folder)
        if kind == "F32" and made.truth:
            assert all(torch.equal(one, made.truth[key]) for key, one in model.state_dict().items())
        return made

    return make


def _of(folder: Path, model: Any, architecture: str, arrays: Mapping[str, Any]) -> Made:
    write(folder / "model.gguf", architecture, arrays, "Q8_0", model)
    return loaded(folder)


def _in_three_parts(folder: Path) -> Made:
    model = llama(torch.float32, **SMALL)
    arrays, file = of_llama(model), folder / "m.gguf"
    truth = write(file, "llama", arrays, "Q8_0", model, split_max_tensors=8)
    assert len(list(folder.iterdir())) == 3
    return Made(folder / "m-00001-of-00003.gguf", truth)


def _a_part_missing(folder: Path) -> Made:
    made = _in_three_parts(folder)
    (folder / "m-00002-of-00003.gguf").unlink()
    return made


def _two_models(folder: Path) -> Made:
    for name in ("a.gguf", "b.gguf"):
        made = _file("F32", name)(folder)
    return Made(folder, made.truth)


def _beside_safetensors(folder: Path) -> Made:
    _file("Q8_0")(folder)
    llama(torch.float32).save_pretrained(folder)
    return Made(folder)


def _changed(kind: str, change: Callable[[bytes], bytes]) -> Maker:
    def make(folder: Path) -> Made:
        made = _file(kind)(folder)
        made.path.write_bytes(change(made.path.read_bytes()))
        return made

    return make


def _of_type_31(whole: bytes) -> bytes:
    at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    return whole[:at] + (31).to_bytes(4, "little") + whole[at + 4 :]


def _of_a_vision_tower(folder: Path) -> Made:
    import numpy as np

    arrays = {"v.patch_embd.weight": np.ones((4, 32), np.float32)}
    return Made(folder / "mmproj.gguf", write(folder / "mmproj.gguf", "clip", arrays, "Q8_0"))


def _gemma(folder: Path) -> Made:
    config = transformers().Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers().Gemma2ForCausalLM(config)
    names = names_of(model, "gemma2")
    arrays = {
        names[key]: (tensor + 1 if key.endswith("norm.weight") else tensor).numpy()
        for key, tensor in model.state_dict().items()
        if key != "lm_head.weight"
    }
    return _of(folder, model, "gemma2", arrays)


def _gpt2(folder: Path, n_embd: int = 32, n_layer: int = 2) -> Made:
    config = transformers().GPT2Config(
        vocab_size=64, n_embd=n_embd, n_layer=n_layer, n_head=4, n_positions=1024
    )
    model = transformers().GPT2LMHeadModel(config)
    names = names_of(model, "gpt2")
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    arrays = {
        names[key]: (tensor.T if key.endswith(turned) else tensor).contiguous().numpy()
        for key, tensor in model.state_dict().items()
    }
    return _of(folder, model, "gpt2", arrays)


def _experts(folder: Path) -> Made:
    config = transformers().Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, num_experts=3,
        num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers().Qwen2MoeForCausalLM(config)
    names, arrays = names_of(model, "qwen2moe"), {}
    for key, tensor in model.state_dict().items():
        block = key.replace("model.layers.", "blk.").partition(".mlp.")[0]
        if key.endswith("gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            arrays[f"{block}.ffn_gate_exps.weight"] = gate.contiguous().numpy()
            arrays[f"{block}.ffn_up_exps.weight"] = up.contiguous().numpy()
        elif key.endswith("experts.down_proj"):
            arrays[f"{block}.ffn_down_exps.weight"] = tensor.numpy()
        else:
            is_gate = key.endswith("shared_expert_gate.weight")
            arrays[names[key]] = (tensor[0] if is_gate else tensor).numpy()
    return _of(folder, model, "qwen2moe", arrays)


def _layout(name: str, make: Maker, refusals: Mapping[str, str], **more: Any) -> Layout:
    return Layout(name, GROUP, make, refusals, packages=PACKAGES, **more)


_NO_CLASS: Final = r"transformers has no configuration for .*\n.*weighin inspect .* weighin convert"

LAYOUTS: Final = [
    _layout("GGUF in float32", _file("F32"), _SKIPPED),
    _layout("GGUF in bfloat16", _file("BF16"), _SKIPPED),
    _layout("GGUF in float16", _file("F16"), _SKIPPED),
    _layout("GGUF in Q8_0", _file("Q8_0"), _SKIPPED | _LOAD),
    _layout("GGUF in Q4_0, tied", _file("Q4_0", tie_word_embeddings=True), _SKIPPED | _LOAD),
    _layout("GGUF in Q4_K", _file("Q4_K", **WIDE), _SKIPPED | _LOAD),
    _layout("GGUF in Q6_K", _file("Q6_K", **WIDE), _SKIPPED | _LOAD),
    _layout("GGUF in Q2_K", _file("Q2_K", **WIDE), _SKIPPED | _LOAD),
    _layout("GGUF in IQ4_XS", _file("IQ4_XS", **WIDE), _SKIPPED | _LOAD),
    _layout("GGUF in three parts", _in_three_parts, _SKIPPED | _LOAD | refused(
        "transformers reads only whole GGUF files", ("transformers", "predict", "recommend", "streaming", "baseline")
    )),
    _layout("GGUF with a part missing", _a_part_missing, refused("m-00002-of-00003.gguf is missing")),
    _layout("GGUF under the suffix .bin", _file("Q8_0", "model.bin"), _SKIPPED | _LOAD),
    _layout("GGUF that was cut off", _changed("Q8_0", lambda whole: whole[:-1000]), refused("truncated: .* ends at byte")),
    _layout("GGUF of a type that ggml gave up", _changed("Q4_0", _of_type_31), refused("ggml's type 31, which weighin does not know")),
    _layout("GGUF of intermediate results (Q8_K)", _file("Q8_K", **WIDE), refused(
        "has the type Q8_K; the package gguf does not dequantise", all_but("inspect", "load")
    ) | _LOAD),
    _layout("GGUF of an architecture that transformers does not know", _of_a_vision_tower, _LOAD | refused(
        _NO_CLASS, all_but("inspect", "convert", "load")
    )),
    _layout("a folder of one GGUF file", _folder("F32"), _SKIPPED),
    _layout("a folder of one GGUF file in Q4_0, tied", _folder("Q4_0", tie_word_embeddings=True), _SKIPPED),
    _layout("a folder of config.json and a GGUF file", _folder("Q8_0", with_config=True), _SKIPPED),
    _layout("a folder of two GGUF models", _two_models, refused("this folder has 2 GGUF models: a.gguf, b.gguf")),
    _layout("a GGUF file beside model.safetensors", _beside_safetensors, {}),
    _layout("GGUF of Gemma 2, whose norms are shifted", _gemma, _SKIPPED),
    _layout("GGUF of GPT-2, whose matrices are transposed", _gpt2, _SKIPPED),
    _layout("GGUF of Qwen2-MoE, whose experts are joined", _experts, _SKIPPED),
]  # fmt: skip
