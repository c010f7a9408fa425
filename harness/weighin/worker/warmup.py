"""What a worker brings to rest before its baseline, and what only it knows of where it runs.

Standard library until a function is called: torch is imported under a mark.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from weighin.worker.phases import Marks

_WARM_PIECE_BYTES = 1024**2


def settle_math() -> None:
    """Call MKL's vector functions once, in one thread, so that they choose their kernels.

    Where the first calls come from two threads at once, some chunk is now and then computed by
    another kernel: a table of rotary cosines was wrong by 1.5e-4 in 1 of 100 fresh processes on a
    busy machine (torch 2.13, MKL 2024.2). No strategy is to blame for that.
    """
    import torch

    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh):
        function(torch.ones(8))


def read_through(checkpoint: "Path") -> None:
    """Read every file of the checkpoint, so that its pages are cached and charged to this cell."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    piece = bytearray(_WARM_PIECE_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass


def environment(marks: "Marks") -> dict[str, Any]:
    """Return what only the worker knows of where it runs."""
    import torch

    numpy = sys.modules.get("numpy")
    found = {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "numpy": getattr(numpy, "__version__", None),
        "threads": torch.get_num_threads(),
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
    }
    return found | (marks.cuda.describe() if marks.cuda else {})
