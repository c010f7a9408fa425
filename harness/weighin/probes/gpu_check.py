"""List the CUDA devices of this machine in a subprocess, so that this process imports no torch.

The subprocess is ``python -m weighin.probes.gpu_check``, which sends one event, ``answer``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from weighin import child_process
from weighin.child_process import Parent, end_with_parent
from weighin.errors import IsolationUnavailable
from weighin.text import one_line
from weighin.units import format_bytes, format_exact

_TIMEOUT_S: Final = 120
_INSTEAD: Final = "weighin predict MODEL --device cuda needs no GPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, whose position in ``GpuAnswer.gpus`` is torch's index of the device."""

    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """The CUDA devices of this machine; ``why`` there is none, and what to do (``repair``)."""

    gpus: tuple[Gpu, ...] = ()
    why: str = ""
    repair: str = ""


@cache
def look() -> GpuAnswer:
    """Return the devices that torch finds; the first call imports torch in a subprocess."""
    command = child_process.module("weighin.probes.gpu_check")
    try:
        answer, why = child_process.ask(command, child_process.environment(), timeout_s=_TIMEOUT_S)
    except TimeoutError:
        return GpuAnswer((), f"torch does not list GPUs within {_TIMEOUT_S} s", _INSTEAD)
    if not answer:
        return GpuAnswer((), f"torch failed while listing GPUs: {one_line(why)}", _INSTEAD)
    if gpus := tuple(Gpu(**gpu) for gpu in answer["gpus"]):
        return GpuAnswer(gpus)
    why = f"torch {answer['torch']} finds no CUDA GPU"
    repair = "nvidia-smi shows whether the driver finds one"
    if not answer["cuda"]:
        why = f"this torch ({answer['torch']}) is built without CUDA"
        repair = "install a CUDA build (pytorch.org/get-started)"
    return GpuAnswer((), why, f"{repair}, or: {_INSTEAD}")


def check(device: str, limits: Sequence[int | None]) -> None:
    """Raise IsolationUnavailable if ``device`` does not exist or has less memory than a limit."""
    seen = look()
    index = int(device.partition(":")[2] or 0)
    if not seen.gpus:
        raise IsolationUnavailable(f"--device {device}: {seen.why}", seen.repair)
    if index >= len(seen.gpus):
        last = len(seen.gpus) - 1
        raise IsolationUnavailable(
            f"--device {device}: torch finds only {len(seen.gpus)} CUDA"
            f" device{'s' * (len(seen.gpus) > 1)}",
            "write cuda:0" if last == 0 else f"write cuda:0 to cuda:{last}",
        )
    gpu = seen.gpus[index]
    for limit in limits:
        if limit is not None and limit > gpu.total_bytes:
            raise IsolationUnavailable(
                f"--vram {format_exact(limit)} is more than {gpu.name} has"
                f" ({format_bytes(gpu.total_bytes)})",
                "give a smaller limit, or leave out --vram",
            )


def main() -> None:
    """Send the devices that torch finds to the process that called ``look``."""
    end_with_parent()
    parent = Parent()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = map(torch.cuda.get_device_properties, range(count))
    gpus = [{"name": gpu.name, "total_bytes": gpu.total_memory} for gpu in found]
    parent.send("answer", torch=str(torch.__version__), cuda=torch.version.cuda, gpus=gpus)


if __name__ == "__main__":
    main()
