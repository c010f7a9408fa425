"""Write one file per parameter with torch.save, named after its key, and an index.

Expected peak: no copy of the weights.
"""

import torch

from weighin.strategy import Save, file_name, tied_names
from weighin.stream.write import write_index

FORMATS = ("per_param",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()


def save(job: Save) -> None:
    state = job.model.state_dict()
    shared = {name: first for first, *others in tied_names(job.model) for name in others}
    with job.phase("write"):
        for name, tensor in state.items():
            if name not in shared:
                torch.save(tensor, job.target / file_name(name))
        write_index("per_param", job.target, state, shared)
