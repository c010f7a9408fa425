"""Test that every strategy loads a model correctly, and that the worker's checks detect wrong loads.

The expected tensors are those of the manifest that the harness makes of a user's own checkpoint and
builder. The worker's checks run in this process, without an isolation.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import builders
import torch
from entries import Case
from loads import Outcome, failed
from safetensors.torch import load_model, save_model
from torch import nn

from weighin.cell import ModelSpec
from weighin.checkpoint.generate import index
from weighin.checkpoint.manifest import Manifest
from weighin.stream import formats as layouts
from weighin.suite import registry
from weighin.worker import verify
from weighin.worker.loading import Inputs, Load, import_strategy

_ALL_FORMATS_BYTES = 100 * 1024**2  # larger models are tested as pt and safetensors only
_ALL_PLANTS_BYTES = 20 * 1024**2  # for larger models, only every fourth strategy gets a wrong byte
_IN_TURN = 4
_FORWARD = ("streaming, pt", "streaming, safetensors")  # of large models
_ALWAYS = ("pt", "safetensors")


@dataclass(frozen=True, slots=True)
class Truth:
    """A checkpoint that the harness prepared in one format, and the manifest of the expected tensors."""

    checkpoint: Path
    manifest: Manifest


@cache
def strategies() -> list[tuple[str, Path, tuple[str, ...]]]:
    """Return name, file and formats of every strategy that loads any model to the CPU and can run here."""
    return [
        (name, info.path, info.formats)
        for name, info in registry.strategies().items()
        if "cpu" in info.devices and not info.missing and not info.pretrained
        if not info.shares_load
    ]


def try_strategies(
    case: Case, size: int, pt: Path, folder: Path, turn: int, *, quick: bool = False
) -> list[Outcome]:
    """Load with every strategy, unmodified and with planted faults, and verify as a worker does.

    Args:
        size: of the model, in bytes.
        turn: a number that selects the strategies with a wrong byte and the format for ``quick``.
        quick: test only one other format besides pt and safetensors.
    """
    outcomes = []
    truths: dict[str, Truth] = {}
    others = [fmt for fmt in layouts.NAMES if fmt not in _ALWAYS]
    if size > _ALL_FORMATS_BYTES:
        others = []
    elif quick:
        others = [others[turn % len(others)]]
    for fmt in (*_ALWAYS, *others):
        try:
            truths[fmt] = truth(case, pt, fmt, folder / f"truth-{fmt}")
        except Exception as error:
            outcomes.append(failed(f"manifest, {fmt}", error))
    number = turn
    for name, path, formats in strategies():
        for fmt in formats:
            if fmt in truths:
                plant = size <= _ALL_PLANTS_BYTES or number % _IN_TURN == 0
                number += 1
                outcomes += _try_strategy(case, f"{name}, {fmt}", path, truths[fmt], plant)
    return outcomes


def truth(case: Case, pt: Path, fmt: str, folder: Path) -> Truth:
    """Return the checkpoint in this format and its manifest, made by the harness's own code."""
    folder.mkdir()
    threads = torch.get_num_threads()
    try:
        made = index(_spec(case), checkpoint=pt, fmt=fmt, folder=folder)
    finally:
        torch.set_num_threads(threads)
    return Truth(pt if fmt == "pt" else layouts.checkpoint_in(folder, fmt), made)


def _spec(case: Case) -> ModelSpec:
    return ModelSpec(case.label, f"builders:{case.builder}", case.kwargs)


def _try_strategy(
    case: Case, what: str, path: Path, truth: Truth, plant: bool
) -> Iterator[Outcome]:
    small = truth.manifest.model_bytes() <= _ALL_PLANTS_BYTES
    forward = small if case.family != "torchvision" else what in _FORWARD
    forward = forward and _is_finite(case)
    try:
        model = import_strategy(path)(_load(case, truth, torch.float32))
    except Exception as error:
        outcome = failed(what, error)
        for why, theirs in _reasons(case, truth.checkpoint.parent):
            if _same_fault(outcome.detail, theirs):
                outcome = Outcome(what, "not applicable", f"{why}: {outcome.detail}")
                break
        yield outcome
        return
    yield _expect(what, "", partial(judge, model, case, truth, forward=forward))
    for fault, spoil in _spoilers(model, truth):
        spoil()
        yield _expect(f"{what}, {fault}", "wrong", partial(judge, model, case, truth))
    del model
    if small:
        load = _load(case, truth, torch.bfloat16)
        loaded = partial(import_strategy(path), load)
        yield _expect(f"{what}, bf16", "", lambda: judge(loaded(), case, truth, torch.bfloat16))
    if plant and any(one.nbytes for one in layouts.read(truth.checkpoint)):
        again = partial(import_strategy(path), _load(case, truth, torch.float32))
        with _wrong_byte(truth.checkpoint):
            yield _expect(f"{what}, wrong byte", "wrong", lambda: judge(again(), case, truth))


def _reasons(case: Case, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield why a strategy cannot load a model, and the error that torch or safetensors then gives."""

    def on_meta() -> None:
        with torch.device("meta"):
            case.build(0)

    def without_versions() -> None:  # which most formats do not store
        case.build(0).load_state_dict(dict(case.donor().state_dict()))

    def by_safetensors() -> (
        None
    ):  # takes the shared count of a tied batch norm for unexpected (0.8)
        save_model(case.donor(), str(folder / "own.safetensors"))
        load_model(case.build(0), folder / "own.safetensors")

    for why, tried in (
        ("torch cannot build it on the meta device", on_meta),
        ("torch refuses a state dict without its modules' versions", without_versions),
        ("safetensors' load_model refuses what its save_model wrote", by_safetensors),
    ):
        try:
            tried()
        except Exception as error:
            yield why, failed("", error).detail


def _is_finite(case: Case) -> bool:
    """Tell whether the model gives finite values when torch itself loads it; some losses do not."""
    inputs = builders.example_inputs(**case.kwargs) if case.family != "torchvision" else ()
    try:
        if inputs:
            verify.check_forward(case.donor(), Inputs(inputs))
    except verify.WrongWeights:
        return False
    except RuntimeError:  # its buffers have another dtype than its inputs until they are converted
        return True
    return True


def _same_fault(one: str, other: str) -> bool:
    """Tell whether two errors are equal but for which of the two names of a ``Pair`` they give."""
    return bool(one) and one.replace('"again.', '"first.') == other.replace('"again.', '"first.')


def _load(case: Case, truth: Truth, dtype: torch.dtype) -> Load:
    return Load(
        checkpoint=truth.checkpoint,
        device=torch.device("cpu"),
        dtype=dtype,
        options={},
        _model=_spec(case),
        _builder=getattr(builders, case.builder),
        _marks=SimpleNamespace(phase=lambda _: nullcontext()),
    )


def judge(
    model: nn.Module,
    case: Case,
    truth: Truth,
    dtype: torch.dtype = torch.float32,
    *,
    forward: bool = True,
) -> str:
    """Return the fault that the worker's checks find in a model; an empty string if it is right."""
    device = torch.device("cpu")
    try:
        tensors = verify.named_tensors(model)
        verify.check_structure(tensors, truth.manifest, device, dtype)
        verify.check_values(verify.touch(tensors), truth.manifest, dtype)
        inputs = (
            builders.example_inputs(**case.kwargs) if forward and dtype == torch.float32 else ()
        )
        if inputs:
            verify.check_forward(model, Inputs(inputs))
    except verify.WrongWeights as error:
        return f"wrong: {error}"
    return ""


def _expect(what: str, wanted: str, judged: Callable[[], str]) -> Outcome:
    try:
        found = judged()
    except Exception as error:
        return failed(what, error)
    if bool(found) == bool(wanted):
        return Outcome(what, "ok")
    return Outcome(what, "MISJUDGED", found[:160] or "ok, though it is wrong")


def _spoilers(model: nn.Module, truth: Truth) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each fault that is possible in this loaded model, with a function that plants it.

    The first fault is undone before the second is planted.
    """
    lost = [e for e in truth.manifest.tensors if e.kind == "non_persistent_buffer" and e.bytes]
    if lost:
        owner, leaf = _owner(model, lost[0].name)
        kept = owner._buffers[leaf]
        assert kept is not None
        yield "lost buffer", lambda: owner._buffers.update({leaf: torch.zeros_like(kept) + 123})
        owner._buffers[leaf] = kept
    tied = [
        e for e in truth.manifest.tensors if e.shared_with and e.kind == "parameter" and e.bytes
    ]
    if tied:
        yield "broken tie", lambda: _untie(model, tied[0].name, tied[0].shared_with or "")


def _untie(model: nn.Module, name: str, first: str) -> None:
    """Replace one name of a tied parameter by a copy of it, or of the module that has both names."""
    (owner, leaf), (other, _) = _owner(model, name), _owner(model, first)
    if owner is not other:
        owner._parameters[leaf] = nn.Parameter(owner.get_parameter(leaf).detach().clone())
        return
    everywhere = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    parent = model
    for part in name.split(".")[:-1]:
        child = parent.get_submodule(part)
        if everywhere.count(id(child)) > 1:
            parent._modules[part] = copy.deepcopy(child)
            return
        parent = child


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


@contextmanager
def _wrong_byte(checkpoint: Path) -> Iterator[None]:
    """Change the sign or exponent of an element of the largest tensor; undo it at the context's end."""
    largest = max(layouts.read(checkpoint), key=lambda one: one.nbytes)
    one = largest.parts[0] if largest.parts else largest
    # The last byte of an element: a conversion of the dtype may discard a change in the first.
    at = one.offset + one.nbytes // one.dtype.itemsize // 2 * one.dtype.itemsize
    at += one.dtype.itemsize - 1
    with one.file.open("r+b", buffering=0) as opened:
        right = os.pread(opened.fileno(), 1, at)
        os.pwrite(opened.fileno(), bytes([right[0] ^ 1]), at)
        try:
            yield
        finally:
            os.pwrite(opened.fileno(), right, at)
