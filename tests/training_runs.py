"""Write the files of DeepSpeed's and Megatron-LM's checkpoints without these packages.

The files have the keys, values and classes of DeepSpeed 0.19: they were compared with files of
DeepSpeed itself (0.19.8), whose ``zero_to_fp32.py`` also read them.
"""

import argparse
import enum
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

Tensors = Mapping[str, torch.Tensor]
_CLASSES: dict[str, Any] = {
    "deepspeed.runtime.zero.config": enum.IntEnum("ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}),
    "deepspeed.runtime.fp16.loss_scaler": type("LossScaler", (), {}),
    "deepspeed.utils.tensor_fragment": make_dataclass("fragment_address", ["numel", "start"]),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model whose trained weights are in float32, and its other tensors in ``dtype``.

    Attributes:
        groups: the trained weights of each group of the optimizer.
        frozen: the weights that the optimizer does not have.
        shared: maps a tied name to the name of its weight.
    """

    groups: Sequence[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        return {name: one for group in self.groups for name, one in group.items()}

    @property
    def truth(self) -> dict[str, torch.Tensor]:
        """The tensors that a reader must return; tied names share one tensor."""
        frozen = {name: one.to(self.dtype) for name, one in self.frozen.items()}
        found = {**self.trained, **frozen, **self.buffers}
        return found | {name: found[source] for name, source in self.shared.items()}


def small_model() -> Model:
    """Return tensors whose sizes no number of ranks divides, in two groups of parameters."""
    weights = {
        "embed.weight": torch.randn(17, 6), "layers.0.weight": torch.randn(6, 6),
        "cube": torch.randn(3, 5, 7),
    }  # fmt: skip
    small = {
        "layers.0.bias": torch.randn(6), "scale": torch.randn(1), "temperature": torch.tensor(0.5),
    }  # fmt: skip
    return Model(
        [weights, small],
        {"frozen.weight": torch.randn(5, 3), "frozen.bias": torch.randn(3)},
        {"mean": torch.randn(6), "steps": torch.arange(4)},
        {"head.weight": "embed.weight"},
    )


def _new_step(run: Path, name: str, latest: str) -> Path:
    """Return the empty folder of the newest step of a run."""
    (run / name).mkdir(parents=True)
    (run / latest).write_text(name)
    return run / name


def write_zero(run: Path, model: Model, stage: int, ranks: int, alignment: int = 1) -> Path:
    """Write the newest step of a run with ``ranks`` ranks; return the step's folder.

    ``alignment`` is the number of elements to a multiple of which stages 1 and 2 pad each parameter.
    """
    step = _new_step(run, "global_step10", "latest")
    with classes():
        _save_model_states(step, model, stage, ranks)
        for rank in range(ranks if stage else 0):
            states = _optimizer_states(model, stage, rank, ranks, alignment)
            torch.save(states, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return step


def write_universal(run: Path, model: Model, stage: int, ranks: int) -> Path:
    """Write what ``ds_to_universal.py`` makes of a step; return the new step's folder."""
    step = _new_step(run, "global_step10_universal", "latest_universal")
    for name, one in model.trained.items():
        (step / "zero" / name).mkdir(parents=True)
        for kind, value in (("fp32", one), ("exp_avg", one * 0), ("exp_avg_sq", one * 0)):
            whole = value.flatten() if stage == 3 else {"cat_dim": 0, "param": value}
            torch.save(whole, step / "zero" / name / f"{kind}.pt")
    torch.save({"param_groups": []}, step / "zero" / "optimizer_state.pt")
    _save_model_states(step, model, stage, ranks)
    return step


def write_megatron(run: Path, states: Sequence[Mapping[str, Any]]) -> Path:
    """Write the newest step of a run, of one rank for each of ``states``; return the step's folder."""
    step = run / "iter_0000010"
    for rank, state in enumerate(states):
        (step / f"mp_rank_{rank:02d}").mkdir(parents=True)
        rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
        content = {
            "args": argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16),
            "checkpoint_version": 3.0, "iteration": 10, "model": state,
            "rng_state": [{**rng, "torch_rng_state": torch.get_rng_state()}],
        }  # fmt: skip
        torch.save(content, step / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    return step


def _save_model_states(step: Path, model: Model, stage: int, ranks: int) -> None:
    """Write a file for each rank under ZeRO 3, and one for all ranks otherwise."""
    for rank in range(ranks if stage == 3 else 1):
        rank_of = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        states = _model_states(model, stage, rank, ranks)
        torch.save(states, step / f"{rank_of}mp_rank_00_model_states.pt")


def _model_states(model: Model, stage: int, rank: int, ranks: int) -> dict[str, Any]:
    module = OrderedDict[str, torch.Tensor]()
    for name, one in model.truth.items():
        kept = name in model.buffers
        module[name] = one.clone() if kept else one.to(model.dtype)
        if stage == 3 and not kept:
            module[name] = torch.empty(0, dtype=model.dtype)
    frozen = OrderedDict((name, one.to(model.dtype)) for name, one in model.frozen.items())
    fragments = OrderedDict((name, _share(one, rank, ranks)) for name, one in frozen.items())
    return {
        "module": module, "buffer_names": list(model.buffers), "optimizer": None,
        "param_shapes": [_shapes(group) for group in model.groups] if stage else None,
        "frozen_param_shapes": _shapes(frozen) if stage > 1 else None,
        "shared_params": dict(model.shared) if rank == 0 else {},
        "frozen_param_fragments": {2: frozen, 3: fragments}.get(stage),
        "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0,
        "global_steps": 10, "global_samples": 80, "dp_world_size": ranks, "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}}, "ds_version": "0.19.8",
    }  # fmt: skip


def _optimizer_states(
    model: Model, stage: int, rank: int, ranks: int, alignment: int
) -> dict[str, Any]:
    stages, scaler, fragment = _CLASSES.values()
    loss_scaler = scaler()
    vars(loss_scaler).update(cur_scale=1.0, dynamic=False)
    state: dict[str, Any] = {
        "loss_scaler": loss_scaler, "dynamic_loss_scale": False, "overflow": False, "zero_stage": stages(stage),
    }  # fmt: skip
    if stage == 3:
        shares = [[_share(one, rank, ranks) for one in group.values()] for group in model.groups]
        flats = [torch.cat(each) for each in shares]
        state |= {"partition_count": ranks, "fp32_flat_groups": flats}
        state["optimizer_state_dict"] = _moments(flats)
    else:
        both = [_partition(group, rank, ranks, alignment) for group in model.groups]
        flats = [flat for flat, _ in both]
        state |= {
            "base_optimizer_state": _moments(flats), "single_partition_of_fp32_groups": flats,
            "group_paddings": [0 for _ in flats],
            "param_alignment_paddings": [paddings for _, paddings in both],
            "partition_count": [ranks for _ in flats],
            "param_slice_mappings": [OrderedDict(name=fragment(1, 0)) for _ in flats],
            "ds_version": "0.19.8",
        }  # fmt: skip
    return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}


def _share(one: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's share of a parameter under ZeRO 3, padded to the length of the others."""
    size = -(-one.numel() // ranks)
    padded = pad(one.flatten(), (0, size * ranks - one.numel()), value=9.0)
    return padded[rank * size : (rank + 1) * size].clone()


def _partition(
    group: Tensors, rank: int, ranks: int, alignment: int
) -> tuple[torch.Tensor, list[int]]:
    """Return a rank's share of a group under ZeRO 1 and 2, without the padding of the last rank."""
    paddings, at = [], 0
    for number, one in enumerate(group.values(), 1):
        at += one.numel()
        paddings.append(-at % alignment if number < len(group) else 0)
        at += paddings[-1]
    parts = zip(group.values(), paddings, strict=True)
    flat = torch.cat([pad(one.flatten(), (0, padding), value=9.0) for one, padding in parts])
    size = -(-len(flat) // (2 * ranks)) * 2
    return flat[rank * size : (rank + 1) * size].clone(), paddings


def _moments(flats: Sequence[torch.Tensor]) -> dict[str, Any]:
    moments = {
        number: {"step": torch.tensor(10.0), "exp_avg": flat * 0, "exp_avg_sq": flat * 0}
        for number, flat in enumerate(flats)
    }
    groups = [{"lr": 1e-3, "params": [number]} for number in moments]
    return {"state": moments, "param_groups": groups}


def _shapes(group: Tensors) -> "OrderedDict[str, torch.Size]":
    return OrderedDict((name, one.shape) for name, one in group.items())


@contextmanager
def classes() -> Iterator[None]:
    """Let pickle refer to DeepSpeed's classes by their names within the context."""
    made = dict[str, ModuleType]()
    for path, kind in _CLASSES.items():
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            made[name] = ModuleType(name)
        kind.__module__ = path
        setattr(made[path], kind.__name__, kind)
    before = dict(sys.modules)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
        sys.modules.update(before)
