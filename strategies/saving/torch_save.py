"""Write the whole state dict to one file with torch.save.

Expected peak: no copy of the weights; each storage is written from its own memory. On a GPU, each
storage passes through RAM.

Options: crc32 (whether to write the zip archive's checksums; default: true).
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
