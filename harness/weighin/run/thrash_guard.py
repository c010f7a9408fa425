"""Test up to twice a second whether a running cell thrashes, so that weighin can kill it early."""

import os
import time
from collections.abc import Callable
from typing import Final

from weighin.probes.cgroup import Counters
from weighin.records import thrashing
from weighin.result import Stopped

_EVERY_S: Final = 0.5
_SHARE: Final = 10  # the pause is this many times a test, which is slow in a thrashing container


class ThrashGuard:
    """Compares one cell with ``reference``: the figures of the same cell without a limit."""

    def __init__(self, reference: thrashing.Reference, limit_bytes: int) -> None:
        self._reference = reference
        self._limit_bytes = limit_bytes
        self._started_ns = time.monotonic_ns()
        self.next_s = time.monotonic() + _EVERY_S
        """The time of the next test, by the clock ``time.monotonic``."""

    def proof(
        self,
        look: Callable[[], Counters],
        before: Counters,
        peak_bytes: int | None = None,
        *,
        is_loading: bool = True,
    ) -> Stopped | None:
        """Return the figures that prove that the cell thrashes; None without a proof, or before a
        test is due.

        Args:
            look: reads the current figures of the cgroup.
            before: the cgroup's figures at the start of the load; all None before the load.
            peak_bytes: the most memory that the kernel has counted for the cgroup so far.
            is_loading: False when the load is complete.
        """
        start_s = time.monotonic()
        if start_s < self.next_s:
            return None
        now = look()
        end_s = time.monotonic()
        self.next_s = end_s + max(_EVERY_S, _SHARE * (end_s - start_s))
        charges = [each for each in (peak_bytes, now.peak_bytes) if each is not None]
        pages = _since(before.refaults, now.refaults)
        if max(charges, default=self._limit_bytes) < self._limit_bytes:
            return None
        return thrashing.proof(
            self._reference,
            after_ns=time.monotonic_ns() - self._started_ns,
            reread_bytes=None if pages is None else pages * os.sysconf("SC_PAGE_SIZE"),
            waited_ns=_since(before.some_ns, now.some_ns),
            is_loading=is_loading,
        )


def _since(before: int | None, now: int | None) -> int | None:
    return None if now is None else now - (before or 0)
