"""Every event of the CUDA allocator becomes an exact timeline of requested and reserved bytes.

Blocks are not among the events, so that allocated bytes have no such timeline: their peaks are in
the phases, and looks at them among the samples.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

TRACE_EVENTS: Final = 1_000_000
"""How many events the allocator keeps; a load makes two or three a tensor."""

# Requests count until the device is done with them, as the allocator's own requested_bytes does.
_REQUESTED: Final = {"alloc": 1, "free_completed": -1}
_RESERVED: Final = {
    "segment_alloc": 1,
    "segment_free": -1,
    "segment_map": 1,  # of segments that can grow
    "segment_unmap": -1,
}
FIELDS: Final = ("t_ns", "action", "bytes", "requested_bytes", "reserved_bytes")


@dataclass(slots=True)
class Trace:
    """What was requested and reserved at its start, and the events (monotonic ns, action, bytes)."""

    requested_bytes: int
    reserved_bytes: int
    events: list[tuple[int, str, int]] = field(default_factory=list)

    def steps(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield each event with the requested and the reserved bytes after it."""
        requested, reserved = self.requested_bytes, self.reserved_bytes
        for t_ns, action, size in self.events:
            requested += _REQUESTED.get(action, 0) * size
            reserved += _RESERVED.get(action, 0) * size
            yield t_ns, action, size, requested, reserved

    def doubts(self, requested_peak_bytes: int | None, kept: int = TRACE_EVENTS) -> list[str]:
        """Return what speaks against this trace; ``kept`` events are the most that there can be."""
        found = []
        if len(self.events) >= kept:
            found.append(
                f"the allocator kept only its last {kept:,} events: the trace has no start"
            )
        peak = max((step[3] for step in self.steps()), default=self.requested_bytes)
        peak = max(peak, self.requested_bytes)
        if requested_peak_bytes is not None and peak != requested_peak_bytes:
            found.append(
                f"the trace's highest requested bytes, {peak:,}, are not the allocator's own peak,"
                f" {requested_peak_bytes:,}"
            )
        if any(later[0] < earlier[0] for earlier, later in pairwise(self.events)):
            found.append("the machine's clock was set while the trace was taken: its times jump")
        return found


def write_trace(path: Path, trace: Trace) -> None:
    """Write the timeline as CSV: a header of ``FIELDS``, then one line an event."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(trace.steps())
