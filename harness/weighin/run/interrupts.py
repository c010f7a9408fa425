"""Ctrl-C and SIGTERM become one ``Interrupted``, raised where nothing is left half done by it.

Signals belong to the whole process, and so does this module's state.
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
    """Raise ``Interrupted`` inside when the user stops the run; only once, to let it clean up."""
    before = {each: signal.signal(each, _take) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        _state.wanted = _state.raised = _state.put_off = False


@contextmanager
def put_off() -> Iterator[None]:
    """Let a stop wait for the end of this block: it starts, records or removes something."""
    before, _state.put_off = _state.put_off, True
    try:
        yield
    finally:
        _state.put_off = before
    if _state.wanted and not _state.raised and not before:
        _stop()


@contextmanager
def allowed() -> Iterator[None]:
    """Take a stop at once inside ``put_off``, while nothing is done but waiting."""
    before, _state.put_off = _state.put_off, False
    try:
        check()
        yield
    finally:
        _state.put_off = before


def check() -> None:
    """Raise ``Interrupted`` where a stop is wanted, even if one was raised and got lost."""
    if _state.wanted:
        _stop()


def _take(*_: object) -> None:
    _state.wanted = True
    if not _state.put_off and not _state.raised:
        _stop()


def _stop() -> None:
    _state.raised = True
    raise Interrupted("stopped; nothing is left running")
