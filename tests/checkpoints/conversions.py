"""Random conversions: a folder whose weights a load must change, and the load that is the reference.

Each kind of conversion draws a small model of odd sizes. ``check`` loads it with weighin and with the
library that defines the conversion, and compares both models bit by bit.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf_files
import pytest
import quantised_folders as packing
import torch
from cells import CheckpointError, ConfigError, arguments_to_dequantise
from hypothesis import strategies as st
from model_differences import state_differences, ties
from quantised_folders import Pack
from safetensors.torch import load_file
from small import FLOATS, PT, WEIGHTS, Tensors, edit, save, save_shards, transformers

from weighin import load_pretrained

Draw = Callable[[st.SearchStrategy[Any]], Any]

COMPARED: Final = "compared"


@dataclass(frozen=True)
class Folder:
    """A folder to convert.

    Attributes:
        path: the folder.
        dtype: the dtype that the user wants; "auto" for that of the configuration.
        reference: the load that defines the result.
    """

    path: Path
    dtype: torch.dtype | str
    reference: Callable[[], Any]


def check(made: Folder) -> str:
    """Assert that weighin loads what the reference loads, or that both refuse the folder.

    Return ``COMPARED``, or why the folder was refused.
    """
    wanted, raised = None, None
    try:
        wanted = made.reference()
    except Exception as error:
        raised = error
    try:
        found = load_pretrained(made.path, dtype=made.dtype)
    except (CheckpointError, ConfigError) as error:
        assert error.message and error.repair
        assert raised, f"refused what the reference loads: {error.message}"
        return f"the reference says: {raised}"
    assert raised is None, f"loaded what the reference refuses: {raised}"
    assert_equal(found, wanted)
    return COMPARED


def assert_equal(ours: Any, theirs: Any) -> None:
    """Assert that two models have the same tensors, bit by bit, the same ties and the same dtype."""
    assert type(ours) is type(theirs)
    assert ours.training is theirs.training
    assert ours.config.dtype == theirs.config.dtype
    found, wanted = (one.state_dict() | dict(one.named_buffers()) for one in (ours, theirs))
    # Not a number is one value, whose sign depends on the processor's unit.
    assert state_differences(found, wanted, nan_bits=False) == []
    assert ties(found) == ties(wanted)


# The models --------------------------------------------------------------------------------------


def _common(draw: Draw, hidden: st.SearchStrategy[int]) -> dict[str, Any]:
    size = draw(hidden)
    heads = draw(st.sampled_from([n for n in (1, 2, 4) if size % n == 0]))
    return {
        "hidden_size": size,
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        "head_dim": draw(st.sampled_from((4, 10, 32))),
        "vocab_size": draw(st.integers(5, 70)),
        "max_position_embeddings": 32,
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": None,
    }


def _llama(draw: Draw, sizes: st.SearchStrategy[int]) -> Any:
    package, has_bias = transformers(), draw(st.booleans())
    config = package.LlamaConfig(
        **_common(draw, sizes), intermediate_size=draw(sizes), attention_bias=has_bias, mlp_bias=has_bias
    )  # fmt: skip
    return package.LlamaForCausalLM(config)


def _mixture(draw: Draw, sizes: st.SearchStrategy[int]) -> Any:
    package, experts, settings = transformers(), draw(st.integers(1, 7)), _common(draw, sizes)
    settings["num_experts_per_tok"] = min(2, experts)
    if draw(st.booleans()):
        config = package.MixtralConfig(
            **settings, intermediate_size=draw(sizes), num_local_experts=experts
        )
        return package.MixtralForCausalLM(config)
    config = package.Qwen3MoeConfig(
        **settings, intermediate_size=draw(sizes), moe_intermediate_size=draw(sizes),
        num_experts=experts, decoder_sparse_step=draw(st.integers(1, 2)),
    )  # fmt: skip
    return package.Qwen3MoeForCausalLM(config)


def _gpt_oss(draw: Draw) -> Any:
    package, sizes = transformers(), st.sampled_from((32, 64, 96))
    settings = _common(draw, sizes)
    config = package.GptOssConfig(
        **settings, intermediate_size=draw(sizes), num_local_experts=draw(st.integers(1, 5)),
        num_experts_per_tok=1, layer_types=["full_attention"] * settings["num_hidden_layers"],
    )  # fmt: skip
    return package.GptOssForCausalLM(config)


# The folders ---------------------------------------------------------------------------------------


def _write(
    draw: Draw,
    folder: Path,
    model: Any,
    pack: Pack | None = None,
    quantization: dict[str, Any] | None = None,
) -> None:
    """Write a model, with codes for the matrices that ``pack`` packs, in one file or in several."""
    model.save_pretrained(folder)
    whole = load_file(folder / WEIGHTS)
    state: Tensors = {}
    odd = draw(st.sampled_from((None, None, *FLOATS)))
    for name, value in whole.items():
        if pack and (packed := pack(name, value.float())):
            state |= packed
        elif odd and draw(st.booleans()):
            state[name] = value.to(odd)
        else:
            state[name] = value
    items, count = [(key, one.contiguous()) for key, one in state.items()], draw(st.integers(1, 3))
    if count == 1:
        save(dict(items), folder / WEIGHTS, metadata=PT)
    else:
        (folder / WEIGHTS).unlink()
        parts = [dict(items[number::count]) for number in range(count)]
        save_shards(folder, parts, metadata=PT)
    if quantization:
        edit(folder / "config.json", quantization_config=quantization)


def _of_transformers(draw: Draw, folder: Path, model: Any) -> Folder:
    """Return the folder with from_pretrained, which dequantises, as the reference."""
    dtype = draw(st.sampled_from(("auto", *FLOATS)))
    kind = type(model)

    def reference() -> Any:
        weights = next(folder.glob("*.safetensors"))
        return kind.from_pretrained(folder, dtype=dtype, **arguments_to_dequantise(weights))

    return Folder(folder, dtype, reference)


def _fp8(draw: Draw, folder: Path) -> Folder:
    sizes = st.one_of(st.sampled_from((32, 64, 96, 128)), st.integers(1, 60).map(lambda n: 2 * n))
    model = draw(st.sampled_from((_llama, _mixture)))(draw, sizes).to(torch.bfloat16)
    block = draw(st.sampled_from(((128, 128), (32, 32), (16, 64), (1, 32))))
    scales = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    grid = draw(st.sampled_from(("blocks", "blocks", "channels", "one")))

    def pack(name: str, matrix: torch.Tensor) -> Tensors:
        if not re.search(r"(_proj|\.w[123])\.weight$", name):
            return {}
        shape = {
            "blocks": tuple(-(-size // of) for size, of in zip(matrix.shape, block, strict=True)),
            "channels": (matrix.shape[0], 1),
            "one": (1, 1),
        }[grid]
        codes = (matrix * 4000).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = (torch.rand(shape) * 1e-3 + 1e-4).to(scales)
        return {name: codes, f"{name}_scale_inv": scale}

    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    _write(draw, folder, model, pack, described)
    made = _of_transformers(draw, folder, model)

    def reference() -> Any:
        with _smaller_blocks_right(block):
            return made.reference()

    return replace(made, reference=reference)


@contextmanager
def _smaller_blocks_right(block: tuple[int, int]) -> Iterator[None]:
    """Let transformers multiply the codes of a smaller last block by the scale of that block."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    usual = Fp8Dequantize._dequantize_one

    def dequantize(self: Any, codes: Any, scales: Any, output_dtype: Any = None) -> torch.Tensor:
        grid = tuple(-(-size // of) for size, of in zip(codes.shape, block, strict=True))
        if tuple(scales.shape) != grid or all(
            count == 1 or size % of == 0
            for count, size, of in zip(grid, codes.shape, block, strict=True)
        ):
            return usual(self, codes, scales, output_dtype)
        wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        whole: torch.Tensor = codes.float() * wide[: codes.shape[0], : codes.shape[1]]
        return whole.to(output_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Dequantize, "_dequantize_one", dequantize)
        yield


def _mxfp4(draw: Draw, folder: Path) -> Folder:
    model = _gpt_oss(draw).to(torch.bfloat16)

    def pack(name: str, stacked: torch.Tensor) -> Tensors:
        if stacked.ndim != 3:
            return {}
        packed = packing.mxfp4(name, stacked)
        scales = packed[f"{name}_scales"]
        return packed | {f"{name}_scales": torch.randint_like(scales, 100, 135)}

    described = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    _write(draw, folder, model, pack, described)
    return _of_transformers(draw, folder, model)


def _compressed(name: str) -> Callable[[Draw, Path], Folder]:
    layout = packing.LAYOUTS[name]

    def pack(key: str, matrix: torch.Tensor) -> Tensors:
        is_packed = key.endswith("_proj.weight")
        return layout.pack(key.removesuffix(".weight"), matrix) if is_packed else {}

    def make(draw: Draw, folder: Path) -> Folder:
        wide = st.sampled_from((32, 64, 96))
        odd = st.integers(1, 50).map(lambda n: 2 * n)
        model = _llama(draw, wide if name == "compressed int4" else odd).to(torch.bfloat16)
        if name == "compressed int4":  # all rows have whole groups of 32 elements
            model.config.head_dim = 32
            model = type(model)(model.config).to(torch.bfloat16)
        _write(draw, folder, model, pack, layout.config["quantization_config"])
        return _of_transformers(draw, folder, model)

    return make


def _experts(draw: Draw, folder: Path) -> Folder:
    sizes = st.integers(1, 40).map(lambda n: 2 * n)
    model = _mixture(draw, sizes).to(draw(st.sampled_from(FLOATS)))
    _write(draw, folder, model)
    return _of_transformers(draw, folder, model)


def _gguf(draw: Draw, folder: Path) -> Folder:
    import gguf

    kind = draw(st.sampled_from(gguf_files.read_types()))
    unit = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    wide = 256 if unit > 32 else draw(st.sampled_from((32, 64)))
    settings = {
        "hidden_size": wide,
        "intermediate_size": wide * draw(st.integers(1, 2)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from((1, 2, 4))),
        "vocab_size": draw(st.integers(5, 70)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    gguf_files._file(kind, **settings)(folder)
    dtype = draw(st.sampled_from(("auto", *FLOATS)))
    options = {} if dtype == "auto" else {"dtype": dtype}
    return Folder(folder, dtype, lambda: gguf_files.reference(folder, **options))


MAKERS: Final[dict[str, tuple[Callable[[Draw, Path], Folder], str]]] = {
    "fp8": (_fp8, ""),
    "mxfp4": (_mxfp4, ""),
    **{name: (_compressed(name), "compressed_tensors") for name in packing.OURS if name not in packing.DEQUANTISED},
    "experts": (_experts, ""),
    "gguf": (_gguf, "gguf"),
}  # fmt: skip
"""For each kind of conversion, the function that writes a folder, and the package that it needs."""
