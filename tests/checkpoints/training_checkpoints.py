"""Checkpoints of training runs: the weights lie beside objects of any class, or in storages of their own."""

import argparse
import enum
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from layouts import NO_FOLDER, Layout, Made, Maker, all_but, refused
from small import WEIGHTS, Tensors, llama, saved, state

GROUP: Final = "Checkpoints of training runs"


class Precision(enum.Enum):
    MIXED = 16


class Config(dict[str, Any]):
    """The settings of a run, in a class of their own."""


class Average:
    """A moving average that keeps its weights as an attribute."""

    def __init__(self, shadow: dict[str, torch.Tensor]) -> None:
        self.shadow = shadow


def _optimizer() -> dict[str, Any]:
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def _lightning(tensors: Tensors) -> dict[str, Any]:
    ready, best = (
        {"current": {"ready": 2}},
        {"best_model_score": torch.tensor(0.5), "dirpath": "/x"},
    )
    settings = Config(act=torch.nn.ReLU(), refs=np.arange(5.0), precision=Precision.MIXED)
    return {
        "epoch": 2, "global_step": 40, "pytorch-lightning_version": "2.5.0", "state_dict": tensors,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": ready}},
        "callbacks": {"ModelCheckpoint": best}, "optimizer_states": [_optimizer()], "hyper_parameters": settings,
    }  # fmt: skip


def _fairseq(tensors: Tensors) -> dict[str, Any]:
    return {
        "args": argparse.Namespace(arch="transformer", lr=[5e-4]), "cfg": None, "model": tensors,
        "optimizer_history": [{"num_updates": 5}],
        "extra_state": {"train_iterator": {"epoch": 1}, "best": 3.2}, "last_optimizer_state": _optimizer(),
    }  # fmt: skip


def _megatron(tensors: Tensors) -> dict[str, Any]:
    rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
    return {
        "args": argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16),
        "checkpoint_version": 3.0,
        "model": {**tensors, "decoder.layers.0._extra_state": None},
        "optimizer": {"fp32_from_fp16_params": [[torch.ones(4)]]},
        "rng_state": [{**rng, "torch_rng_state": torch.get_rng_state()}],
    }


def _nerfstudio(tensors: Tensors) -> dict[str, Any]:
    return {
        "step": np.int64(29999), "pipeline": tensors, "optimizers": {"fields": _optimizer()},
        "scalers": {"scale": np.float64(65536.0)},
    }  # fmt: skip


def _deepmd(tensors: Tensors) -> dict[str, Any]:
    info = {"lr": np.float64(1e-3), "cutoffs": np.array([6.0, 4.0]), "step": 100}
    return {"model": {**tensors, "_extra_state": {"train_infos": info}}, "optimizer": {}}


def _nested(tensors: Tensors) -> dict[str, Any]:
    functions = {"schedule": partial(max, 1), (1, 2): None, "seen": {3, 4}}
    return {"run": functions, "state": {"step": 3, "net.ema": tensors}}


def _average(tensors: Tensors) -> dict[str, Any]:
    return {"model": {**tensors, "average": Average(dict(tensors))}}


def _beside(
    make: Callable[[Tensors], dict[str, Any]], name: str = "last.ckpt", **saving: Any
) -> Maker:
    """Return the maker of a file of what ``make`` puts around the weights."""

    def made(folder: Path) -> Made:
        tensors = state()
        torch.save(make(dict(tensors)), folder / name, **saving)
        return Made(folder / name, tensors)

    return made


def _extra_state(tensors: Tensors) -> dict[str, Any]:
    return {**tensors, "block._extra_state": {"scale": np.float32(2.0)}}


def _arrays(folder: Path) -> Made:
    torch.save({name: one.numpy() for name, one in state().items()}, folder / "model.pt")
    return Made(folder / "model.pt", state())


def _torch_dist(folder: Path) -> Made:
    import torch.distributed.checkpoint as dcp

    tensors = state()
    model = {f"decoder.{name}": one for name, one in tensors.items()}
    values = {"decoder.block._extra_state": {"recipe": "delayed"}}
    whole = {"model": model | values, "optimizer": {"exp_avg": state()}, "iteration": 10}
    path = folder / "iter_0000010"
    dcp.state_dict_saver.save(whole, checkpoint_id=path, no_dist=True)
    torch.save({"args": argparse.Namespace(num_layers=2), "iteration": 10}, path / "common.pt")
    return Made(path, tensors)


def _in_a_folder(folder: Path) -> Made:
    model = llama()
    model.save_pretrained(folder)
    (folder / WEIGHTS).unlink()
    saved_as = {"args": argparse.Namespace(lr=1), "state_dict": model.state_dict()}
    torch.save(saved_as, folder / "pytorch_model.bin")
    return Made(folder, model.state_dict(), is_folder=True)


def _empty() -> Tensors:
    return {name: torch.empty(0) for name in state()}


def _zero_3(folder: Path) -> Made:
    empty = _empty()
    states = {"module": empty, "param_shapes": [{"a": torch.Size([2])}], "ds_version": "0.16.0"}
    torch.save(states, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    flat = {"optimizer_state_dict": {"zero_stage": 3, "fp32_flat_groups": [torch.ones(9)]}}
    torch.save(flat, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return Made(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", empty)


def _slice() -> Tensors:
    return {"block.weight": torch.randn(64, 16, 16)[3], "block.bias": torch.randn(16)}


def _slices_of_one() -> Tensors:
    parts = zip("qkv", torch.randn(48, 16).chunk(3), strict=True)
    return {f"attention.{name}.weight": one for name, one in parts}


def _expanded() -> Tensors:
    return {"block.weight": torch.randn(1, 16).expand(64, 16), "block.bias": torch.randn(64)}


def _with_key(name: str, make: Maker, key: str, strip_prefix: str = "") -> list[Layout]:
    """Return the layout with its key, and without it, which is refused with the key that works."""
    options = {"key": key} | ({"strip_prefix": strip_prefix} if strip_prefix else {})
    words = rf"(not a flat state dict|NOT executed).*\n.*--key {key} \("
    return [
        Layout(name, GROUP, make, NO_FOLDER, options),
        Layout(f"{name}, without a key", GROUP, make, refused(words)),
    ]


_IN_FOLDER: Final = "from_pretrained.*\n.*weighin convert .*--key=state_dict"

LAYOUTS: Final = [
    *_with_key("Lightning", _beside(_lightning), "state_dict"),
    *_with_key("fairseq", _beside(_fairseq), "model"),
    *_with_key("the file of Megatron-LM, one rank", _beside(_megatron), "model"),
    *_with_key("nerfstudio", _beside(_nerfstudio), "pipeline"),
    *_with_key("DeePMD-kit", _beside(_deepmd), "model"),
    *_with_key("weights two levels deep", _beside(_nested), "state.net.ema"),
    *_with_key("a training checkpoint of torch before 1.6", _beside(_lightning, _use_new_zipfile_serialization=False), "state_dict"),
    *_with_key("a training checkpoint in pickle protocol 4", _beside(_lightning, pickle_protocol=4), "state_dict"),
    *_with_key("Megatron-Core, torch_dist", _torch_dist, "model", "decoder."),
    Layout("a state dict with an extra state", GROUP, _beside(_extra_state, "model.pt"), NO_FOLDER),
    Layout(
        "a training checkpoint in a folder of transformers", GROUP, _in_a_folder,
        refused(_IN_FOLDER, ("streaming", "transformers", "baseline", "predict", "recommend")), {"key": "state_dict"},
    ),
    Layout(
        "an object that holds weights in the selection", GROUP, _beside(_average),
        refused(r"NOT executed: 'model\.average' refers to \w+\.Average\n"), {"key": "model"},
    ),
    Layout("a state dict of NumPy arrays", GROUP, _arrays, refused(r"'embed\.weight' is a NumPy array, not a tensor\n.*torch\.from_numpy")),
    Layout(
        "model states of ZeRO-3", GROUP, _zero_3,
        refused(r"all tensors are empty, because ZeRO-3 keeps the weights in \*_optim_states\.pt\n.*the folder"),
    ),
    Layout("empty tensors", GROUP, saved(_empty), refused("all tensors have 0 elements.*\n.*gather", all_but("load"))),
    Layout("a slice of a large storage", GROUP, saved(_slice), NO_FOLDER),
    Layout("three slices of one storage", GROUP, saved(_slices_of_one), NO_FOLDER),
    Layout("an expanded tensor", GROUP, saved(_expanded), NO_FOLDER),
]  # fmt: skip
