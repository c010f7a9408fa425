"""Build without weights, read every tensor from its place in the file straight into the model.

Expected peak: one copy of the weights, and a few MiB for each thread. No state dict ever exists, and
what is read past the page cache leaves no pages there. Converts the dtype on the way.

Options: threads (up to 4 at what is cached, else 16), granularity ("all", "module" or "tensor").
"""

import torch

from weighin.strategy import Load, load_streaming

FORMATS = (
    "pt", "safetensors", "sharded", "sharded_pt", "per_param", "per_module", "dcp", "pt_legacy",
)  # fmt: skip
DEVICES = ("cpu", "cuda")
OPTIONS = ("threads", "granularity")


def load(job: Load) -> torch.nn.Module:
    with job.phase("read"):  # builds, too; what it builds has the dtype that is wanted
        return load_streaming(job.build_model, job.checkpoint, device=job.device, **job.options)
