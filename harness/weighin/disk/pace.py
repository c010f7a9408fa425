"""A disk's speed, and the time at which each of its answers is due."""

import threading
from dataclasses import dataclass
from typing import Final

from weighin.units import format_latency, format_rate

_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a disk answers: all requests share the rate, and each one waits for the latency.

    None means as fast as the disk is. With ``stall_from_bytes``, a read that ends behind this offset
    in its file is never answered.
    """

    bytes_per_s: int | None = None
    latency_ns: int | None = None
    stall_from_bytes: int | None = None

    def __bool__(self) -> bool:
        return self != Pace()

    def __str__(self) -> str:
        """Return the pace as the command line has it: "200MB/s, 5ms"."""
        parts = [
            format_rate(self.bytes_per_s) if self.bytes_per_s else "",
            format_latency(self.latency_ns) if self.latency_ns else "",
        ]
        return ", ".join(filter(None, parts))


class Schedule:
    """Tells when the answer to each request is due; several threads may ask.

    ``lead_ns`` is the time that a request and its answer take on their way, which the reader sees as a
    part of the latency: each answer is due earlier by this time.
    """

    def __init__(self, pace: Pace, lead_ns: int = 0) -> None:
        self._ns_per_byte = _SECOND_NS / pace.bytes_per_s if pace.bytes_per_s else 0.0
        self._latency_ns = pace.latency_ns or 0
        self._lead_ns = lead_ns
        self._free_ns = 0  # the time from which the disk has no byte of an earlier request to send
        self._lock = threading.Lock()

    def due_ns(self, arrival_ns: int, length: int) -> int:
        """Return the time at which a request for ``length`` bytes is to be answered."""
        with self._lock:
            start_ns = max(arrival_ns - self._lead_ns, self._free_ns)
            self._free_ns = start_ns + round(length * self._ns_per_byte)
            return self._free_ns + self._latency_ns
