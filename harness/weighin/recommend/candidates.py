"""Judge a strategy: whether its load fits under the limits, and how long the load takes."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from weighin.cell import Cell
from weighin.formats.pretrained_folder import is_folder
from weighin.formats.pretrained_library import LIBRARIES
from weighin.predict.prediction import Prediction
from weighin.recommend.prior_runs import Evidence
from weighin.recommend.speeds import Speeds
from weighin.suite.packages import name_of
from weighin.suite.registry import StrategyInfo
from weighin.units import MIB, format_bytes, format_exact

MEASURED: Final = "measured"
SAVED_AS: Final = "saved as "
"""The beginning of a requirement such as "saved as safetensors"."""
OWN_CODE: Final = "code that builds the model"
"""The requirement of a strategy that cannot load a Hugging Face folder in one call. A requirement
that is not this text and does not begin with ``SAVED_AS`` is the name of a package.
"""

_DOUBT_SHARE, _DOUBT_BYTES = 0.02, 32 * MIB  # the largest error of a predicted RAM floor
_OF_FOLDERS: Final = frozenset({"safetensors", *(each.name for each in LIBRARIES)})
"""Packages that users of Hugging Face folders have, so that they do not count as requirements."""
_OURS: Final = frozenset({"streaming"})


class FitVerdict(StrEnum):
    """Whether a strategy works under the limits; the order is from the best to the worst verdict."""

    FITS = "fits"
    THRASHES = "reads again and again"
    BARELY = "fits barely"
    CLOSE = "too close to tell"
    TOO_LARGE = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory in bytes that a load may use; None means that there is no limit."""

    ram_bytes: int | None = None
    vram_bytes: int | None = None

    def __str__(self) -> str:
        """ "8GiB of RAM and 4GiB of GPU memory", or "without a limit"."""
        limits = [f"{format_exact(self.ram_bytes)} of RAM"] if self.ram_bytes else []
        limits += [f"{format_exact(self.vram_bytes)} of GPU memory"] if self.vram_bytes else []
        return " and ".join(limits) or "without a limit"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy with its verdict.

    Attributes:
        why: the reason for the verdict, such as "keeps two copies: 12.9 GiB".
        need_bytes: the smallest RAM limit in bytes under which the strategy works.
        margin_bytes: the RAM limit minus ``need_bytes``; None without a limit.
        cuda_bytes: the GPU memory that the CUDA allocator reserves.
        ready_s: the seconds from the load's start until every byte of the model was read once.
        noise_s: the median absolute deviation of the measured times; None for fewer than two.
        memory_from, time_from: whether memory and time are "measured" or "predicted"; "" if unknown.
        asks: what the strategy requires: packages, another checkpoint format, or ``OWN_CODE``.
    """

    strategy: str
    format: str
    verdict: FitVerdict
    why: str
    need_bytes: int | None = None
    margin_bytes: int | None = None
    cuda_bytes: int | None = None
    ready_s: float | None = None
    memory_from: str = ""
    time_from: str = ""
    asks: tuple[str, ...] = ()
    noise_s: float | None = None


def assess(
    info: StrategyInfo,
    prediction: Prediction,
    evidence: Evidence | None,
    speeds: Speeds | None,
    limits: Limits,
    checkpoint_format: str,
) -> Candidate:
    """Judge one strategy; ``checkpoint_format`` is the format of the user's checkpoint."""
    cell, ready_s, time_from = prediction.cell, None, ""
    measured_s = evidence.median_ready_s(limits.ram_bytes) if evidence else None
    if measured_s is not None:
        ready_s, time_from = measured_s, MEASURED
    elif speeds and not prediction.cannot:
        ready_s, time_from = predicted_ready_s(prediction, speeds), "predicted"
    need, memory_from = prediction.floor_bytes, "predicted"
    if evidence and evidence.anon_bytes is not None:
        need, memory_from = evidence.anon_bytes + prediction.above_peak_bytes, "measured"
    cuda = prediction.cuda_with_use("cuda_reserved_bytes")
    if evidence and evidence.cuda_reserved_bytes is not None:
        cuda = max(evidence.cuda_reserved_bytes, cuda if prediction.use and cuda else 0)
    tried = evidence.fits(limits.ram_bytes) if evidence and limits.ram_bytes else None
    if tried is not None:
        memory_from = "measured"
    verdict, why = _verdict(prediction, need, cuda, tried, limits)
    return Candidate(
        strategy=info.name,
        format=cell.format,
        verdict=verdict,
        why=why,
        need_bytes=need,
        margin_bytes=None if need is None or not limits.ram_bytes else limits.ram_bytes - need,
        cuda_bytes=cuda,
        ready_s=ready_s,
        memory_from=memory_from if need is not None else "",
        time_from=time_from,
        asks=tuple(_asks(info, cell, checkpoint_format)),
        noise_s=evidence.noise_s(limits.ram_bytes) if evidence else None,
    )


def predicted_ready_s(prediction: Prediction, machine: Speeds) -> float:
    """Return the predicted seconds until every byte was read.

    They are a sum over all kinds of work: the amount of each kind, divided by the machine's speed,
    and the processor time of the symbolic run, for what Python does for each tensor.
    """
    work = prediction.work
    stays_in_memory = max(0, (prediction.model_bytes or 0) - work.mapped_bytes)
    return (
        work.read_bytes / machine.read_bytes_per_s
        # Direct reads of several ranks share no page cache, and hinder each other.
        + work.read_direct_bytes * prediction.cell.ranks / machine.read_direct_bytes_per_s
        + work.mapped_bytes / machine.map_bytes_per_s
        + work.fresh_bytes / machine.fault_bytes_per_s
        + work.written_bytes / machine.copy_bytes_per_s
        + work.random_bytes / machine.init_bytes_per_s
        + work.archives * machine.archive_s
        + work.modules * machine.module_s
        + work.cpu_ns / 1e9
        + stays_in_memory / machine.copy_bytes_per_s  # the time to read every byte once
    )


def slowness(measured: Iterable[tuple[Prediction, Evidence]], speeds: Speeds) -> float:
    """Return the median ratio of measured to predicted times; 1 if nothing was measured.

    A predicted time, multiplied by this ratio, can be compared with measured times. For each
    strategy, the ratio uses the times without a RAM limit, or else those under the largest one.
    """
    ratios = [
        seconds / predicted_s
        for prediction, evidence in measured
        if (predicted_s := predicted_ready_s(prediction, speeds))
        and (seconds := evidence.median_ready_s(None)) is not None
    ]
    return statistics.median(ratios) if ratios else 1.0


def _verdict(
    prediction: Prediction,
    need: int | None,
    cuda: int | None,
    tried: bool | None,
    limits: Limits,
) -> tuple[FitVerdict, str]:
    if need is None:
        return FitVerdict.UNKNOWN, prediction.cannot or "its memory use is unknown"
    if limits.vram_bytes and cuda is not None and cuda > limits.vram_bytes:
        return FitVerdict.TOO_LARGE, f"needs {format_bytes(cuda, digits=1)} of GPU memory"
    verdict = FitVerdict.FITS
    if limits.ram_bytes is not None:
        verdict = _under(limits.ram_bytes, prediction, need, tried)
    if verdict is FitVerdict.THRASHES:
        pages = format_bytes(prediction.model_bytes or 0, digits=1)
        return verdict, f"its {pages} of file pages do not fit: each forward pass reads them again"
    return verdict, _memory_phrase(prediction, need)


def _under(ram_bytes: int, prediction: Prediction, need: int, tried: bool | None) -> FitVerdict:
    """Return the verdict on a strategy under a RAM limit; ``tried`` tells whether a measured load
    worked under this limit, and is None if no measurement shows this.
    """
    least, most = _floor_range(prediction, need)
    if tried is False or (tried is None and least > ram_bytes + doubt_bytes(least)):
        return FitVerdict.TOO_LARGE
    if most > ram_bytes - doubt_bytes(most):
        return FitVerdict.BARELY if tried else FitVerdict.CLOSE
    if _stays_mapped(prediction) and most + (prediction.model_bytes or 0) > ram_bytes:
        return FitVerdict.THRASHES
    return FitVerdict.FITS


def _floor_range(prediction: Prediction, need: int) -> tuple[int, int]:
    """Return two RAM limits: below the first, every load is killed; above the second, no load is.

    Both limits are predicted. If the measured ``need`` contradicts the prediction, both are ``need``.
    Measurements of the same load differ by some MiB or more, for example with the fragmentation of
    the heap. If ``need`` always decided, another run could change the recommendation.
    """
    least, most = prediction.floor_least_bytes, prediction.floor_bytes
    if least and most and least - doubt_bytes(least) <= need <= most + doubt_bytes(most):
        return least, most
    return need, need


def doubt_bytes(need: int) -> int:
    """Return by how many bytes the predicted smallest RAM limit may be too high or too low."""
    return _DOUBT_BYTES + int(_DOUBT_SHARE * need)


def _memory_phrase(prediction: Prediction, need: int) -> str:
    """Return a phrase for the memory that a load needs: "keeps two copies: 12.9 GiB"."""
    size, model = format_bytes(need, digits=1), prediction.model_bytes
    if _stays_mapped(prediction):
        return f"keeps {size} and mapped pages of the file"
    # The memory of imports is subtracted, because it may exceed the size of a tiny model.
    beside = (prediction.floor_bytes or 0) - prediction.tensors_with_use_bytes
    if not model or need - beside < model // 2:
        return f"keeps {size}"
    copies = (need - beside) / model
    if 0.85 <= copies < 1.25:
        return f"keeps one copy: {size}"
    if 1.75 <= copies < 2.25:
        return f"keeps two copies: {size}"
    return f"keeps {copies:.1f} times the model: {size}"


def _stays_mapped(prediction: Prediction) -> bool:
    """Return whether more than half of the loaded model is a mapping of its file."""
    if prediction.cell.device != "cpu" or not prediction.model_bytes:
        return False
    anonymous, mapped = prediction.tensors_with_use_bytes, prediction.work.mapped_bytes
    return anonymous < prediction.model_bytes // 2 < mapped


def _asks(info: StrategyInfo, cell: Cell, checkpoint_format: str) -> list[str]:
    asked = [] if cell.format == checkpoint_format else [f"{SAVED_AS}{cell.format}"]
    if is_folder(cell.model):
        asked += [name for name in info.packages if name_of(name) not in _OF_FOLDERS]
        if not info.maps_keys:
            asked.append(OWN_CODE)
    else:
        asked += info.packages
    if info.name in _OURS:
        asked.append("weighin")
    return asked
