"""Call ``from_pretrained`` of transformers, which maps safetensors files and renames keys.

Expected peak: no anonymous memory for mapped weights, that is, weights on the CPU whose safetensors
file has the wanted dtype. All other weights take one copy. If transformers builds one tensor from
several of the file, such as a layer's stacked experts, those need memory at the same time. Weights in
fp8, mxfp4 and compressed-tensors are dequantised; those of other methods stay quantised. The weights
of a GGUF file are dequantised, and take one copy and the largest tensor.

Options: disable_mmap (read the files instead of mapping them), device_map (as in from_pretrained).
"""

import torch

from weighin.strategy import (
    Load,
    arguments_to_dequantise,
    from_pretrained_arguments,
    pretrained_class,
)

FORMATS = ("safetensors", "sharded", "pt", "sharded_pt", "gguf")
DEVICES = ("cpu", "cuda")
OPTIONS = ("disable_mmap", "device_map")
PEAK = ("mapped", "mapped", "mapped", "mapped", "model + tensor")
PACKAGES = ("transformers",)
PRETRAINED = True
DEQUANTISES = True
MAPS_KEYS = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("read"):
        kind = pretrained_class(**job.pretrained)
        arguments = from_pretrained_arguments(job.checkpoint)
        arguments |= arguments_to_dequantise(job.checkpoint)
        model: torch.nn.Module = kind.from_pretrained(
            **arguments, torch_dtype=job.dtype, **job.options
        )
    with job.phase("move"):
        return model.to(job.device)
