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
        "embed.weight": torch.randn(17, 6),
        "layers.0.weight": torch.randn(6, 6),
        "cube": torch.randn(3, 5, 7),
    }
    small = {
        "layers.0.bias": torch.randn(6),
        "scale": torch.randn(1),
        "temperature": torch.tensor(0.5),
    }
    return Model(
        [weights, small],
        {"frozen.weight": torch.randn(5, 3), "frozen.bias": torch.randn(3)},
        {"mean": torch.randn(6), "steps": torch.arange(4)},
        {"head.weight": "embed.weight"},
    )


def write_zero(run: Path, model: Model, stage: int, ranks: int, alignment: int = 1) -> Path:
    """Write the newest step of a run with ``ranks`` ranks; return the step's folder.

    ``alignment`` is the number of elements to a multiple of which stages 1 and 2 pad each parameter.
    """
    step = run / "global_step10"
    step.mkdir(parents=True)
    (run / "latest").write_text(step.name)
    with classes():
        for rank in range(ranks):
            states = _model_states(model, stage, rank, ranks)
            if stage == 3 or rank == 0:
                rank_of = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                torch.save(states, step / f"{rank_of}mp_rank_00_model_states.pt")
            if stage:
                states = _optimizer_states(model, stage, rank, ranks, alignment)
                torch.save(states, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return step


def write_universal(run: Path, model: Model, stage: int, ranks: int) -> Path:
    """Write what ``ds_to_universal.py`` makes of a step; return the new step's folder."""
    step = run / "global_step10_universal"
    step.mkdir(parents=True)
    (run / "latest_universal").write_text(step.name)
    for name, one in model.trained.items():
        (step / "zero" / name).mkdir(parents=True)
        for kind, value in (("fp32", one), ("exp_avg", one * 0), ("exp_avg_sq", one * 0)):
            whole = value.flatten() if stage == 3 else {"cat_dim": 0, "param": value}
            torch.save(whole, step / "zero" / name / f"{kind}.pt")
    torch.save({"param_groups": []}, step / "zero" / "optimizer_state.pt")
    for rank in range(ranks if stage == 3 else 1):
        rank_of = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        states = _model_states(model, stage, rank, ranks)
        torch.save(states, step / f"{rank_of}mp_rank_00_model_states.pt")
    return step


def write_megatron(run: Path, states: Sequence[Mapping[str, Any]]) -> Path:
    """Write the newest step of a run, of one rank for each of ``states``; return the step's folder."""
    step = run / "iter_0000010"
    (run / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True, exist_ok=True)
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    for rank, state in enumerate(states):
        (step / f"mp_rank_{rank:02d}").mkdir(parents=True)
        content = {
            "args": argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16),
            "checkpoint_version": 3.0,
            "iteration": 10,
            "model": state,
            "rng_state": [
                {
                    "random_rng_state": random.getstate(),
                    "np_rng_state": np.random.get_state(),
                    "torch_rng_state": torch.get_rng_state(),
                }
            ],
        }
        torch.save(content, step / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    return step


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
        "module": module,
        "buffer_names": list(model.buffers),
        "optimizer": None,
        "param_shapes": [_shapes(group) for group in model.groups] if stage else None,
        "frozen_param_shapes": _shapes(frozen) if stage > 1 else None,
        "shared_params": dict(model.shared) if rank == 0 else {},
        "frozen_param_fragments": {2: frozen, 3: fragments}.get(stage),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 10,
        "global_samples": 80,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
    }


def _optimizer_states(
    model: Model, stage: int, rank: int, ranks: int, alignment: int
) -> dict[str, Any]:
    stages, scaler, fragment = _CLASSES.values()
    loss_scaler = scaler()
    vars(loss_scaler).update(cur_scale=1.0, dynamic=False)
    state: dict[str, Any] = {
        "loss_scaler": loss_scaler,
        "dynamic_loss_scale": False,
        "overflow": False,
        "zero_stage": stages(stage),
    }
    if stage == 3:
        flats = [
            torch.cat([_share(one, rank, ranks) for one in group.values()])
            for group in model.groups
        ]
        state |= {"partition_count": ranks, "fp32_flat_groups": flats}
        state["optimizer_state_dict"] = _moments(flats)
    else:
        both = [_partition(group, rank, ranks, alignment) for group in model.groups]
        flats = [flat for flat, _ in both]
        state |= {
            "base_optimizer_state": _moments(flats),
            "single_partition_of_fp32_groups": flats,
            "group_paddings": [0 for _ in flats],
            "param_alignment_paddings": [paddings for _, paddings in both],
            "partition_count": [ranks for _ in flats],
            "param_slice_mappings": [OrderedDict(name=fragment(1, 0)) for _ in flats],
            "ds_version": "0.19.8",
        }
    return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}


def _share(one: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's share of a parameter under ZeRO 3, padded to the length of the others."""
    size = -(-one.numel() // ranks)
    return pad(one.flatten(), (0, size * ranks - one.numel()), value=9.0)[rank * size :][
        :size
    ].clone()


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
    return {
        "state": moments,
        "param_groups": [{"lr": 1e-3, "params": [number]} for number in moments],
    }


def _shapes(group: Tensors) -> "OrderedDict[str, torch.Size]":
    return OrderedDict((name, one.shape) for name, one in group.items())


@contextmanager
def classes() -> Iterator[None]:
    """Let pickle refer to DeepSpeed's classes by their names within the context."""
    before = dict(sys.modules)
    for path, kind in _CLASSES.items():
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:count])] = ModuleType(".".join(parts[:count]))
        kind.__module__ = path
        setattr(sys.modules[path], kind.__name__, kind)
    try:
        yield
    finally:
        for path in _CLASSES:
            parts = path.split(".")
            for count in range(1, len(parts) + 1):
                sys.modules.pop(".".join(parts[:count]), None)
        sys.modules.update(before)
