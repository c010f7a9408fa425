"""Folders of training runs: the files of all ranks of DeepSpeed and Megatron-LM."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from layouts import NO_FOLDER, Layout, Made, Maker, refused
from small import Change, saved, state
from training_runs import Model, write_megatron, write_universal, write_zero

GROUP: Final = "Training runs of several ranks"


def _model() -> Model:
    """Return two groups of weights, frozen weights, a buffer and a tied weight."""
    weights = state()
    groups = [
        {name: one for name, one in weights.items() if one.dim() == 2},
        {name: one for name, one in weights.items() if one.dim() == 1} | {"scale": torch.randn(1)},
    ]
    frozen = {"frozen.weight": torch.randn(5, 3)}
    buffers = {"mean": torch.randn(7), "steps": torch.arange(3)}
    return Model(groups, frozen, buffers, {"head.weight": "embed.weight"})


def _zero(
    stage: int, ranks: int, change: Change = lambda _: None, alignment: int = 1, model: Callable[[], Model] = _model
) -> Maker:  # fmt: skip
    """Return the maker of a run of DeepSpeed; ``change`` changes the folder of its step."""

    def make(folder: Path) -> Made:
        made = model()
        change(write_zero(folder / "run", made, stage, ranks, alignment))
        return Made(folder / "run", made.truth)

    return make


def _step(folder: Path) -> Made:
    made = _zero(3, 3)(folder)
    return Made(made.path / "global_step10", made.truth)


def _half_model() -> Model:
    return replace(_model(), dtype=torch.float16, frozen={})


def _prefixed(folder: Path) -> Made:
    weights = state()
    groups = [{f"module.{name}": one for name, one in weights.items()}]
    write_zero(folder / "run", Model(groups), 3, 2)
    return Made(folder / "run", weights)


def _without_zero(folder: Path) -> Made:
    model = _model()
    write_zero(folder / "run", model, 0, 1)
    kept = model.buffers
    stored = {
        name: one.clone() if name in kept else one.bfloat16() for name, one in model.truth.items()
    }
    stored["head.weight"] = stored["embed.weight"]
    return Made(folder / "run", stored)


def _universal(stage: int) -> Maker:
    def make(folder: Path) -> Made:
        model = _model()
        write_universal(folder / "run", model, stage, 3)
        return Made(folder / "run", model.truth)

    return make


def _lacks(pattern: str) -> Change:
    def change(step: Path) -> None:
        for file in step.glob(pattern):
            file.unlink()

    return change


def _has(name: str) -> Change:
    return lambda step: torch.save({"weight": torch.ones(2)}, step / name)


def _no_step(folder: Path) -> Made:
    (folder / "run").mkdir()
    (folder / "run" / "latest").write_text("global_step20")
    return Made(folder / "run", state())


def _megatron(ranks: int) -> Maker:
    def make(folder: Path) -> Made:
        weights = state(torch.bfloat16)
        write_megatron(folder / "run", [weights] * ranks)
        return Made(folder / "run", weights)

    return make


def _of_torch(name: str, begin: int) -> Maker:
    """Return a maker of four rows of a matrix, as HuggingFaceStorageWriter writes them, from row ``begin`` on."""
    info = json.dumps({"weight": {"saved_offsets": [begin, 0]}})
    metadata = {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"}
    return saved(lambda: {"weight": torch.randn(4, 10)}, name, metadata=metadata)


_OF_TORCH: Final = (
    r"a shard of torch's distributed checkpoint \(DCP_SHARDING_INFO in its header\), which may hold only one"
    r" rank's part of each tensor\njoin all ranks' shards by consolidate_safetensors_files\("
)
_READ: Final[dict[str, Maker]] = {
    "DeepSpeed ZeRO 1, 3 ranks": _zero(1, 3),
    "DeepSpeed ZeRO 2, 3 ranks, aligned parameters": _zero(2, 3, alignment=6),
    "DeepSpeed ZeRO 2, float16": _zero(2, 2, model=_half_model),
    "DeepSpeed ZeRO 3, 2 ranks": _zero(3, 2),
    "DeepSpeed ZeRO 3, more ranks than elements": _zero(3, 9),
    "DeepSpeed ZeRO 3, the folder of a step": _step,
    "DeepSpeed without ZeRO": _without_zero,
    "a universal checkpoint of ZeRO 1": _universal(1),
    "a universal checkpoint of ZeRO 3": _universal(3),
    "a file that one rank wrote for all": _of_torch("model-00001-of-00001.safetensors", 0),
}
_REFUSED: Final[dict[str, tuple[Maker, str]]] = {
    "DeepSpeed ZeRO 3, a rank's weights are missing": (
        _zero(3, 3, _lacks("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")),
        r"missing: bf16_zero_pp_rank_1_mp_rank_00_optim_states\.pt\s*copy them here",
    ),
    "DeepSpeed ZeRO 3, a rank's model states are missing": (
        _zero(3, 3, _lacks("zero_pp_rank_2_mp_rank_00_model_states.pt")),
        r"missing: zero_pp_rank_2_mp_rank_00_model_states\.pt\s*copy them here",
    ),
    "a shard of torch's distributed checkpoint in safetensors": (_of_torch("shard-00001-model-00001-of-00001.safetensors", 4), _OF_TORCH),
    "such a shard whose name says that it is whole": (_of_torch("model-00001-of-00001.safetensors", 10), _OF_TORCH),
    "such a shard that was renamed": (_of_torch("model.safetensors", 0), _OF_TORCH),
    "DeepSpeed ZeRO 2 without optimizer states": (
        _zero(2, 2, _lacks("*_optim_states.pt")), r"has no files \*_optim_states\.pt, where DeepSpeed[\s\S]*--key module",
    ),
    "DeepSpeed, tensor parallelism": (_zero(2, 2, _has("mp_rank_01_model_states.pt")), r"tensor parallelism[\s\S]*ds_to_universal"),
    "DeepSpeed, pipeline parallelism": (_zero(2, 2, _has("layer_00-model_00-model_states.pt")), r"pipeline parallelism[\s\S]*ds_to_universal"),
    "DeepSpeed, expert parallelism": (
        _zero(2, 2, _has("layer_0_expert_1_mp_rank_00_model_states.pt")), r"expert parallelism[\s\S]*save the experts of all ranks",
    ),
    "a run whose newest step is missing": (_no_step, r"latest names the step global_step20, which this folder lacks\s*copy the folder"),
    "Megatron-LM, one rank": (_megatron(1), r"tools/checkpoint/convert\.py[\s\S]*mp_rank_00/model_optim_rng\.pt\s+--key\s+model"),
    "Megatron-LM, two tensor-parallel ranks": (_megatron(2), r"mp_rank_00, mp_rank_01[\s\S]*tools/checkpoint/convert\.py"),
}  # fmt: skip

LAYOUTS: Final = [
    Layout("DeepSpeed ZeRO 3, names that begin with module.", GROUP, _prefixed, NO_FOLDER, {"strip_prefix": "module."}),
    *(Layout(name, GROUP, make, NO_FOLDER) for name, make in _READ.items()),
    *(Layout(name, GROUP, make, refused(words)) for name, (make, words) in _REFUSED.items()),
]  # fmt: skip
