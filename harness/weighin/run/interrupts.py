"""Turn Ctrl-C, SIGTERM and SIGHUP into an exception, which a ``put_off`` block delays to its end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from weighin.errors import Interrupted

STOPPED: Final = "stopped; nothing is left running"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(KeyboardInterrupt):
    """A signal stopped weighin outside of a run. A bare KeyboardInterrupt inside ``exec`` makes Python end by SIGINT."""


class _State:
    """What a process has once, as it has one handler for each signal."""

    error: type[BaseException] | None = None  # None outside of ``stoppable``
    wanted = raised = put_off = False


@contextmanager
def stoppable(error: type[BaseException] = Interrupted) -> Iterator[None]:
    """In the ``with`` block, raise ``error`` at the first signal, and ignore later ones. Blocks may be
    nested. A signal that this process ignores stays ignored: SIGHUP under nohup, SIGINT in the background.
    """
    outer, _State.error = _State.error, error
    if outer is None:
        # ``ignore`` may have been called since the last block.
        _State.wanted = _State.raised = False
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    for each, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(each, _take)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        _State.error = outer
        if outer is None:
            _State.wanted = _State.raised = _State.put_off = False


@contextmanager
def put_off() -> Iterator[None]:
    """If a signal arrives in the ``with`` block, raise its exception only at the end of the block."""
    before, _State.put_off = _State.put_off, True
    try:
        yield
    finally:
        _State.put_off = before
    if not before and not _State.raised:
        check()


@contextmanager
def allowed() -> Iterator[None]:
    """In the ``with`` block, raise a signal's exception immediately, even inside ``put_off``."""
    before, _State.put_off = _State.put_off, False
    try:
        check()
        yield
    finally:
        _State.put_off = before


def ignore() -> None:
    """Ignore all signals from now on, because the results are complete."""
    _State.raised = True


def check() -> None:
    """Raise the exception of a signal that has arrived, even if other code has already caught it."""
    if _State.wanted:
        _State.raised = True
        raise (_State.error or Interrupted)(STOPPED)


def _take(*_: object) -> None:
    _State.wanted = True
    if not _State.put_off and not _State.raised:
        check()
