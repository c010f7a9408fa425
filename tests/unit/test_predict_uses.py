"""Predictions of what a use of the loaded model takes, through the process that runs strategies."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from test_predict import BIAS_BYTES, SPEC, WEIGHT_BYTES

from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.predict.prediction import PredictedUse, Prediction
from weighin.stream.construct import resolve_builder
from weighin.suite import registry
from weighin.units import MIB

COPIES = {
    "write": (1, 1), "sgd": (2, 2), "adamw": (6, 6), "deepcopy": (1, 2), "save": (0, 1),
    "twice": (1, 2),
}  # fmt: skip
"""The peak of a use of a mapped and of a copied model, in copies of the weight.

AdamW keeps a gradient and two states, and needs two temporary tensors as large as a weight.
"""
USES = ("", *COPIES)
WEIGHTS = WEIGHT_BYTES + BIAS_BYTES

Followed = dict[tuple[str, str, str], Prediction]


def planned(strategy: str, use: str, **changes: Any) -> Planned:
    info = registry.strategy(strategy)
    fields: dict[str, Any] = {"format": info.formats[0], "use": use, "passes": 0} | changes
    return plan_cell(Cell(SPEC, strategy, "process", **fields), info)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """The predictions by strategy, use and device, all of one process."""
    own = tmp_path_factory.mktemp("own") / "twice.py"
    own.write_text(
        dedent(
            """
            def use(model):
                return [parameter.detach() * 2 for parameter in model.parameters()]
            """
        )
    )
    cells = [planned(name, use) for name in ("mmap_assign", "load_assign") for use in USES]
    cells += [planned("mmap_assign", "to-device"), planned("mmap_assign", "adamw", device="cuda")]
    found = predict(cells, use_paths={"twice": str(own)})
    assert {one.cannot for one in found} == {""}
    return {(one.strategy, one.cell.use, one.cell.device): one for one in found}


def used(one: Prediction) -> PredictedUse:
    assert one.use
    return one.use


def copies(one: Prediction) -> float:
    """Return the anonymous peak of the use above the import of torch, as copies of the weight."""
    assert one.baseline_anon_bytes
    return ((used(one).host_anon_peak_bytes or 0) - one.baseline_anon_bytes) / WEIGHT_BYTES


@pytest.mark.parametrize("use", COPIES)
def test_the_copies_in_a_use_of_a_mapped_and_a_copied_model_are_counted(
    followed: Followed, use: str
) -> None:
    found = (copies(followed[name, use, "cpu"]) for name in ("mmap_assign", "load_assign"))
    assert tuple(map(round, found)) == COPIES[use]


def test_a_conversion_to_float32_keeps_one_weight_of_the_old_dtype(tmp_path: Path) -> None:
    model = resolve_builder(SPEC.builder)(**SPEC.kwargs)
    torch.save(model.bfloat16().state_dict(), tmp_path / "half.pt")
    mapped, copied = predict(
        [planned(name, "to-float32", dtype="bfloat16") for name in ("mmap_assign", "load_assign")],
        checkpoint=tmp_path / "half.pt",
    )
    assert (round(copies(mapped), 1), round(2 * copies(copied))) == (1.0, 3)


def test_a_tied_matrix_has_two_gradients_and_their_sum_at_once() -> None:
    """The backward pass reaches the embedding last, through the transposed heads of attention."""
    heads = {"vocab_size": WEIGHT_BYTES // 4 // 256, "emb_dim": 256, "n_layers": 1, "n_heads": 2}
    tied = ModelSpec("tied", "weighin.models.tied:tied", heads)
    info = registry.strategy("load_assign")
    (one,) = predict([plan_cell(Cell(tied, "load_assign", "process", use="sgd", passes=0), info)])
    assert round(copies(one)) == 4


def test_a_model_on_the_gpu_is_used_there(followed: Followed) -> None:
    moved, trained = (
        followed["mmap_assign", *where] for where in (("to-device", "cpu"), ("adamw", "cuda"))
    )
    assert (moved.cuda_requested_bytes, used(moved).cuda_requested_bytes) == (0, WEIGHTS)
    assert moved.with_use("cuda_requested_bytes") == WEIGHTS
    assert moved.reasons[0].startswith("maps one copy of the weights")
    assert trained.cuda_requested_bytes == WEIGHTS
    assert round((used(trained).cuda_requested_bytes or 0) / WEIGHT_BYTES, 1) == 6.0


def test_a_floor_holds_the_load_and_the_use(followed: Followed) -> None:
    one = followed["load_assign", "adamw", "cpu"]
    most = used(one).host_anon_most_bytes
    possible = most + most // 100 + 16 * MIB
    assert one.floor_bytes == possible + possible // 512 + 16 * MIB
    assert (one.host_anon_peak_bytes or 0) < most  # that of the load alone
    assert [phase.name for phase in one.phases][-2:] == ["touch", "use: adamw"]


def test_the_work_of_a_load_does_not_include_the_use(followed: Followed) -> None:
    load, trained = (followed["load_assign", use, "cpu"] for use in ("", "adamw"))
    assert load.use is None
    assert load.work.written_bytes == trained.work.written_bytes
    assert load.disk_read_bytes == trained.disk_read_bytes


def test_a_forward_pass_is_predicted_if_asked_for() -> None:
    info = registry.strategy("load_assign")
    run, never_run, not_asked = predict(
        [
            plan_cell(Cell(registry.model("gpt2-tiny"), "load_assign", "process"), info),
            plan_cell(Cell(SPEC, "load_assign", "process"), info),
            planned("load_assign", ""),
        ],
        forward=True,
    )
    assert used(run).name == "forward"
    assert run.host_anon_peak_bytes
    assert abs((used(run).host_anon_peak_bytes or 0) - run.host_anon_peak_bytes) < 16 * MIB
    assert never_run.cannot == (
        "CannotFollow: the model's module has no example_inputs for a forward pass"
    )
    assert not_asked.use is None
