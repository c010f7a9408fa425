"""Reading a user's own checkpoint against a model: what is in it, and does it fit."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from harness.checkpoint import layouts
from harness.checkpoint.describing import Described, describe, in_checkpoint
from harness.checkpoint.layouts.base import Progress, TensorPlan
from harness.checkpoint.layouts.per_param import read_index
from harness.checkpoint.making import Made, write
from harness.checkpoint.manifest import Manifest
from harness.checkpoint.opening import load_state_dict, load_tensor
from harness.checkpoint.piecewise import pieces_of, tensor_checksums
from harness.errors import CheckpointError
from harness.models.building import map_large_tensors

_SHOWN: Final = 3
_RECORD_BYTES: Final = 4096


def index(
    model: str,
    builder: str,
    kwargs: Mapping[str, Any],
    *,
    checkpoint: Path,
    fmt: str,
    folder: Path,
    permit: Callable[[int], None] | None = None,
    progress: Progress | None = None,
) -> Made:
    """Write the manifest of a user's checkpoint into ``folder``; convert it there if need be.

    The checkpoint is mapped, not loaded: anonymous memory stays small whatever its size. It is
    converted only where its own format is not ``fmt``, and only from pt to per_param.

    Raises:
        CheckpointError: it cannot be read, does not fit the model, or cannot be converted.
    """
    layouts.named(fmt)
    map_large_tensors()
    started = time.monotonic()
    own = layouts.detect(checkpoint).NAME
    if fmt not in {own, "per_param"}:
        raise CheckpointError(
            f"{checkpoint}: in format {own}, but format {fmt} is asked for",
            "give the original checkpoint file",
        )
    state = open_mapped(checkpoint, own)
    described = describe(builder, kwargs, real_buffers="non_persistent")
    check_fits(checkpoint, model, state, described)
    if permit is not None:
        permit(_needed_bytes(state) if own != fmt else 0)
    entries = []
    for one in described:
        value = state.get(one.name, one.tensor)
        entries.append(one.entry(tensor_checksums(value), value.dtype))
    _check_ties(checkpoint, {entry.name: entry.checksums for entry in entries}, described)
    read = time.monotonic()
    if own != fmt:
        stored = [
            TensorPlan(one.name, tuple(one.tensor.shape), state[one.name].dtype, one.shared_with)
            for one in in_checkpoint(described)
        ]
        write(fmt, folder, stored, partial(_pieces, state), progress)
    manifest = Manifest(model, builder, str(checkpoint), tuple(entries))
    manifest.write(folder / "manifest.json")
    return Made(manifest, {"read": read - started, "convert": time.monotonic() - read})


def open_mapped(checkpoint: Path, fmt: str) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors, mapped from their file or files.

    Raises:
        CheckpointError: as ``load_state_dict`` and ``read_index``.
    """
    if fmt == "pt":
        return load_state_dict(checkpoint, mmap=True)
    opened: dict[Path, torch.Tensor] = {}
    for path in read_index(checkpoint).values():
        if path not in opened:
            opened[path] = load_tensor(path)
    return {key: opened[path] for key, path in read_index(checkpoint).items()}


def check_fits(
    checkpoint: Path, model: str, state: Mapping[str, torch.Tensor], described: list[Described]
) -> None:
    """Raise CheckpointError where keys are missing or unexpected, or shapes differ."""
    wanted = {one.name: tuple(one.tensor.shape) for one in in_checkpoint(described)}
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    shapes = [
        f"{name} is {tuple(state[name].shape)}, not {shape}"
        for name, shape in wanted.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    problems = [
        f"{len(names)} {what} ({_some(names)})"
        for names, what in (
            (missing, "missing"),
            (unexpected, "unexpected"),
            (shapes, "of another shape"),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint}: does not fit model {model}, keys: {'; '.join(problems)}",
            "choose the model that this checkpoint was saved from, or correct its kwargs",
        )


def _check_ties(
    checkpoint: Path, checksums: Mapping[str, dict[str, str]], described: list[Described]
) -> None:
    for one in in_checkpoint(described):
        if one.shared_with and checksums[one.name] != checksums[one.shared_with]:
            raise CheckpointError(
                f"{checkpoint}: {one.name!r} and {one.shared_with!r} are one tensor in the model, "
                "but have different values in the file",
                "choose the model that this checkpoint was saved from",
            )


def _pieces(state: Mapping[str, torch.Tensor], name: str) -> Any:
    return pieces_of(state[name].contiguous())


def _needed_bytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(_RECORD_BYTES + tensor.nbytes for tensor in state.values())


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
