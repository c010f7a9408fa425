"""Compute the time at which a disk of a given rate and latency answers each request."""

import threading
from dataclasses import dataclass
from typing import Final

from weighin.units import format_latency, format_rate

_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a disk. All requests share the rate, and each request also waits for the latency.

    None leaves the rate or the latency of the real disk. A read that ends behind the file offset
    ``stall_from_bytes`` is never answered; with None, every read is answered.
    """

    bytes_per_s: int | None = None
    latency_ns: int | None = None
    stall_from_bytes: int | None = None

    def __bool__(self) -> bool:
        return self != Pace()

    def __str__(self) -> str:
        """Return the rate and the latency as texts for the command line: "200MB/s, 5ms"."""
        parts = [
            format_rate(self.bytes_per_s) if self.bytes_per_s else "",
            format_latency(self.latency_ns) if self.latency_ns else "",
        ]
        return ", ".join(filter(None, parts))


class Schedule:
    """Computes when the answer to each request is due; several threads may use one schedule.

    FUSE itself delays a request and its answer by ``lead_ns`` in total. Each answer is therefore due
    ``lead_ns`` earlier, if the disk is idle when the request arrives.
    """

    def __init__(self, pace: Pace, lead_ns: int = 0) -> None:
        self._ns_per_byte = _SECOND_NS / pace.bytes_per_s if pace.bytes_per_s else 0.0
        self._latency_ns = pace.latency_ns or 0
        self._lead_ns = lead_ns
        self._free_ns = 0  # when the disk has sent the last byte of all earlier requests
        self._lock = threading.Lock()

    def due_ns(self, arrival_ns: int, length: int) -> int:
        """Return the time (monotonic ns) at which the answer to a request for ``length`` bytes is due."""
        with self._lock:
            start_ns = max(arrival_ns - self._lead_ns, self._free_ns)
            self._free_ns = start_ns + round(length * self._ns_per_byte)
            return self._free_ns + self._latency_ns
