"""Save in a way that is wrong, as the option ``how`` says; "copy" is right, and takes a copy."""

import torch

from weighin import Save


def save(job: Save) -> None:
    how, state = job.options["how"], job.model.state_dict()
    if how == "nothing":
        return
    with job.phase("write"):
        if how == "copy":
            state = {name: tensor.clone() for name, tensor in state.items()}
        elif how == "lossy":
            last = list(state)[-1]
            state[last] = state[last].half().float() + 1
        elif how == "left out":
            state.popitem()
        torch.save(state, job.target / "model.pt")
    if how == "truncated":
        with (job.target / "model.pt").open("r+b") as file:
            file.truncate(1000)
    if how == "raises":
        raise OSError(28, "No space left on device")
