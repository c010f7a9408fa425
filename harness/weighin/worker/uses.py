"""Use a loaded and verified model in a phase of its own: overwrite, train, convert, copy or save it, or fork."""

import os
import traceback
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from weighin.cell import FORK, SAVE, TO_DEVICE, TRAINING, Job
from weighin.probes.process import read_rollup
from weighin.stream.tensors import tensors_in
from weighin.worker.loading import Inputs, import_strategy
from weighin.worker.verify import named_tensors

CHILDREN: Final = 2


class Done(NamedTuple):
    """The result of a use; ``kept`` stays alive until the phase has ended, so its final memory includes it."""

    kept: object = None
    gradients: str = ""
    children_private_bytes: tuple[int, ...] = ()


# Uses a model, with inputs of a forward pass if there are any, and a folder to write to.
Function = Callable[[torch.nn.Module, Inputs | None, Path], Done]


def prepare(use: str) -> None:
    """Train one weight for a training use, so that torch imports the optimizer and starts threads."""
    if use in TRAINING:
        weight = torch.nn.Parameter(torch.ones(1))
        weight.sum().backward()
        _optimizer(use, [weight]).step()


def function_of(job: Job) -> Function:
    if job.use_path:
        return lambda model, *_: Done(import_strategy(job.use_path, "use")(model))
    return FUNCTIONS[job.cell.use]


def _write(model: torch.nn.Module, *_: object) -> Done:
    # torch refuses in-place writes to a leaf that requires a gradient, unless autograd is off.
    with torch.inference_mode():
        for tensor in named_tensors(model).values():
            tensor.fill_(0)
    return Done()


def _train(use: str, model: torch.nn.Module, inputs: Inputs | None) -> Done:
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    if not weights:
        raise ValueError("the model has no floating-point parameter that can be trained")
    for weight in weights:
        weight.requires_grad_()
    gradients = "backward" if inputs and _backward(model, inputs) else "synthetic"
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.full_like(weight, 1e-3)
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
    kind: Any = torch.optim.SGD if use == "sgd" else torch.optim.AdamW
    # With foreach, a step needs temporary tensors as large as the whole model.
    return kind(weights, lr=1e-3, foreach=False)  # type: ignore[no-any-return]


def _save(model: torch.nn.Module, _: Inputs | None, folder: Path) -> Done:
    torch.save(model.state_dict(), file := folder / "saved.pt")
    file.unlink()
    return Done()


def in_forks(function: Callable[[], object]) -> Done:
    """Run a function in forked processes at once, and read the private dirty memory of each: what it copied because
    it wrote to it. All live until the last one has run the function; one that fails raises RuntimeError.
    """
    told, answer = os.pipe()  # ends when each process has answered or ended
    until, end = os.pipe()  # all processes end when ``end`` is closed
    children = []
    try:
        for _ in range(CHILDREN):
            if not (pid := os.fork()):
                os.close(end)
                _run(function, answer, until)
            children.append(pid)
        os.close(answer)
        with open(told, "rb") as answers:  # noqa: PTH123 (a descriptor)
            sizes = tuple(int(line) for line in answers)
    finally:
        os.close(end)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        os.close(until)
    for code in filter(None, codes):
        raise RuntimeError(f"a forked process ended with exit code {code}")
    return Done(children_private_bytes=sizes)


def _run(function: Callable[[], object], answer: int, until: int) -> None:
    """Run the function in the child, and end the child when the parent has closed the other end of ``until``."""
    code = 1
    try:
        torch.set_num_threads(1)  # the threads of the parent do not exist here
        function()
        os.write(answer, b"%d\n" % read_rollup()["Private_Dirty"])
        os.close(answer)
        os.read(until, 1)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


FUNCTIONS: Final[dict[str, Function]] = {
    "write": _write,
    "sgd": lambda model, inputs, _: _train("sgd", model, inputs),
    "adamw": lambda model, inputs, _: _train("adamw", model, inputs),
    "to-float32": lambda model, *_: Done(model.to(torch.float32)),
    TO_DEVICE: lambda model, *_: Done(model.to(torch.device("cuda", torch.cuda.current_device()))),
    "deepcopy": lambda model, *_: Done(deepcopy(model)),
    SAVE: _save,
    FORK: lambda model, *_: in_forks(lambda: _write(model)),
}  # ``forward`` is not among them
