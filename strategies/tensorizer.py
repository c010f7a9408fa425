"""Read a file of tensorizer's own format, and assign its tensors to the model.

Expected peak: one copy of the weights, and a buffer of each thread that reads. weighin writes the
file with the package before it measures, because tensorizer reads no other format. By default, the
deserializer reads all tensors at once, chooses the number of threads by the file, and verifies no
checksums.

Options: num_readers (the number of threads that read), verify_hash (true also verifies the
checksums in the file).
"""

import torch
from tensorizer import TensorDeserializer

from weighin.strategy import Load, assign

FORMATS = ("tensorizer",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("num_readers", "verify_hash")
PEAK = ("model",)
PACKAGES = ("tensorizer>=2.12",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with (
        job.phase("read"),
        TensorDeserializer(
            str(job.checkpoint),
            device=job.device,
            num_readers=job.options.get("num_readers"),
            verify_hash=job.options.get("verify_hash", False),
        ) as opened,
    ):
        state = {str(name): tensor.detach() for name, tensor in opened.items()}  # of parameters
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
