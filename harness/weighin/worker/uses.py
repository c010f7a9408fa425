"""Use a loaded model in a phase of its own: overwrite, train, convert, copy or save it, or fork.

A use runs after the verification of all weights, and so may change the weights. The objects that a
use makes stay alive until its phase has ended, so that the memory at the phase's end includes them.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from weighin.cell import Job
from weighin.construction.operations import tensors_in
from weighin.uses import FORK, SAVE, TO_DEVICE, TRAINING, phase_of
from weighin.worker.failures import UseFailed
from weighin.worker.forks import forked
from weighin.worker.inputs import Inputs
from weighin.worker.loading import import_strategy
from weighin.worker.phases import Marks
from weighin.worker.touch import named_tensors

SAVED: Final = "saved.pt"
CHILDREN: Final = 2
_GRADIENT: Final = 1e-3
_RATE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Given:
    """What a use gets beside the model: inputs of a forward pass, and a folder to write to."""

    inputs: Inputs | None = None
    target: Path = Path()


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a use: facts for the record, and an object to keep alive until the phase ends."""

    kept: object = None
    gradients: str = ""
    children_private_bytes: tuple[int, ...] = ()


def prepare(use: str) -> None:
    """Train one weight for a training use, so that torch imports the optimizer and starts threads."""
    if use in TRAINING:
        weight = torch.nn.Parameter(torch.ones(1))
        weight.sum().backward()
        _optimizer(use, [weight]).step()


def perform(
    model: torch.nn.Module, job: Job, inputs: Inputs | None, marks: Marks
) -> dict[str, Any]:
    """Run the cell's use in a phase of its own, and return the fields of the event "used".

    Raises:
        UseFailed: the use raised an error.
    """
    use = job.cell.use
    with marks.phase(phase_of(use)):
        try:
            done = function_of(job)(model, Given(inputs, Path(job.target)))
        except BaseException as error:
            raise UseFailed(use) from error
    return {
        "gradients": done.gradients,
        "children_private_bytes": list(done.children_private_bytes),
    }


def function_of(job: Job) -> Callable[[torch.nn.Module, Given], Done]:
    """Return the function of the cell's use; for a user's use, a call of it imports the user's file."""
    if job.use_path:
        return lambda model, _: Done(import_strategy(Path(job.use_path), "use")(model))
    return FUNCTIONS[job.cell.use]


def write(model: torch.nn.Module, _: Given = Given()) -> Done:
    """Overwrite every parameter and buffer in place."""
    # torch refuses in-place writes to a leaf that requires a gradient, unless autograd is off.
    with torch.inference_mode():
        for tensor in named_tensors(model).values():
            tensor.fill_(0)
    return Done()


def train(use: str, model: torch.nn.Module, given: Given) -> Done:
    """Take one step of the optimizer ``use``, with a gradient for every floating-point parameter."""
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    if not weights:
        raise ValueError(
            "the use trains the model, but the model has no floating-point parameter"
            " that can be trained"
        )
    for weight in weights:
        weight.requires_grad_()
    gradients = "backward" if given.inputs and _backward(model, given.inputs) else "synthetic"
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.full_like(weight, _GRADIENT)
    optimizer = _optimizer(use, weights)
    optimizer.step()
    return Done(optimizer, gradients)


def _backward(model: torch.nn.Module, inputs: Inputs) -> bool:
    """Run a forward and a backward pass; return False if no output depends on a parameter."""
    model.eval()  # dropout would allocate masks, and batch norm fails for a batch of one
    outputs = list(tensors_in(model(*inputs.positional, **inputs.keywords)))
    sums = [tensor.sum() for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(sums)
    return bool(sums)


def _optimizer(use: str, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    kinds: dict[str, Callable[..., torch.optim.Optimizer]]
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    # With foreach, a step needs temporary tensors as large as the whole model.
    return kinds[use](weights, lr=_RATE, foreach=False)


def _to_device(model: torch.nn.Module, _: Given) -> Done:
    return Done(model.to(torch.device("cuda", torch.cuda.current_device())))


def _save(model: torch.nn.Module, given: Given) -> Done:
    file = given.target / SAVED
    torch.save(model.state_dict(), file)
    file.unlink()
    return Done()


def _fork(model: torch.nn.Module, _: Given) -> Done:
    return Done(children_private_bytes=forked(lambda: write(model), CHILDREN))


FUNCTIONS: Final[dict[str, Callable[[torch.nn.Module, Given], Done]]] = {
    "write": write,
    "sgd": lambda model, given: train("sgd", model, given),
    "adamw": lambda model, given: train("adamw", model, given),
    "to-float32": lambda model, _: Done(model.to(torch.float32)),
    TO_DEVICE: _to_device,
    "deepcopy": lambda model, _: Done(deepcopy(model)),
    SAVE: _save,
    FORK: _fork,
}
"""The function of each built-in use, by name; the use ``forward`` is not among them."""
