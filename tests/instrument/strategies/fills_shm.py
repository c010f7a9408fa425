"""Fill a file of ``mib`` (64) MiB in ``folder`` (/dev/shm), as some data loaders do, and load rightly."""

import tempfile
import time

import torch

from strategies.baseline import load as load_rightly
from weighin import Load

MIB = 1024**2


def load(job: Load) -> torch.nn.Module:
    with tempfile.TemporaryFile(dir=job.options.get("folder", "/dev/shm")) as file:
        with job.phase("write"):
            for _ in range(job.options.get("mib", 64)):
                file.write(bytes(MIB))
            file.flush()
        with job.phase("hold it"):
            time.sleep(0.05)
        return load_rightly(job)
