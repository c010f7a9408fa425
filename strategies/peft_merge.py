"""Call ``from_pretrained`` of transformers, then ``merge_and_unload`` of peft.

Expected peak: the peak of ``from_pretrained``, one copy of the weights that peft changes (a mapped page
becomes anonymous when peft writes to it), and twice the adapter's largest product in float32.

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
PACKAGES = ("transformers", "peft")
PRETRAINED = True
DEQUANTISES = True
MAPS_KEYS = True
NEEDS_ADAPTER = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("read"):
        kind = pretrained_class(**job.pretrained)
        arguments = from_pretrained_arguments(job.checkpoint)
        arguments |= arguments_to_dequantise(job.checkpoint)
        model: torch.nn.Module = kind.from_pretrained(**arguments, dtype=job.dtype, **job.options)
    with job.phase("merge"):
        from peft import PeftModel  # imports hundreds of modules, which are part of this way

        model = PeftModel.from_pretrained(model, str(job.adapter)).merge_and_unload()
    with job.phase("move"):
        return model.to(job.device)
