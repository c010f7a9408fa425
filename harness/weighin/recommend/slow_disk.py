"""Predict how fast each way to read a file is on a disk that answers late.

A request waits for its latency, and then for its bytes at the rate, which all requests share. Whoever
has n requests of 128 KiB under way at once gets n * 128 KiB in the time of one, and at most the rate.
"""

import math
import os
from dataclasses import replace
from typing import Final

from weighin.disk.pace import Pace
from weighin.disk.passthrough import LARGEST_READ_BYTES
from weighin.loader.disk_readers import TimedRead, choose
from weighin.recommend.calibration import Calibration

READ_AHEAD: Final = 2
"""The requests that the kernel has under way for one sequence of buffered reads or page faults: the one
that is waited for, and the next."""

_OPENING: Final = 6  # requests, one after the other: to open an archive and to read its index


def behind(calibration: Calibration, pace: Pace) -> Calibration:
    """Return the calibration of this machine with such a disk."""
    if not pace:
        return calibration
    mapped = READ_AHEAD * (os.cpu_count() or 1)  # a thread for each processor reads the pages
    return replace(
        calibration,
        read_bytes_per_s=min(calibration.read_bytes_per_s, rate(pace, READ_AHEAD)),
        read_direct_bytes_per_s=min(
            calibration.read_direct_bytes_per_s, rate(pace, _direct_requests(pace))
        ),
        map_bytes_per_s=min(calibration.map_bytes_per_s, rate(pace, mapped)),
        archive_s=calibration.archive_s + _OPENING * (pace.latency_ns or 0) / 1e9,
    )


def rate(pace: Pace, requests: int) -> float:
    """Return the bytes per second of a reader that has ``requests`` under way at once."""
    request_s = _request_s(pace, LARGEST_READ_BYTES)
    of_requests = requests * LARGEST_READ_BYTES / request_s if request_s else math.inf
    return min(pace.bytes_per_s or math.inf, of_requests)


def _direct_requests(pace: Pace) -> int:
    """Return the threads with which ``load_streaming`` reads from such a disk."""
    sizes = (4096, LARGEST_READ_BYTES)
    return choose([TimedRead(size, round(_request_s(pace, size) * 1e9)) for size in sizes]).threads


def _request_s(pace: Pace, nbytes: int) -> float:
    sent_s = nbytes / pace.bytes_per_s if pace.bytes_per_s else 0.0
    return (pace.latency_ns or 0) / 1e9 + sent_s
