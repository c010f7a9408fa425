"""Test that the loader gives the same model as torch's own ``load_state_dict``."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from entries import Case, is_small, make_ready, twin
from model_differences import differences, outcome, output_differences
from safetensors.torch import save_model
from torch import nn

from weighin.checkpoint.convert import Conversion
from weighin.errors import HarnessError
from weighin.stream import formats
from weighin.stream.load_streaming import load_streaming


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one try: ok, refused, DIFFERENT, CRASHED, MISJUDGED, or not applicable."""

    what: str
    kind: str
    detail: str = ""


def save(case: Case, donor: nn.Module, folder: Path) -> dict[str, Path]:
    """Save a model's weights as pt and as safetensors; return the files by format."""
    files = {"pt": folder / "model.pt", "safetensors": folder / "model.safetensors"}
    torch.save(donor.state_dict(), files["pt"])
    save_model(donor, str(files["safetensors"]), force_contiguous=True)
    return files


def convert(files: dict[str, Path], folder: Path) -> tuple[dict[str, Path], list[Outcome]]:
    """Convert the pt file to every other format with weighin's own converter."""
    made, outcomes = {}, []
    for fmt in formats.NAMES:
        if fmt in files:
            continue
        target = folder / f"converted-{fmt}{formats.suffix_of(fmt)}"
        try:
            Conversion(files["pt"], target, fmt, max_shard_bytes=1 << 20).write()
            made[fmt] = target
        except Exception as error:
            outcomes.append(failed(f"convert to {fmt}", error))
    return made, outcomes


def try_loader(case: Case, files: dict[str, Path]) -> list[Outcome]:
    """Load each file into an existing model and into one that the load builds, and compare."""
    fresh = case.build(0)
    small = is_small(fresh)
    right = twin(fresh, case)
    try:
        right.load_state_dict(torch.load(files["pt"], weights_only=True), strict=True)
    except Exception as error:
        return [Outcome("reference", "not applicable", f"torch refuses it: {_said(error)}")]
    tries = list(_ways(files, small))
    outcomes = []
    for dtype in (None, torch.bfloat16):
        if dtype is not None:
            right = right.to(dtype)
        inputs = case.inputs(dtype) if dtype is None or small else None
        wanted = None
        for fmt, built in [(fmt, built) for fmt, built, kind in tries if kind is dtype]:
            what = f"{'model' if built else 'builder'}, {fmt}{', bf16' if dtype else ''}"
            try:
                model = load_streaming(
                    twin(fresh, case) if built else (lambda: case.build(0)), files[fmt], dtype=dtype
                )
                found = differences(model, right)
                if not found and inputs is not None:
                    if wanted is None:
                        wanted = output_of(make_ready(copy.deepcopy(right)), copy.deepcopy(inputs))
                    got = output_of(make_ready(model), copy.deepcopy(inputs))
                    found = output_differences(got, wanted, exact=True)
            except Exception as error:
                outcomes.append(failed(what, error))
                continue
            outcomes.append(Outcome(what, "DIFFERENT" if found else "ok", "; ".join(found[:2])))
            del model
    return outcomes


def output_of(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return the output of one forward pass in evaluation mode, or the type of the error it raised."""
    args, kwargs = inputs
    torch.manual_seed(7)
    with torch.no_grad():
        return outcome(lambda: model.eval()(*args, **kwargs))  # the reference must raise the same


def _ways(files: dict[str, Path], small: bool) -> Iterator[tuple[str, bool, torch.dtype | None]]:
    """Yield the format, whether the model exists before the load, and the dtype of each load."""
    if small:
        for fmt in files:
            yield from (
                (fmt, built, dtype) for built in (False, True) for dtype in (None, torch.bfloat16)
            )
    else:
        yield from (("pt", False, None), ("safetensors", True, None))
        yield from (("safetensors", False, torch.bfloat16), ("pt", True, torch.bfloat16))


def failed(what: str, error: Exception) -> Outcome:
    """Return the outcome of an error: a refusal with a reason, or a crash."""
    refused = isinstance(error, HarnessError)
    return Outcome(what, "refused" if refused else "CRASHED", _said(error))


def _said(error: Exception) -> str:
    text = error.message if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:160]
