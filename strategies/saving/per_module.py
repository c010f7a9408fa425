"""Write one file per layer with torch.save, and an index of their keys.

Expected peak: no copy of the weights.
"""

import torch

from weighin.strategy import Save, file_name, tied_names
from weighin.stream.sharded_files import module_of
from weighin.stream.write import write_index

FORMATS = ("per_module",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()


def save(job: Save) -> None:
    state = job.model.state_dict()
    shared = {name: first for first, *others in tied_names(job.model) for name in others}
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        modules.setdefault(module_of(shared.get(name, name)), {})[name] = tensor
    with job.phase("write"):
        for module, tensors in modules.items():
            torch.save(tensors, job.target / file_name(module))
        write_index("per_module", job.target, state, shared)
