"""The uses of a loaded model: which there are, which cells they make, and what each does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import planned

from weighin.cell import FORWARD, NONE, USES, Cell, Job, ModelSpec, is_of_use, phase_of
from weighin.plan.start import foreign
from weighin.plan.task import Planned
from weighin.settings.definition import Settings
from weighin.suite.registry import chosen_uses, model, strategy
from weighin.units import MIB
from weighin.worker import uses
from weighin.worker.loading import Inputs
from weighin.worker.phases import named_by_strategy

CELL = Cell(ModelSpec("m", "a:b"), "baseline", "process")
OWN = "def use(model):\n    return model.half()\n"


def cells_of(*names: str, **changes: Any) -> list[Planned]:
    models, strategies = (model("gpt2-tiny"),), ((strategy("baseline"), dict[str, Any]()),)
    return planned(models, strategies, uses=list(names), **changes)


def test_each_use_is_a_cell_of_its_own() -> None:
    cells = [each.cell for each in cells_of("none", "forward", "write")]
    found = [(cell.use, cell.passes, cell.after_load) for cell in cells]
    assert found == [("", 0, NONE), ("", 1, FORWARD), ("write", 0, "write")]
    assert len({cell.series for cell in cells}) == 3


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A use of the user's own."""
    (file := tmp_path / "half.py").write_text(OWN)
    return file


def test_a_use_is_a_name_or_a_file_of_the_users_own(half: Path) -> None:
    assert chosen_uses(["write", str(half)]) == {"write": "", "half": str(half)}
    plan = (
        [Cell(model("gpt2-tiny"), "baseline", "process")],
        Settings(use_paths={"half": str(half)}),
    )
    assert foreign(*plan) == [f"use {half}"]


@pytest.mark.parametrize(
    ("changes", "use", "skip"),
    [
        ({"ranks": [2]}, "write", "the use write is measured in one process: --ranks 1"),
        ({"device": "cuda"}, "fork", "the use fork needs a model on the CPU"),
        ({"device": "cuda"}, "to-device", "the use to-device needs a model on the CPU"),
        ({"ranks": [2]}, "forward", ""), ({"device": "cuda"}, "adamw", ""),
    ],
)  # fmt: skip
def test_a_use_that_cannot_follow_a_load_is_skipped_with_the_reason(
    changes: dict[str, Any], use: str, skip: str
) -> None:
    [found] = cells_of(use, **changes)
    assert found.skip.startswith(skip) and bool(found.skip) == bool(skip)


def test_the_phase_of_a_use_cannot_be_that_of_a_strategy() -> None:
    for use in USES:
        assert is_of_use(phase_of(use))
        with pytest.raises(ValueError, match="phase"):
            named_by_strategy(phase_of(use))
    assert not is_of_use("touch")


class Mixed(torch.nn.Module):
    """A model with a parameter that no output depends on, and buffers of odd types."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(8, 8)
        self.unused = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("codes", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("step", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.line(x), "mask": self.mask}


def given(model: torch.nn.Module, use: str, inputs: Inputs | None = None) -> uses.Done:
    return uses.FUNCTIONS[use](model, inputs, Path())


def test_write_changes_every_parameter_and_buffer_of_any_type() -> None:
    given(mixed := Mixed(), "write")
    assert all(not tensor.float().any() for tensor in mixed.state_dict().values())


@pytest.mark.parametrize(("use", "states"), [("sgd", 0), ("adamw", 2)])
def test_a_step_trains_every_parameter_with_gradients_of_a_backward_pass(
    use: str, states: int
) -> None:
    mixed = Mixed()
    before = {name: tensor.clone() for name, tensor in mixed.named_parameters()}
    done = given(mixed, use, Inputs((torch.ones(2, 8),)))
    assert done.gradients == "backward"
    assert isinstance(done.kept, torch.optim.Optimizer)
    for name, weight in mixed.named_parameters():
        assert weight.grad is not None and not torch.equal(weight, before[name]), name
        kept = [s for s in done.kept.state[weight].values() if getattr(s, "shape", ()) == weight.shape]  # fmt: skip
        assert len(kept) == states
    assert all(group["foreach"] is False for group in done.kept.param_groups)


def test_without_inputs_each_gradient_is_of_its_parameters_shape_and_dtype() -> None:
    done = given(mixed := Mixed().to(torch.bfloat16), "adamw")
    assert done.gradients == "synthetic"
    for weight in mixed.parameters():
        assert weight.grad is not None
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.bfloat16)


def test_a_model_without_weights_to_train_says_so() -> None:
    codes = torch.nn.Module()
    codes.register_buffer("codes", torch.ones(3, dtype=torch.int8))
    with pytest.raises(ValueError, match="no floating-point parameter"):
        given(codes, "sgd")


def test_the_other_uses_do_what_they_are_called(half: Path, tmp_path: Path) -> None:
    copied = given(mixed := Mixed(), "deepcopy").kept
    assert isinstance(copied, Mixed)
    assert copied.line.weight.data_ptr() != mixed.line.weight.data_ptr()
    given(mixed.to(torch.bfloat16), "to-float32")
    assert {weight.dtype for weight in mixed.parameters()} == {torch.float32}
    uses.FUNCTIONS["save"](mixed, None, tmp_path)
    assert [*tmp_path.iterdir()] == [half]
    job = Job(replace(CELL, use="half"), "", "", "", use_path=str(half))
    done = uses.function_of(job)(mixed, None, Path())
    assert done.kept is mixed and mixed.line.weight.dtype is torch.float16


@pytest.mark.usefixtures("no_garbage")
def test_each_forked_process_has_a_private_copy_of_what_it_writes() -> None:
    large = torch.nn.Linear(2048, 2048, bias=False)  # 16 MiB
    before = large.weight.clone()
    private = given(large, "fork").children_private_bytes
    assert len(private) == 2
    assert all(16 * MIB <= size < 16 * MIB + 60 * MIB for size in private), private
    assert torch.equal(large.weight, before)  # the parent's is its own


def test_a_forked_process_that_fails_is_an_error_and_leaves_none_behind() -> None:
    with pytest.raises(RuntimeError, match="a forked process ended with exit code 1"):
        uses.in_forks(lambda: 1 / 0)
