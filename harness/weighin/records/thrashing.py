"""Prove that a running cell thrashes, so that weighin can kill the cell and save time.

A search for a RAM floor compares a running cell (measurement) with the reference: the same cell
without a limit. The running cell is proven to thrash if its memory has reached the limit, and one
of these holds:

* The cell has read again more than ``MOST_REREAD`` times the size of its data, after the kernel had
  reclaimed pages. For a load, this rule holds only until every byte of the model was read.
* The cell's tasks waited for memory for more than ``MOST_WAITED`` times the reference's time (PSI
  some, where the kernel has it).
* The cell has taken more than ``MOST_TIME`` times the reference's time. In addition, it has read
  again at least ``REFAULTS_PER_MODEL`` times the size of its data, or waited for memory in at least
  ``STALLED_SHARE`` of its time. A long time alone proves nothing: the machine may be busy.
"""

from dataclasses import dataclass
from typing import Final

from weighin.records.verdict import MOST_REREAD, REFAULTS_PER_MODEL, STALLED_SHARE, size_read
from weighin.result import Result, Stopped
from weighin.units import format_bytes, format_seconds

MOST_TIME: Final = 10.0
MOST_WAITED: Final = 3.0


@dataclass(frozen=True, slots=True)
class Reference:
    """The time of the cell without a limit, and the size of the data that this cell reads."""

    spent_ns: int
    size_bytes: int


def reference_of(first: Result | None) -> Reference | None:
    """Return the reference from ``first``, the result without a limit; None if it lacks a value."""
    if first is None or first.cost is None:
        return None
    if first.ran:
        size = (first.ran.needed_bytes or 0) + (first.peaks.file_sampled_bytes or 0)
        spent_ns = first.ready_ns or 0
    else:
        size, spent_ns = size_read(first), first.cost.wall_ns
    return Reference(spent_ns, size) if spent_ns and size else None


def proof(
    reference: Reference,
    after_ns: int,
    reread_bytes: int | None,
    waited_ns: int | None,
    *,
    is_loading: bool = True,
) -> Stopped | None:
    """Return the proof that a running cell, whose memory has reached its limit, thrashes.

    ``reread_bytes`` and ``waited_ns`` count from the start of the load to now, and are None if they
    are not measured. Without a proof, return None.
    """
    reread, waited = reread_bytes or 0, waited_ns or 0
    is_slow = after_ns > MOST_TIME * reference.spent_ns and (
        reread >= REFAULTS_PER_MODEL * reference.size_bytes or waited >= STALLED_SHARE * after_ns
    )
    rereads = is_loading and reread > MOST_REREAD * reference.size_bytes
    if not (is_slow or rereads or waited > MOST_WAITED * reference.spent_ns):
        return None
    return Stopped(
        after_ns=after_ns,
        reference_ns=reference.spent_ns,
        size_bytes=reference.size_bytes,
        reread_bytes=reread_bytes,
        waited_ns=waited_ns,
    )


def words(stopped: Stopped) -> str:
    """Describe why weighin killed a cell that thrashed, with the numbers of the proof."""
    texts = [f"stopped by weighin after {format_seconds(stopped.after_ns)}, because it thrashes"]
    if stopped.reread_bytes is not None and stopped.size_bytes:
        times = stopped.reread_bytes / stopped.size_bytes
        size = format_bytes(stopped.size_bytes)
        texts.append(
            f"{format_bytes(stopped.reread_bytes, digits=2)} read again ({times:.1f}x of {size})"
        )
    if stopped.reference_ns:
        ratio = stopped.after_ns / stopped.reference_ns
        reference = format_seconds(stopped.reference_ns)
        texts.append(
            f"{ratio:.1f}x the {reference} that the whole measurement took without a limit"
        )
    if stopped.waited_ns is not None:
        texts.append(f"waited {format_seconds(stopped.waited_ns)} for memory")
    return "; ".join(texts)
