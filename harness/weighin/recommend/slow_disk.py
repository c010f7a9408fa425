"""Predict how fast each way to read a file is from a disk with a given rate and latency.

The time of a request is the latency, plus its bytes divided by the rate. A reader that sends n
requests of 128 KiB at once reads n * 128 KiB in the time of one request, but not faster than the
disk's rate.
"""

import math
import os
from dataclasses import replace
from typing import Final

from weighin.loader.direct_io import TimedRead, choose
from weighin.recommend.speeds import Speeds
from weighin.slow_disk import LARGEST_READ_BYTES, Pace

READ_AHEAD: Final = 2
"""The number of requests that the kernel sends at once for sequential reads: the one for which the
reader waits, and the next one (read-ahead)."""

_OPENING: Final = 6  # requests in sequence, to open a file of torch.save and read its index


def behind(speeds: Speeds, pace: Pace) -> Speeds:
    """Return a machine's speeds as if its disk had the rate and the latency of ``pace``."""
    if not pace:
        return speeds
    mapped = READ_AHEAD * (os.cpu_count() or 1)  # one thread per processor reads a mapped model
    return replace(
        speeds,
        read_bytes_per_s=min(speeds.read_bytes_per_s, rate(pace, READ_AHEAD)),
        read_direct_bytes_per_s=min(
            speeds.read_direct_bytes_per_s, rate(pace, _direct_requests(pace))
        ),
        map_bytes_per_s=min(speeds.map_bytes_per_s, rate(pace, mapped)),
        archive_s=speeds.archive_s + _OPENING * (pace.latency_ns or 0) / 1e9,
    )


def rate(pace: Pace, requests: int) -> float:
    """Return the bytes per second of a reader that sends ``requests`` requests of 128 KiB at once."""
    request_s = _request_s(pace, LARGEST_READ_BYTES)
    of_requests = requests * LARGEST_READ_BYTES / request_s if request_s else math.inf
    return min(pace.bytes_per_s or math.inf, of_requests)


def _direct_requests(pace: Pace) -> int:
    """Return how many threads ``load_streaming`` uses for a disk of this rate and latency."""
    sizes = (4096, LARGEST_READ_BYTES)
    return choose([TimedRead(size, round(_request_s(pace, size) * 1e9)) for size in sizes]).threads


def _request_s(pace: Pace, nbytes: int) -> float:
    sent_s = nbytes / pace.bytes_per_s if pace.bytes_per_s else 0.0
    return (pace.latency_ns or 0) / 1e9 + sent_s
