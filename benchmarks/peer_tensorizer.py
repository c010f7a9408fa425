"""Load a file of tensorizer's own format into a model that was built without weights.

Expected peak: one copy of the weights.
"""

import torch
from tensorizer import TensorDeserializer

from weighin.strategy import Load, without_weights

FORMATS = ("tensorizer",)
DEVICES = ("cpu", "cuda")


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = without_weights(job.build_model)
    with (
        job.phase("read"),
        TensorDeserializer(str(job.checkpoint), device=job.device, dtype=job.dtype) as opened,
    ):
        opened.load_into_module(model)
    return model
