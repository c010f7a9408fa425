"""Define a conformance case (a model, its checkpoint and the options of the load) and check it."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from cells import CheckpointError
from checkpoints import Checkpoint, State, checkpoints, make
from hooked import WRITES_ON_LOAD
from hypothesis import strategies as st
from model_differences import differences, outcome, output_differences, seed, torch_leaves
from modules import Recipe, leaves, recipes
from standard import STANDARD
from tensors import FLOATS
from torch import nn

from weighin import load_streaming

SEED = 5


@dataclass(frozen=True)
class Case:
    """A model, a checkpoint, and the options of the load."""

    recipe: Recipe
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    dtype: str | None = None
    built: bool = False
    granularity: Literal["all", "module", "tensor"] = "all"
    threads: int | None = None

    @property
    def converts(self) -> bool:
        """Whether floating-point values may pass from one dtype to another."""
        return bool(self.dtype or self.checkpoint.dtype) or self.checkpoint.damage == "type"


class Refusal(NamedTuple):
    """A valid reason to refuse a checkpoint that torch loads, and the condition for this reason."""

    message: str
    why: str
    holds: Callable[[State], bool]


def _holds_more_than_tensors(state: State) -> bool:
    return not all(isinstance(value, torch.Tensor) for value in state.values())


REFUSALS = (
    Refusal(r"the state dict is empty", "a checkpoint without tensors is usually a mistake", lambda state: not state),
    Refusal(
        r"not a flat state dict|holds more than tensors",
        "extra state that is not a tensor would need unpickling, which can execute code",
        _holds_more_than_tensors,
    ),
)  # fmt: skip

REFUSED: Counter[str] = Counter()
"""The number of refused loads that torch does, by reason; "" counts the loads that were compared."""


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        recipe=recipes(),
        checkpoint=checkpoints(),
        dtype=st.sampled_from((None, None, None, *FLOATS)),
        built=st.booleans(),
        granularity=st.sampled_from(("all", "all", "module", "tensor")),
        threads=st.sampled_from((None, 1, 2)),
    )


def check(case: Case, folder: Path, load: Callable[..., nn.Module] = load_streaming) -> None:
    """Assert that a loader gives the same model as torch, or refuses the case for a valid reason."""
    path, state = make(case.recipe, case.checkpoint, folder)
    wanted, raised = _as_torch(case, state)
    source, foreign = _source(case)
    dtype = getattr(torch, case.dtype) if case.dtype else None
    try:
        model = load(source, path, dtype=dtype, granularity=case.granularity, threads=case.threads)
    except CheckpointError as error:
        assert error.message
        assert error.repair, error.message
        if not any(leaf.kind in WRITES_ON_LOAD for _, leaf in leaves(case.recipe.root)):
            _assert_unchanged(case, source, foreign)
        if raised is None:
            _count_refusal(error, state)
        return
    assert raised is None, f"loaded what torch refuses: {raised}"
    REFUSED[""] += 1
    assert source is model or not case.built, "returned another model"
    found = _together(model, foreign)
    lines = differences(found, wanted, nan_bits=not case.converts)
    lines += output_differences(_outputs(case, found), _outputs(case, wanted))
    assert not lines, "\n".join(lines)


def _as_torch(case: Case, state: State) -> tuple[nn.Module, Exception | None]:
    """Return the model that torch loads, with the foreign model, or the exception that torch raises."""
    seed(SEED)
    build, foreign = case.recipe.prepare()
    model = build()
    try:
        torch_leaves(model, state, getattr(torch, case.dtype) if case.dtype else None)
    except Exception as error:
        return model, error
    return _together(model, foreign), None


def _source(case: Case) -> tuple[nn.Module | Callable[[], nn.Module], nn.Module]:
    seed(SEED)
    build, foreign = case.recipe.prepare()
    return (build() if case.built else build), foreign


def _together(model: nn.Module, foreign: nn.Module) -> nn.Module:
    return nn.ModuleDict({"model": model, "foreign": foreign})


def _assert_unchanged(case: Case, source: Any, foreign: nn.Module) -> None:
    seed(SEED)
    build, other = case.recipe.prepare()
    if not case.built and not differences(foreign, other):  # nothing was built
        return
    model = build()
    if case.built:
        lines = differences(_together(source, foreign), _together(model, other), tensors_only=True)
    else:
        lines = differences(foreign, other, tensors_only=True)
    assert not lines, "refused, but changed:\n" + "\n".join(lines)


def _count_refusal(error: CheckpointError, state: State) -> None:
    for refusal in REFUSALS:
        if re.search(refusal.message, error.message) and refusal.holds(state):
            REFUSED[refusal.why] += 1
            return
    raise AssertionError(f"refused what torch loads: {error}") from error


def _outputs(case: Case, both: nn.Module) -> dict[str, Any]:
    """Return the forward outputs of those modules that have inputs in STANDARD."""
    outputs = {}
    for path, leaf in leaves(case.recipe.root):
        inputs = STANDARD.get(leaf.kind, (None, None))[1]
        module = both.get_submodule(f"model.{path}" if path else "model")
        if inputs is not None:
            kind = next((one.dtype for one in module.parameters() if one.is_floating_point()), None)
            given = [one.to(kind) if one.is_floating_point() else one for one in inputs(leaf.size)]
            seed(SEED)  # of dropout
            outputs[path] = outcome(partial(module, *given))
    return outputs
