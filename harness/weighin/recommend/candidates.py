"""Judge a strategy: whether its load fits under the limits, why, and how long it should take."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from weighin.cell import Cell
from weighin.formats.pretrained_folder import is_folder
from weighin.formats.pretrained_library import LIBRARIES
from weighin.predict.prediction import Prediction
from weighin.recommend.calibration import Calibration
from weighin.recommend.prior_runs import Evidence
from weighin.suite.packages import name_of
from weighin.suite.registry import StrategyInfo
from weighin.units import MIB, format_bytes

MEASURED: Final = "measured"
SAVED_AS: Final = "saved as "
"""Prefix of a requirement that is a checkpoint format."""
OWN_CODE: Final = "code that builds the model"
"""The requirement of strategies that do not load a Hugging Face folder in one call. All requirements
without this name and without the prefix are packages."""

_DOUBT_SHARE, _DOUBT_BYTES = 0.02, 32 * MIB  # the error of a predicted floor
_OF_FOLDERS: Final = frozenset({"safetensors", *(each.name for each in LIBRARIES)})
"""The packages that every user of a Hugging Face folder has."""
_OURS: Final = frozenset({"streaming"})


class FitVerdict(StrEnum):
    """Whether a strategy works under the limits; better verdicts come first."""

    FITS = "fits"
    THRASHES = "reads again and again"
    BARELY = "fits barely"
    CLOSE = "too close to tell"
    TOO_LARGE = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory that a load may use, in bytes; None is no limit."""

    ram_bytes: int | None = None
    vram_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy with its verdict.

    Attributes:
        need_bytes: the smallest RAM limit under which the strategy works.
        margin_bytes: the RAM limit minus ``need_bytes``; None without a limit.
        cuda_bytes: GPU memory that the allocator reserves.
        ready_s: time until every byte was read once.
        noise_s: median deviation of the repeats from ``ready_s``; None if there are no repeats.
        memory_from, time_from: "measured" or "predicted"; empty if nothing is known.
        asks: the strategy's requirements: another format than the checkpoint's, packages.
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
    calibration: Calibration | None,
    limits: Limits,
    checkpoint_format: str,
) -> Candidate:
    """Return one strategy with its verdict, given the format of the user's checkpoint."""
    cell, ready_s, time_from = prediction.cell, None, ""
    measured_s = evidence.median_ready_s(limits.ram_bytes) if evidence else None
    if measured_s is not None:
        ready_s, time_from = measured_s, MEASURED
    elif calibration and not prediction.cannot:
        ready_s, time_from = predicted_ready_s(prediction, calibration), "predicted"
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


def predicted_ready_s(prediction: Prediction, calibration: Calibration) -> float:
    """Return the predicted ready time of a load: the sum of all work at this machine's speeds."""
    work, machine = prediction.work, calibration
    stays_in_memory = max(0, (prediction.model_bytes or 0) - work.mapped_bytes)
    return (
        work.read_bytes / machine.read_bytes_per_s
        + work.read_direct_bytes / machine.read_direct_bytes_per_s
        + work.mapped_bytes / machine.map_bytes_per_s
        + work.fresh_bytes / machine.fault_bytes_per_s
        + work.written_bytes / machine.copy_bytes_per_s
        + work.random_bytes / machine.init_bytes_per_s
        + work.archives * machine.archive_s
        + work.modules * machine.module_s
        + stays_in_memory / machine.copy_bytes_per_s  # reading every byte once
    )


def slowness(measured: Iterable[tuple[Prediction, Evidence]], calibration: Calibration) -> float:
    """Return the median ratio of measured to predicted ready time; 1 if nothing was measured.

    Predicted times hold for the machine as it was during its calibration. Multiply a predicted time
    by the returned ratio before comparing it with times that were measured while the machine was
    busier. The ratio uses the times under the largest limit of each strategy.
    """
    ratios = [
        seconds / predicted_s
        for prediction, evidence in measured
        if (predicted_s := predicted_ready_s(prediction, calibration))
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
        return verdict, f"its {pages} of file pages do not fit: each pass reads them again"
    return verdict, _memory_phrase(prediction, need)


def _under(ram_bytes: int, prediction: Prediction, need: int, tried: bool | None) -> FitVerdict:
    """Return the verdict under a RAM limit; ``tried`` is the result of ``Evidence.fits``."""
    least, most = _floor_range(prediction, need)
    if tried is False or (tried is None and least > ram_bytes + doubt_bytes(least)):
        return FitVerdict.TOO_LARGE
    if most > ram_bytes - doubt_bytes(most):
        return FitVerdict.BARELY if tried else FitVerdict.CLOSE
    if _stays_mapped(prediction) and most + (prediction.model_bytes or 0) > ram_bytes:
        return FitVerdict.THRASHES
    return FitVerdict.FITS


def _floor_range(prediction: Prediction, need: int) -> tuple[int, int]:
    """Return two limits: below the first, every load is killed, and above the second, none is.

    Both limits are the predicted limits, unless ``need`` contradicts the prediction. Measurements
    of one strategy differ by some MiB, and by more if its heap fragments differently. With measured
    limits, a run that agrees with the prediction could therefore change the recommendation.
    """
    least, most = prediction.floor_least_bytes, prediction.floor_bytes
    if least and most and least - doubt_bytes(least) <= need <= most + doubt_bytes(most):
        return least, most
    return need, need


def doubt_bytes(need: int) -> int:
    """Return the possible error of a predicted floor in bytes, in both directions."""
    return _DOUBT_BYTES + int(_DOUBT_SHARE * need)


def _memory_phrase(prediction: Prediction, need: int) -> str:
    """Return a phrase for the memory that a load needs: "keeps two copies: 12.9 GiB"."""
    size, model = format_bytes(need, digits=1), prediction.model_bytes
    if _stays_mapped(prediction):
        return f"keeps {size} and mapped pages of the file"
    # Memory of imports and objects is no part of a copy, but may exceed the size of a tiny model.
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
    """Return whether most of the loaded model consists of mapped pages of its file."""
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
