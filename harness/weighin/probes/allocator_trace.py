"""Compute an exact timeline of requested and reserved bytes from the CUDA allocator's events.

A timeline of allocated bytes cannot be computed, because the events lack the sizes of blocks.
Instead, a record has the peak of allocated bytes in each phase, and its samples have them over time.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

TRACE_EVENTS: Final = 1_000_000
"""The number of events that the allocator keeps; a load causes two or three events per tensor."""

# A request ends when the GPU no longer uses its memory, as in the allocator's requested_bytes.
_REQUESTED: Final = {"alloc": 1, "free_completed": -1}
_RESERVED: Final = {
    "segment_alloc": 1,
    "segment_free": -1,
    "segment_map": 1,  # only expandable segments have this event
    "segment_unmap": -1,
}
FIELDS: Final = ("t_ns", "action", "bytes", "requested_bytes", "reserved_bytes")


@dataclass(slots=True)
class Trace:
    """A trace: the requested and reserved bytes at its start, and its events.

    An event is (monotonic ns, action, bytes).
    """

    requested_bytes: int
    reserved_bytes: int
    events: list[tuple[int, str, int]] = field(default_factory=list)

    def steps(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield each event with the requested and the reserved bytes after it, as in ``FIELDS``."""
        requested, reserved = self.requested_bytes, self.reserved_bytes
        for t_ns, action, size in self.events:
            requested += _REQUESTED.get(action, 0) * size
            reserved += _RESERVED.get(action, 0) * size
            yield t_ns, action, size, requested, reserved

    def doubts(self, requested_peak_bytes: int | None, kept: int = TRACE_EVENTS) -> list[str]:
        """Return warnings about an incomplete or inconsistent trace.

        ``requested_peak_bytes`` is the peak of requested bytes that the allocator itself counted.
        ``kept`` is the number of events that the allocator keeps.
        """
        warnings = []
        if len(self.events) >= kept:
            warnings.append(
                f"the allocator kept only its last {kept:,} events: the trace lacks its start"
            )
        peak = max((step[3] for step in self.steps()), default=self.requested_bytes)
        peak = max(peak, self.requested_bytes)
        if requested_peak_bytes is not None and peak != requested_peak_bytes:
            warnings.append(
                f"the trace's largest requested bytes, {peak:,}, differ from the allocator's own"
                f" peak, {requested_peak_bytes:,}"
            )
        if any(later[0] < earlier[0] for earlier, later in pairwise(self.events)):
            warnings.append("the machine's clock was set during the trace: its times jump")
        return warnings


def write_trace(path: Path, trace: Trace) -> None:
    """Write the timeline as CSV: a header of ``FIELDS``, then one line per event."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(trace.steps())
