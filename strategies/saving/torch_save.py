"""Write the whole state dict to one file with torch.save.

Expected peak: no copy of the weights; every storage is written from where it is. (On a GPU, each
passes through RAM.)

Options: crc32 (true): whether the zip archive gets its checksums.
"""

import torch
from torch.serialization import set_crc32_options

from weighin.strategy import Save

FORMATS = ("pt",)
DEVICES = ("cpu", "cuda")
OPTIONS = ("crc32",)


def save(job: Save) -> None:
    set_crc32_options(job.options.get("crc32", True))
    with job.phase("write"):
        torch.save(job.model.state_dict(), job.target / "model.pt")
