"""Stream a safetensors file with Run:ai's Model Streamer and assign its tensors.

Expected peak: one copy of the weights, plus the read-ahead of the streamer.
"""

import torch
from runai_model_streamer import SafetensorsStreamer

from weighin.strategy import Load, without_weights

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")


def load(job: Load) -> torch.nn.Module:
    with job.phase("build"):
        model = without_weights(job.build_model)
    with job.phase("read"), SafetensorsStreamer() as streamer:
        streamer.stream_file(str(job.checkpoint))
        state = {}
        for name, tensor in streamer.get_tensors():  # each tensor belongs to the caller
            dtype = job.dtype if tensor.is_floating_point() else tensor.dtype
            state[name] = tensor.to(job.device, dtype)
    with job.phase("assign"):
        model.load_state_dict(state, assign=True)
    return model
