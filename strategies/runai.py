"""Stream a safetensors file with Run:ai's Model Streamer, and assign its tensors to the model.

Expected peak: one copy of the weights, and the streamer's read-ahead. The streamer runs with the
defaults that its documentation recommends for a local disk: 16 threads, reads of 2 MiB, a buffer
without limit. To change them, set its environment variables, such as RUNAI_STREAMER_CONCURRENCY and
RUNAI_STREAMER_MEMORY_LIMIT, in the cell's environment.
"""

import torch
from runai_model_streamer import SafetensorsStreamer

from weighin.strategy import Load, assign

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()
PEAK = ("model",)
PACKAGES = ("runai-model-streamer",)


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"), torch.device("meta"):
        model = job.build_model()
    with job.phase("read"), SafetensorsStreamer() as streamer:
        streamer.stream_file(str(job.checkpoint))
        state = dict(streamer.get_tensors())  # the caller owns each tensor
    with job.phase("assign"):
        assign(model, state, job.device)
    with job.phase("buffers"):
        job.reset_buffers(model)
    return model
