"""Turn Ctrl-C and SIGTERM into one ``Interrupted`` exception, raised only between complete steps.

Signal handlers exist once per process, and so does this module's state.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weighin.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class _State:
    wanted: bool = False
    raised: bool = False
    put_off: bool = False


_state = _State()


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise ``Interrupted`` in this block on the first signal; ignore later signals in clean-up."""
    before = {each: signal.signal(each, _take) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        _state.wanted = _state.raised = _state.put_off = False


@contextmanager
def put_off() -> Iterator[None]:
    """Delay an interrupt to the end of this block, so that the step in the block is completed."""
    before, _state.put_off = _state.put_off, True
    try:
        yield
    finally:
        _state.put_off = before
    if _state.wanted and not _state.raised and not before:
        _stop()


@contextmanager
def allowed() -> Iterator[None]:
    """Allow an immediate interrupt in a block that only waits, inside a block of ``put_off``."""
    before, _state.put_off = _state.put_off, False
    try:
        check()
        yield
    finally:
        _state.put_off = before


def check() -> None:
    """Raise ``Interrupted`` if a signal arrived, even if other code caught an earlier exception."""
    if _state.wanted:
        _stop()


def _take(*_: object) -> None:
    _state.wanted = True
    if not _state.put_off and not _state.raised:
        _stop()


def _stop() -> None:
    _state.raised = True
    raise Interrupted("stopped; nothing is left running")
