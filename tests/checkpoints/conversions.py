"""Random conversions: a folder whose weights a load must change, and the load that is the reference.

Each kind of conversion draws a small model of odd sizes. ``check`` loads it with weighin and with the
library that defines the conversion, and compares both models bit by bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf_files
import numpy as np
import pytest
import quantised_folders as packing
import torch
from cells import UNDECODED, CheckpointError, ConfigError, arguments_to_dequantise
from hypothesis import strategies as st
from model_differences import state_differences
from quantised_folders import State
from safetensors.torch import load_file, save_file
from small import transformers

from weighin import load_pretrained

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
Draw = Callable[[st.SearchStrategy[Any]], Any]

COMPARED: Final = "compared"


@dataclass(frozen=True)
class Folder:
    """A folder to convert.

    Attributes:
        path: the folder.
        dtype: the dtype that the user wants; "auto" for that of the configuration.
        reference: the load that defines the result.
        options: further arguments of ``load_pretrained``.
    """

    path: Path
    dtype: torch.dtype | str
    reference: Callable[[], Any]
    options: dict[str, Any]


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
        found = load_pretrained(made.path, dtype=made.dtype, **made.options)
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
    tensors, expected = _tensors(ours), _tensors(theirs)
    # Not a number is one value, whose sign depends on the processor's unit.
    assert state_differences(tensors, expected, nan_bits=False) == []
    assert _shared(tensors) == _shared(expected)


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = model.state_dict() | dict(model.named_buffers())
    return tensors


def _shared(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """Return the groups of names that share memory."""
    places: dict[int, set[str]] = {}
    for name, one in tensors.items():
        places.setdefault(one.data_ptr(), set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}


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
    package = transformers()
    has_bias = draw(st.booleans())
    config = package.LlamaConfig(
        **_common(draw, sizes), intermediate_size=draw(sizes), attention_bias=has_bias, mlp_bias=has_bias
    )  # fmt: skip
    return package.LlamaForCausalLM(config)


def _mixture(draw: Draw, sizes: st.SearchStrategy[int]) -> Any:
    package = transformers()
    experts, common = draw(st.integers(1, 7)), _common(draw, sizes)
    chosen = {"num_experts_per_tok": min(2, experts)}
    if draw(st.booleans()):
        config = package.MixtralConfig(
            **common, **chosen, intermediate_size=draw(sizes), num_local_experts=experts
        )
        return package.MixtralForCausalLM(config)
    config = package.Qwen3MoeConfig(
        **common, **chosen, intermediate_size=draw(sizes), moe_intermediate_size=draw(sizes),
        num_experts=experts, decoder_sparse_step=draw(st.integers(1, 2)),
    )  # fmt: skip
    return package.Qwen3MoeForCausalLM(config)


def _gpt_oss(draw: Draw) -> Any:
    package = transformers()
    common = _common(draw, st.sampled_from((32, 64, 96)))
    layers = common["num_hidden_layers"]
    config = package.GptOssConfig(
        **common, intermediate_size=draw(st.sampled_from((32, 64, 96))),
        num_local_experts=draw(st.integers(1, 5)), num_experts_per_tok=1,
        layer_types=["full_attention"] * layers,
    )  # fmt: skip
    return package.GptOssForCausalLM(config)


# The folders ---------------------------------------------------------------------------------------


def _write(
    draw: Draw,
    folder: Path,
    model: Any,
    pack: Callable[[str, torch.Tensor], State] | None = None,
    quantization: dict[str, Any] | None = None,
) -> None:
    """Write a model, with codes for the matrices that ``pack`` packs, in one file or in several."""
    model.save_pretrained(folder)
    whole: State = load_file(folder / "model.safetensors")
    state: State = {}
    odd = draw(st.sampled_from((None, None, *FLOATS)))
    for name, value in whole.items():
        if pack and (packed := pack(name, value.float())):
            state |= packed
        elif odd and draw(st.booleans()):
            state[name] = value.to(odd)
        else:
            state[name] = value
    _save(folder, {key: one.contiguous() for key, one in state.items()}, draw(st.integers(1, 3)))
    config = json.loads((folder / "config.json").read_text())
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def _save(folder: Path, state: State, count: int) -> None:
    if count == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {key: one for at, (key, one) in enumerate(state.items()) if at % count == number}
        save_file(part, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _of_transformers(draw: Draw, folder: Path, model: Any) -> Folder:
    """Return the folder with from_pretrained, which dequantises, as the reference."""
    dtype = draw(st.sampled_from(("auto", *FLOATS)))
    kind = type(model)

    def reference() -> Any:
        weights = next(folder.glob("*.safetensors"))
        return kind.from_pretrained(folder, dtype=dtype, **arguments_to_dequantise(weights))

    return Folder(folder, dtype, reference, {})


def _fp8(draw: Draw, folder: Path) -> Folder:
    sizes = st.one_of(st.sampled_from((32, 64, 96, 128)), st.integers(1, 60).map(lambda n: 2 * n))
    model = draw(st.sampled_from((_llama, _mixture)))(draw, sizes).to(torch.bfloat16)
    block = draw(st.sampled_from(((128, 128), (32, 32), (16, 64), (1, 32))))
    scales = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    grid = draw(st.sampled_from(("blocks", "blocks", "channels", "one")))

    def pack(name: str, matrix: torch.Tensor) -> State:
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

    def pack(name: str, stacked: torch.Tensor) -> State:
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

    def make(draw: Draw, folder: Path) -> Folder:
        wide = st.sampled_from((32, 64, 96))
        odd = st.integers(1, 50).map(lambda n: 2 * n)
        model = _llama(draw, wide if name == "compressed int4" else odd).to(torch.bfloat16)
        if name == "compressed int4":
            model = _with_whole_groups(model)

        def pack(key: str, matrix: torch.Tensor) -> State:
            return (
                layout.pack(key.removesuffix(".weight"), matrix)
                if key.endswith("_proj.weight")
                else {}
            )

        _write(draw, folder, model, pack, layout.config["quantization_config"])
        return _of_transformers(draw, folder, model)

    return make


def _with_whole_groups(model: Any) -> Any:
    """Return a model like ``model``, whose rows all have whole groups of 32 elements."""
    model.config.head_dim = 32
    return type(model)(model.config).to(torch.bfloat16)


def _experts(draw: Draw, folder: Path) -> Folder:
    sizes = st.integers(1, 40).map(lambda n: 2 * n)
    model = _mixture(draw, sizes).to(draw(st.sampled_from(FLOATS)))
    _write(draw, folder, model)
    return _of_transformers(draw, folder, model)


def _gguf(draw: Draw, folder: Path) -> Folder:
    import gguf

    kinds = [kind.name for kind in gguf.GGMLQuantizationType if kind.name in gguf_format_types()]
    kind = draw(st.sampled_from(kinds))
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
    with np.errstate(all="ignore"):  # random codes have infinite scales
        gguf_files._file(kind, **settings)(folder)
    dtype = draw(st.sampled_from(("auto", *FLOATS)))

    def reference() -> Any:
        options = {} if dtype == "auto" else {"dtype": dtype}
        package = transformers()
        with np.errstate(all="ignore"):
            return package.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file="model.gguf", **options
            )

    return Folder(folder, dtype, reference, {})


def gguf_format_types() -> set[str]:
    """Return the types of GGUF that from_pretrained reads."""
    import gguf

    left_out = UNDECODED | {"F64", "I8", "I16", "I32", "I64"}
    return {kind.name for kind in gguf.GGMLQuantizationType} - left_out


MAKERS: Final[dict[str, tuple[Callable[[Draw, Path], Folder], str]]] = {
    "fp8": (_fp8, ""),
    "mxfp4": (_mxfp4, ""),
    "compressed fp8": (_compressed("compressed fp8"), "compressed_tensors"),
    "compressed int8": (_compressed("compressed int8"), "compressed_tensors"),
    "compressed int4": (_compressed("compressed int4"), "compressed_tensors"),
    "experts": (_experts, ""),
    "gguf": (_gguf, "gguf"),
}
"""For each kind of conversion, the function that writes a folder, and the package that it needs."""
