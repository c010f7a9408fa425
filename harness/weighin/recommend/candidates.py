"""Judge each strategy, by its prediction and by earlier runs on this machine: whether its load fits under the
limits, how long it takes, and which is the best.
"""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from weighin.predict.prediction import Prediction
from weighin.recommend.prior_runs import Evidence
from weighin.slow_disk import LARGEST_READ_BYTES, Pace
from weighin.stream.bytes import choose
from weighin.stream.hugging_face_folder import folder_library
from weighin.stream.pretrained_library import LIBRARIES
from weighin.suite.registry import StrategyInfo, name_of
from weighin.units import GIB, MIB, format_bytes, format_exact

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
_SAME_TIME, _SAME_TIME_S = 1.2, 0.1
"""Times within this factor or difference count as equal, because predictions are no more accurate."""
_CONVERSION_S: Final = 1.0
"""A conversion adds to a predicted load the time of another load, and this time."""
READ_AHEAD: Final = 2
"""The number of requests that the kernel sends at once for sequential reads: the one for which the
reader waits, and the next one (read-ahead)."""
_OPENING: Final = 6  # requests in sequence, to open a file of torch.save and read its index


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
class Speeds:
    """A machine's speeds in bytes per second, and costs in seconds: by default, of a small cloud machine.

    They order strategies better than speeds that are measured on the machine within seconds: two such
    measurements differ by a factor of two (docs/internals.md).
    """

    read_bytes_per_s: float = 1.2 * GIB
    read_direct_bytes_per_s: float = 2.3 * GIB  # direct I/O by several threads
    map_bytes_per_s: float = 1.2 * GIB
    fault_bytes_per_s: float = 1.5 * GIB  # the first write to memory
    copy_bytes_per_s: float = 8 * GIB
    init_bytes_per_s: float = 0.5 * GIB  # a constructor's random numbers
    archive_s: float = 0.001  # an opening by torch.load
    module_s: float = 0.0009  # an import


USUAL: Final = Speeds()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy with its verdict, and the reason for it: "keeps two copies: 12.9 GiB"."""

    strategy: str
    format: str
    verdict: FitVerdict
    why: str
    need_bytes: int | None = None  # the smallest RAM limit under which the strategy works
    margin_bytes: int | None = None  # the asked limit minus it
    cuda_bytes: int | None = None
    ready_s: float | None = None  # from the load's start until every byte was read once
    memory_from: str = ""  # "measured", "predicted", or "" if unknown
    time_from: str = ""
    asks: tuple[str, ...] = ()  # packages, another checkpoint format, or OWN_CODE
    noise_s: float | None = None  # the deviation of the measured times


def assess(
    info: StrategyInfo,
    prediction: Prediction,
    evidence: Evidence | None,
    predicted_s: float | None,
    limits: Limits,
    checkpoint_format: str,
) -> Candidate:
    """Judge a strategy; its load takes ``predicted_s`` unless a record has a measured time."""
    cell, ram = prediction.cell, limits.ram_bytes
    need, memory_from = prediction.floor_bytes, "predicted"
    ready_s = noise_s = tried = None
    cuda, time_from = prediction.with_use("cuda_reserved_bytes"), ""
    if evidence:
        ready_s, noise_s = evidence.median_ready_s(ram), evidence.noise_s(ram)
        tried = evidence.fits(ram) if ram else None
        if evidence.anon_bytes is not None:
            need, memory_from = evidence.anon_bytes + prediction.above_peak_bytes, MEASURED
        if evidence.cuda_reserved_bytes is not None:
            cuda = max(evidence.cuda_reserved_bytes, cuda if prediction.use and cuda else 0)
    if ready_s is not None:
        time_from = MEASURED
    elif predicted_s is not None and not prediction.cannot:
        ready_s, time_from = predicted_s, "predicted"
    if tried is not None:
        memory_from = MEASURED
    verdict, why = _verdict(prediction, need, cuda, tried, limits)
    of_folder = bool(folder_library(cell.model))
    asks = [] if cell.format == checkpoint_format else [f"{SAVED_AS}{cell.format}"]
    asks += [one for one in info.packages if not (of_folder and name_of(one) in _OF_FOLDERS)]
    asks += [OWN_CODE] * (of_folder and not info.maps_keys)
    asks += ["weighin"] * (info.name == "streaming")
    return Candidate(
        strategy=info.name,
        format=cell.format,
        verdict=verdict,
        why=why,
        need_bytes=need,
        margin_bytes=None if need is None or not ram else ram - need,
        cuda_bytes=cuda,
        ready_s=ready_s,
        memory_from=memory_from if need is not None else "",
        time_from=time_from,
        asks=tuple(asks),
        noise_s=noise_s,
    )


def predicted_ready_s(prediction: Prediction, machine: Speeds) -> float:
    """Return the predicted seconds until ready: each kind of work / its speed, plus the code's own CPU time."""
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
    """Return the median of measured / predicted times (largest limit); 1 if none was measured."""
    ratios = [
        seconds / predicted_s
        for prediction, evidence in measured
        if (predicted_s := predicted_ready_s(prediction, speeds))
        and (seconds := evidence.median_ready_s(None)) is not None
    ]
    return statistics.median(ratios) if ratios else 1.0


def _verdict(
    prediction: Prediction, need: int | None, cuda: int | None, tried: bool | None, limits: Limits
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
    """Return the verdict under a RAM limit; ``tried`` tells whether a measured load worked under it."""
    least, most = prediction.floor_least_bytes, prediction.floor_bytes
    # Measurements of one load differ by some MiB: one that fits the prediction should not change it.
    if not (least and most and least - doubt_bytes(least) <= need <= most + doubt_bytes(most)):
        least = most = need
    if tried is False or (tried is None and least > ram_bytes + doubt_bytes(least)):
        return FitVerdict.TOO_LARGE
    if most > ram_bytes - doubt_bytes(most):
        return FitVerdict.BARELY if tried else FitVerdict.CLOSE
    if _stays_mapped(prediction) and most + (prediction.model_bytes or 0) > ram_bytes:
        return FitVerdict.THRASHES
    return FitVerdict.FITS


def doubt_bytes(need: int) -> int:
    return _DOUBT_BYTES + int(_DOUBT_SHARE * need)


def _memory_phrase(prediction: Prediction, need: int) -> str:
    size, model = format_bytes(need, digits=1), prediction.model_bytes
    if _stays_mapped(prediction):
        return f"keeps {size} and mapped pages of the file"
    # The memory of imports is subtracted, because it may exceed the size of a tiny model.
    beside = (prediction.floor_bytes or 0) - (prediction.with_use("tensor_peak_bytes") or 0)
    if not model or need - beside < model // 2:
        return f"keeps {size}"
    copies = (need - beside) / model
    few = "one copy" if 0.85 <= copies < 1.25 else "two copies" if 1.75 <= copies < 2.25 else ""
    return f"keeps {few or f'{copies:.1f} times the model'}: {size}"


def _stays_mapped(prediction: Prediction) -> bool:
    """Whether more than half of the loaded model is a mapping of its file."""
    anonymous = prediction.with_use("tensor_peak_bytes") or 0
    half = (prediction.model_bytes or 0) // 2
    return prediction.cell.device == "cpu" and anonymous < half < prediction.work.mapped_bytes


def behind(speeds: Speeds, pace: Pace) -> Speeds:
    """Return a machine's speeds as if its disk had the rate and the latency of ``pace``."""
    if not pace:
        return speeds
    # As many threads as ``load_streaming`` uses for such a disk.
    small_ns, sample_ns = (round(_request_s(pace, n) * 1e9) for n in (4096, LARGEST_READ_BYTES))
    threads = choose(small_ns, sample_ns).threads
    mapped = READ_AHEAD * (os.cpu_count() or 1)  # one thread per processor reads a mapped model
    return replace(
        speeds,
        read_bytes_per_s=min(speeds.read_bytes_per_s, rate(pace, READ_AHEAD)),
        read_direct_bytes_per_s=min(speeds.read_direct_bytes_per_s, rate(pace, threads)),
        map_bytes_per_s=min(speeds.map_bytes_per_s, rate(pace, mapped)),
        archive_s=speeds.archive_s + _OPENING * (pace.latency_ns or 0) / 1e9,
    )


def rate(pace: Pace, requests: int) -> float:
    """Return the bytes/s of ``requests`` requests of 128 KiB at once, at most the rate of the disk."""
    request_s = _request_s(pace, LARGEST_READ_BYTES)
    of_requests = requests * LARGEST_READ_BYTES / request_s if request_s else math.inf
    return min(pace.bytes_per_s or math.inf, of_requests)


def _request_s(pace: Pace, nbytes: int) -> float:
    sent_s = nbytes / pace.bytes_per_s if pace.bytes_per_s else 0.0
    return (pace.latency_ns or 0) / 1e9 + sent_s


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the strategies from the best to the worst: by verdict, then by the time of the load.

    If any strategy of a verdict was measured, predicted times count double. If the checkpoint must be converted
    first, they count double (again), plus 1 s. Strategies about as fast as the fastest one (measured: within its
    ``noise_s``; predicted: within 20 % or 0.1 s, whichever is more) are ordered by: measured before predicted,
    conversions of the checkpoint, other requirements, RAM, the least first. Strategies that thrash are ordered
    by conversions, other requirements, RAM, and then time.
    """
    return [
        one
        for verdict in FitVerdict
        for one in _by_time([each for each in candidates if each.verdict is verdict])
    ]


def _by_time(alike: Sequence[Candidate]) -> list[Candidate]:
    is_any_measured = any(one.time_from == MEASURED for one in alike)

    def counted_s(candidate: Candidate) -> float:
        if candidate.ready_s is None:
            return float("inf")
        if candidate.time_from == MEASURED:
            return candidate.ready_s
        time_s = candidate.ready_s * (2 if is_any_measured else 1)
        return 2 * time_s + _CONVERSION_S if _demands(candidate)[0] else time_s

    as_fast_s = 0.0
    if fastest := min(alike, key=counted_s, default=None):
        as_fast_s = counted_s(fastest)
        if fastest.time_from == MEASURED:
            as_fast_s += fastest.noise_s or 0.0
        else:
            as_fast_s = max(_SAME_TIME * as_fast_s, as_fast_s + _SAME_TIME_S)

    def key(candidate: Candidate) -> tuple[object, ...]:
        time_s = counted_s(candidate)
        # A load that thrashes takes another time under each limit, so its time decides last.
        if candidate.verdict is FitVerdict.THRASHES:
            return *_demands(candidate), time_s, candidate.strategy
        is_slower = time_s > as_fast_s
        is_doubted = is_any_measured and candidate.time_from != MEASURED
        demands = (0, 0, 0) if is_slower else _demands(candidate)
        return is_slower, is_doubted and not is_slower, *demands, time_s, candidate.strategy

    return sorted(alike, key=key)


def _demands(candidate: Candidate) -> tuple[int, int, int]:
    """Return the number of conversions, then of other requirements such as packages, then the RAM."""
    conversions = sum(asked.startswith(SAVED_AS) for asked in candidate.asks)
    return conversions, len(candidate.asks) - conversions, candidate.need_bytes or 0
