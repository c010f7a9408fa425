"""Build without weights, and read every tensor from its offset in the file straight into the model.

Expected peak: one copy of the weights, and a few MiB for each thread. The strategy allocates no
state dict with values, and its direct reads add no pages to the page cache. Values are converted to
the wanted dtype while they are read. The model of a Hugging Face folder is built by its library's own
``from_pretrained``, to which weighin hands the tensors. Weights in fp8 and mxfp4 are dequantised a few
rows at a time; transformers dequantises those in compressed-tensors one after the other. peft merges
an adapter.

Options: threads (default: up to 4 if the checkpoint is in the page cache, else 16, or up to 64 if the
disk is slow to answer), granularity (which tensors are read together: "all", those of one "module", or a
single "tensor"; a folder's tensors are always read together), key and strip_prefix (read only the
selected weights of a training checkpoint).
"""

import torch

from weighin.strategy import Load, load_streaming

FORMATS = (
    "pt", "safetensors", "sharded", "sharded_pt", "per_param", "per_module", "dcp", "pt_legacy",
    "deepspeed", "deepspeed_universal", "gguf",
)  # fmt: skip
DEVICES = ("cpu", "cuda")
OPTIONS = ("threads", "granularity", "key", "strip_prefix")
PEAK = ("model",)
MAPS_KEYS = True
DEQUANTISES = True
MERGES = True


def load(job: Load) -> torch.nn.Module:
    with job.phase("read"):  # also builds the model, which job.build_model gives the cell's dtype
        if job.folder:
            from weighin.strategy import load_pretrained  # no other load needs it

            options = {key: one for key, one in job.options.items() if key != "granularity"}
            model: torch.nn.Module = load_pretrained(
                **job.folder, dtype=job.dtype, device=job.device, **options
            )
            return model
        return load_streaming(job.build_model, job.checkpoint, device=job.device, **job.options)
