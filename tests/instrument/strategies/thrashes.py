"""Read a mapped file that does not fit, again and again, for ever: each read evicts the next one."""

import mmap
import sys
from pathlib import Path

import torch

from weighin import Load

MIB = 1024**2


def load(job: Load) -> torch.nn.Module:
    with (
        job.phase("thrash"),
        next(filter(Path.exists, (Path(one, "known.bin") for one in sys.path))).open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        room = job.options["limit_mib"] - anon_bytes() // MIB
        taken = torch.ones(room - job.options["left_mib"], MIB, dtype=torch.uint8)
        while taken[0, 0]:
            for offset in range(0, len(mapped), mmap.PAGESIZE):
                mapped[offset]
    raise AssertionError


def anon_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size_kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(size_kib) * 1024
