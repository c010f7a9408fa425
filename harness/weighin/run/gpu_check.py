"""What CUDA this machine offers, asked in a process of its own: the parent imports no torch."""

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Final

from weighin.errors import IsolationUnavailable
from weighin.text import one_line
from weighin.units import format_bytes, format_exact

_QUESTION: Final = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        gpus.append({"name": one.name, "total_bytes": one.total_memory})
print(json.dumps({"torch": str(torch.__version__), "cuda": torch.version.cuda, "gpus": gpus}))
"""
_TIMEOUT_S: Final = 120
_INSTEAD: Final = "weighin predict MODEL --device cuda needs no GPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, as torch numbers them."""

    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """The CUDA devices of this machine. Where there is none, ``why`` and ``repair`` say so."""

    gpus: tuple[Gpu, ...] = ()
    why: str = ""
    repair: str = ""


@cache
def look() -> GpuAnswer:
    """Return what torch sees; takes as long as an import of torch, the first time."""
    asked = subprocess.run(
        [sys.executable, "-c", _QUESTION],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        return GpuAnswer(why=f"torch cannot be asked for a GPU: {one_line(last)}", repair=_INSTEAD)
    found = json.loads(asked.stdout)
    gpus = tuple(Gpu(**one) for one in found["gpus"])
    if not gpus and not found["cuda"]:
        return GpuAnswer(
            why=f"this torch ({found['torch']}) is built without CUDA",
            repair=f"install a CUDA build (pytorch.org/get-started), or: {_INSTEAD}",
        )
    if not gpus:
        return GpuAnswer(
            why=f"torch {found['torch']} sees no CUDA GPU",
            repair=f"nvidia-smi shows whether the driver does, or: {_INSTEAD}",
        )
    return GpuAnswer(gpus)


def check(device: str, limits: list[int | None]) -> None:
    """Raise IsolationUnavailable where ``device`` is not there, or has less than a limit in bytes."""
    seen = look()
    index = int(device.partition(":")[2] or 0)
    if not seen.gpus:
        raise IsolationUnavailable(f"--device {device}: {seen.why}", seen.repair)
    if index >= len(seen.gpus):
        last = len(seen.gpus) - 1
        raise IsolationUnavailable(
            f"--device {device}: torch sees {len(seen.gpus)} of them",
            "write cuda:0" if last == 0 else f"write cuda:0 to cuda:{last}",
        )
    gpu = seen.gpus[index]
    for limit in limits:
        if limit is not None and limit > gpu.total_bytes:
            raise IsolationUnavailable(
                f"--vram {format_exact(limit)} is more than {gpu.name} has"
                f" ({format_bytes(gpu.total_bytes)})",
                "give a smaller limit, or leave --vram out to limit nothing",
            )
